"""Who may hit whose chunks: salts, adapters, ranks; what the engine says when set up wrongly."""

import tempfile
import threading
import time

import pytest

from tests.engines.vllm_engine.adapters import make_adapter
from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(1800)


def settings(root, **more):
    return {
        "cpu_bytes": "64MiB",
        "backends": [{"type": "disk", "root": str(root), "min_free": 0}],
        **more,
    }


def test_salts_adapters_events_and_a_failure_policy_that_is_warned_of(
    start, models, prompts, tmp_path
):
    endpoint = f"ipc://{tempfile.mkdtemp()}/events"  # a socket's path must not be long
    events = listen(endpoint)
    adapters = [make_adapter(tmp_path / name, models(), seed) for seed, name in enumerate("ab")]
    engine = start(
        settings(tmp_path / "kv"),
        policy="fail",  # no load is to fail here; what is said of it is looked for below
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
        },
    )
    prompt = prompts(1, 1000)

    def cached(**who):
        engine.ask("quiet")
        engine.ask("reset")
        answer = engine.generate(prompt, **who)
        return answer["cached"][0], answer["tokens"][0]

    assert cached(salts=["anna"])[0] == 0
    assert cached(salts=["anna"])[0] == 992
    assert cached(salts=["ben"])[0] == 0
    assert cached()[0] == 0
    one, other = (["a", 1, adapters[0]], ["b", 2, adapters[1]])
    computed = cached(loras=[one])
    assert computed[0] == 0
    assert cached(loras=[one]) == (992, computed[1])
    assert cached(loras=[other])[0] == 0
    engine.ask("quiet")
    assert "A FAILED LOAD WILL FAIL ITS REQUEST" in engine.log
    wanted = {b"BlockStored", b"CPU", b"STORAGE"}
    until = time.monotonic() + 60
    while missing := [word for word in wanted if word not in b"".join(events)]:
        assert time.monotonic() < until, f"never published: {missing}"
        time.sleep(0.1)
    engine.kill()


def listen(endpoint):
    """Collect what the engine publishes."""
    import zmq

    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(endpoint)
    collected = []

    def run():
        while True:
            collected.append(subscriber.recv_multipart()[-1])

    threading.Thread(target=run, daemon=True).start()
    return collected


@pytest.mark.long
def test_two_ranks_hit_after_a_restart_and_lose_a_chunk_when_one_rank_does(
    start, prompts, tmp_path
):
    root = tmp_path / "kv"
    engine = start(settings(root), ranks=2)
    prompt = prompts(1, 1000)
    told = engine.generate(prompt)["tokens"]
    engine.ask("quiet")
    engine.ask("reset")
    answer = engine.generate(prompt)
    assert (answer["cached"], answer["tokens"]) == ([992], told)
    engine.ask("quiet")
    engine.kill()
    folders = [folder for folder in root.iterdir() if len(folder.name) == 64]
    assert len(folders) == 2, "each rank has a namespace of its own"
    # One rank's part of some chunks in the middle is gone.
    keys = [{chunk.key for chunk in stored_in(folder)} for folder in folders]
    assert keys[0] == keys[1]
    assert len(keys[0]) >= 31
    for chunk in stored_in(folders[1])[::4]:
        chunk.flip(-8)
    again = start(settings(root), ranks=2)
    answer = again.generate(prompt)
    assert answer["tokens"] == told
    metrics = again.ask("quiet")
    assert metrics["vllm:kvoffload_events recomputed_blocks"] > 0
    assert metrics["vllm:kvoffload_host_chunks_busy"] == 0
    again.kill()


@pytest.mark.long
def test_two_ranks_with_the_same_bytes_store_one_copy(start, prompts, tmp_path):
    """With latent attention each rank has the whole KV cache."""
    root = tmp_path / "kv"
    options = {"kind": "mla", "ranks": 2}
    asked = prompts(3, 1000)
    plain = start(**options)
    told = plain.generate(asked)["tokens"]
    plain.kill()
    assert len({tuple(tokens) for tokens in told}) == 3
    engine = start(settings(root), **options)
    assert engine.generate(asked)["tokens"] == told
    engine.ask("quiet")
    engine.ask("reset")
    # Host memory of both ranks has it all.
    answer = engine.generate(asked)
    assert (answer["cached"], answer["tokens"]) == ([992] * 3, told)
    engine.ask("quiet")
    engine.kill()
    (folder,) = (folder for folder in root.iterdir() if len(folder.name) == 64)
    chunks = stored_in(folder)
    # 62 chunks of each prompt, and what was generated: each of them once.
    assert len(chunks) == len({chunk.key for chunk in chunks}) >= 3 * 62
    again = start(settings(root), **options)
    for prompt, right in zip(asked, told, strict=True):
        answer = again.generate([prompt])
        assert (answer["cached"], answer["tokens"]) == ([992], [right])
    again.kill()


@pytest.mark.long
def test_a_misspelt_setting_stops_the_engine_with_a_sentence(start, tmp_path):
    engine = start({"cpu_bites": "1GiB"}, ready=False)
    assert "error" in engine.answer()
    assert "unknown key; did you mean 'cpu_bytes'?" in engine.log
    engine.kill()
