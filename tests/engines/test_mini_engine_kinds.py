"""Models of other kinds than Llama give the same tokens with offloading as without.

Hybrid (full and windowed layers), latent attention, recurrent states, and all of them in one model:
random conversations on a cache just large enough for one request, over host memory and a disk, with
preemptions and, at times, damaged stores. The reference has room for everything and no tiers.
"""

import random
import time

import msgspec
import pytest
import torch

from kvoffload.demo import Engine, SamplingParams
from kvoffload.demo.runner import plan_kv_cache
from kvoffload.errors import ConfigError
from tests.support.block_checks import check_manager
from tests.support.layer_kinds import hybrid_engine

KINDS = {
    "full and window": ["full", "window"],
    "one full, two windows": ["window", "window", "full"],
    "windows only": ["window"],
    "latent": ["latent"],
    "full and state": ["state", "full"],
    "states only": ["state"],
    "full, window and state": ["full", "window", "state", "window"],
}
IN_A_PROCESS = ("latent", "full, window and state")
"""Served by a process in one test each: these have all kinds of layers."""
MAX_LEN = 96


def settings(tiny, kinds, block_size=4, **more):
    model = {
        **tiny,
        "num_layers": {1: 2, 2: 4, 3: 3, 4: 4}[len(kinds)],
        "layer_kinds": kinds,
        "sliding_window": 13,
        "latent_size": 16,
        "state_channels": 12,
        "state_size": 4,
    }
    return {
        "model": model,
        "block_size": block_size,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 5,
        "kv_cache_bytes": "8MiB",
        **more,
    }


def over_disk(root, **more):
    """Return settings of host memory over a disk."""
    disk = {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0}
    common = {"cpu_bytes": "1MiB", "io": "thread", "blocks_per_chunk": 1, "load_timeout_s": 5.0}
    return {**common, "backends": [disk], **more}


def smallest_cache(config):
    """Bytes that hold one request of the greatest length, and little more."""
    parsed = hybrid_engine(config)
    for size in range(1 << 14, 1 << 24, 1 << 12):
        try:
            plan_kv_cache(msgspec.structs.replace(parsed, kv_cache_bytes=size))
        except ValueError:
            continue
        return size
    raise AssertionError("no size fits")


def conversations(seed):
    """Prompts that share openings and come back longer, with what to ask of each."""
    draw = random.Random(seed)
    opening = [draw.randrange(256) for _ in range(40)]
    talks = [
        opening[: draw.choice([0, 17, 40])]
        + [draw.randrange(256) for _ in range(draw.randint(20, 35))]
        for _ in range(6)
    ]
    requests = []
    for number in range(12):
        talk = talks[number % 6]
        params = SamplingParams(
            max_tokens=draw.randint(1, 8), temperature=draw.choice([0, 1]), seed=number
        )
        requests.append((list(talk), params))
        talk += [draw.randrange(256) for _ in range(draw.randint(0, 6))]
    return requests


def serve(config, requests, damage=None):
    """Serve the requests a few at a time; returns tokens of each, and what came from where."""
    results, media, preemptions = [], {}, 0
    with Engine(hybrid_engine(config)) as engine:
        if config.get("offload"):
            while not engine.connector._spec.tiers["disk"].is_complete:
                time.sleep(0.001)
        for start in range(0, len(requests), 3):
            batch = requests[start : start + 3]
            begun = time.monotonic()
            ids = [engine.add_request(prompt, params) for prompt, params in batch]
            done = {}
            while any(name not in done for name in ids):
                done.update((r.request_id, r) for r in engine.step())
                assert time.monotonic() - begun < 60, "a request hangs"
            for name in ids:
                results.append(done[name].token_ids)
                preemptions += done[name].preemptions
                for medium, count in done[name].cached_tokens.items():
                    media[medium] = media.get(medium, 0) + count
            check_manager(engine.manager)
            engine.connector.flush()
            if damage is not None:
                damage()
    return results, media, preemptions


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_without_offloading(tiny, tmp_path, kinds, seed):
    base = settings(tiny, KINDS[kinds], block_size=[8, 4][seed], seed=seed)
    requests = conversations(seed)
    expected, _, _ = serve(base, requests)
    form = "process" if seed == 0 and kinds in IN_A_PROCESS else "thread"
    small = {
        **base,
        "kv_cache_bytes": smallest_cache(base),
        "max_num_batched_tokens": [96, 9][seed],
        "offload": over_disk(tmp_path, io=form, blocks_per_chunk=[1, 2][seed]),
    }
    got, media, _ = serve(small, requests)
    assert got == expected
    # A model of states alone keeps so few blocks that none has to leave the GPU.
    assert media.get("CPU", 0) > 0 or kinds == "states only"
    # A new process-to-be on the same folder: from the disk now.
    again, media, _ = serve(small, requests)
    assert again == expected
    assert media.get("DISK", 0) > 0


@pytest.mark.parametrize("kinds", KINDS)
def test_a_token_does_not_depend_on_how_its_prompt_was_cut(tiny, kinds):
    prompt = [random.Random(3).randrange(256) for _ in range(50)]
    answers = set()
    for tokens in (7, 16, 96):
        config = settings(tiny, KINDS[kinds], max_num_batched_tokens=tokens)
        with Engine(hybrid_engine(config)) as engine:
            result = engine.generate([prompt, prompt[:20]], SamplingParams(max_tokens=12))
            answers.add(tuple(r.token_ids for r in result))
    assert len(answers) == 1


@pytest.mark.parametrize("kinds", ["window", "state", "latent", "full"])
def test_a_layer_of_each_kind_sees_what_it_should(tiny, kinds):
    """A far token matters to all kinds but windows, which even stacked reach only so far."""
    config = settings(tiny, [kinds])
    prompt = [random.Random(3).randrange(256) for _ in range(60)]
    other = [prompt[0] ^ 1, *prompt[1:]]
    scores = []
    with Engine(hybrid_engine({**config, "enable_prefix_caching": False})) as engine:
        forward = engine.runner.forward

        def spy(work):
            scores.append(forward(work))
            return scores[-1]

        engine.runner.forward = spy
        for tokens in (prompt, other):
            engine.generate([tokens], SamplingParams(max_tokens=1))
    same = torch.equal(scores[0], scores[1])
    assert same == (kinds == "window")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("full", {"rope_theta": 500000.0}),
        ("full", {"rms_norm_eps": 0.1}),
        ("window", {"sliding_window": 9}),
    ],
)
def test_the_same_weights_under_another_config_share_no_chunks(tiny, tmp_path, kind, change):
    config = settings(tiny, [kind], offload=over_disk(tmp_path, cpu_bytes="256KiB"))
    other = {**config, "model": {**config["model"], **change}}
    prompt = list(range(1, 70))
    serve(config, [(prompt, SamplingParams(max_tokens=1))])
    expected, _, _ = serve({**other, "offload": None}, [(prompt, SamplingParams(max_tokens=8))])
    got, media, _ = serve(other, [(prompt, SamplingParams(max_tokens=8))])
    assert got == expected
    assert not media.get("DISK")
    _, media, _ = serve(config, [(prompt, SamplingParams(max_tokens=1))])
    assert media["DISK"]


@pytest.mark.parametrize("kinds", KINDS)
def test_a_prompt_on_disk_that_host_memory_cannot_take_whole_is_served(tiny, tmp_path, kinds):
    """A load is all or nothing here, and needs room for the chunks of all groups at once."""
    config = settings(tiny, KINDS[kinds], offload=over_disk(tmp_path, cpu_bytes="4MiB"))
    requests = [(list(range(1, 90)), SamplingParams(max_tokens=6))]
    expected, _, _ = serve(config, requests)
    loaded = set()
    for kib in (16, 32, 64, 96, 128):
        try:
            less = over_disk(tmp_path, cpu_bytes=f"{kib}KiB")
            got, media, _ = serve({**config, "offload": less}, requests)
        except ConfigError:
            continue  # not even one chunk of each size
        assert got == expected
        loaded.add(media.get("DISK", 0))
    assert max(loaded) > 0
