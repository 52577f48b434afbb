"""Kinds of models and sizes of chunks: windows, images, a latent cache, several blocks a chunk."""

import time

import pytest

from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(1800)

LENGTH = 1000


def disk(root):
    return [{"type": "disk", "root": str(root), "min_free": 0}]


def counter(engine, name):
    return engine.ask("quiet")[f"vllm:kvoffload_{name}"]


def forget(engine):
    """Let everything be stored, and GPU memory forget it."""
    engine.ask("quiet")
    assert engine.ask("reset")


# ---- a hybrid model of windows and full attention ----


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="module")
def hybrid(start, root, faulty_tier):
    """Host memory for 24 chunks, above a tier that cannot say at once what it holds."""
    env, plan, _ = faulty_tier
    extra = {
        "cpu_bytes": 24 * 32768,
        "backends": [{"type": "shy", "root": str(root), "plan": plan}],
        "lookup_timeout_s": 5.0,
        "load_timeout_s": 5.0,
        "store_timeout_s": 10.0,
    }
    return start(extra, kind="sliding", env=env, max_num_batched_tokens=256)


def test_a_load_that_host_memory_cannot_take_with_its_windows_is_shortened(hybrid, prompts, root):
    """Of the whole prompt 23 chunks of full attention fit, but not with 4 of the window.

    Of its beginning, which was a prompt as well, all do.
    """
    (prompt,) = prompts(1, 740)
    beginning = prompt[:500]
    told = {}
    files = -1
    # Writing takes turns with so little memory: ask until nothing new is written.
    while files != (files := len(stored_in(root))):
        for asked in (beginning, prompt):
            answer = hybrid.generate([asked])["tokens"][0]
            assert told.setdefault(len(asked), answer) == answer
            forget(hybrid)
            time.sleep(1.5)  # what the tier said it lacks is asked again after a second
    assert files >= 23 + 4 + 4
    assert hybrid.ask("quiet")["vllm:kvoffload_host_chunks"] <= 24
    refused = counter(hybrid, "events load_refused")
    answer = hybrid.generate([prompt])
    assert answer["tokens"] == [told[740]]
    assert answer["cached"] == [480]
    assert counter(hybrid, "events load_refused") == refused == 0


def test_lookups_that_are_never_answered_end_in_time(hybrid, prompts, set_plan):
    asked = prompts(3, LENGTH, seed=5)
    told = hybrid.generate(asked)["tokens"]
    forget(hybrid)
    set_plan({"fault": "hang", "verbs": ["contains"]})
    answer = hybrid.generate(asked, limit_s=300)
    set_plan()
    assert answer["tokens"] == told
    assert answer["reasons"] == ["length"] * 3
    assert hybrid.ask("quiet")["vllm:kvoffload_host_chunks_busy"] == 0


# ---- windows alone ----


def test_after_a_failed_load_of_windows_alone_a_prompt_is_computed_from_its_start(
    start, prompts, faulty_tier
):
    """A load brings the last window, and no block before the first one that failed."""
    env, _, set_plan = faulty_tier
    alone = {"layer_types": ["sliding_attention"] * 4}
    engine = start({"cpu_bytes": "64MiB"}, kind="sliding", env=env, hf_overrides=alone)
    wanted = prompts(2, 740)
    told = engine.generate(wanted)["tokens"]
    forget(engine)
    set_plan(copy={"fault": "fail"})
    answer = engine.generate(wanted)
    set_plan()
    assert answer["tokens"] == told
    assert engine.ask("counted")["vllm:kvoffload_events recomputed_blocks"] > 0
    engine.kill()


# ---- poolers ----


def test_a_pooler_that_needs_every_token_is_refused_at_the_start(start):
    pooler = {"runner": "pooling", "convert": "embed"}
    mean = {"pooler_config": {"seq_pooling_type": "MEAN"}}
    engine = start({"cpu_bytes": "64MiB"}, ready=False, **pooler, **mean)
    assert "error" in engine.answer()
    assert "pooler_config = 'MEAN, " in engine.log
    engine.kill()


# ---- several blocks a chunk, stored when seen a second time ----


def test_chunks_of_four_blocks_stored_when_seen_twice(start, prompts, tmp_path):
    extra = {
        "cpu_bytes": 8 * 4 * 65536,  # a prompt has 7 chunks: another one takes its place
        "backends": disk(tmp_path / "kv"),
        "blocks_per_chunk": 4,
        "store_threshold": 2,
    }
    engine = start(extra)
    prompt, other = prompts(2, LENGTH)
    whole = LENGTH // 128 * 128

    def ask(tokens):
        answer = engine.generate([tokens])
        forget(engine)
        return answer["cached"][0], answer["tokens"][0]

    told = [ask(prompt) for _ in range(4)]
    assert [cached for cached, _ in told] == [0, 0, whole, whole], "seen, stored, loaded, loaded"
    assert counter(engine, "stores_dropped cpu not_admitted") > 0
    # Five blocks are in GPU memory, the fifth the first of a chunk: its other three are loaded.
    assert engine.generate([prompt[:170]])["cached"] == [128]
    told.append(ask(prompt))
    assert told[-1][0] == whole
    for cached in (0, 0, whole):
        assert ask(other)[0] == cached
    told.append(ask(prompt))
    assert told[-1][0] == whole
    assert engine.ask("quiet")["vllm:prompt_tokens_cached_by_source disk"] >= whole - 128
    assert len({tuple(tokens) for _, tokens in told}) == 1
    engine.kill()


# ---- images ----


@pytest.mark.long
def test_the_same_image_hits_and_another_one_misses(start, prompts, tmp_path):
    extra = {"cpu_bytes": "64MiB", "backends": disk(tmp_path / "kv"), "trust_image_uuids": True}
    engine = start(extra, kind="blip2", max_model_len=2048)
    prompt = prompts(1, 500)  # behind the 32 tokens of the image

    def ask(image):
        answer = engine.generate(prompt, images=[image])
        forget(engine)
        return answer["cached"][0], answer["tokens"][0]

    first = ask(1)
    assert first[0] == 0
    assert ask(2)[0] == 0, "the same tokens behind another image"
    assert ask(1) == (512, first[1])
    assert ask(2)[0] == 512
    assert ask(None)[0] == 0
    engine.kill()


@pytest.mark.long
def test_an_image_under_the_hash_of_another_is_served_to_no_other_client(start, prompts, tmp_path):
    root = tmp_path / "kv"
    engine = start(
        {"cpu_bytes": "64MiB", "backends": disk(root), "client_hints": ["explain"]},
        kind="blip2",
        max_model_len=2048,
    )
    prompt = prompts(1, 500)

    def ask(image, **more):
        answer = engine.generate(prompt, images=[image], **more)
        forget(engine)
        return answer

    ask(1, uuids=["of a logo"])
    assert ask(2, uuids=["of a logo"])["cached"] == [0]
    (params,) = ask(2, uuids=["of a logo"], hints={"explain": True})["told"]
    assert set(params["kvoffload"]["chunks"][0]) == {"not_trusted"}
    assert not stored_in(root)
    # In the space of a salt that the gateway set, images are offloaded.
    ask(1, salts=["tenant"])
    assert ask(1, salts=["tenant"])["cached"] == [512]
    assert ask(None)["cached"] == [0]
    assert ask(None)["cached"] == [480]
    engine.kill()


# ---- a latent cache ----


@pytest.mark.long
def test_multi_head_latent_attention(start, prompts, tmp_path):
    extra = {"cpu_bytes": "64MiB", "backends": disk(tmp_path / "kv")}
    engine = start(extra, kind="mla")
    prompt = prompts(2, LENGTH)
    told = engine.generate(prompt)["tokens"]
    forget(engine)
    answer = engine.generate(prompt)
    assert (answer["cached"], answer["tokens"]) == ([992, 992], told)
    engine.kill()
