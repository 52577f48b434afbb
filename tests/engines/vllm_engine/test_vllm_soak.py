"""More demand than space: preemptions, aborts, resets; nothing is stuck, nothing pinned."""

import os
import random
import time

import pytest

SECONDS = float(os.environ.get("KVOFFLOAD_SOAK_S", "60"))
"""How long the random requests run; 600 and more for a campaign."""
pytestmark = [pytest.mark.timeout(1800 + 4 * SECONDS), pytest.mark.long]
TOKENS = 24


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_five_hundred_requests_with_aborts_and_preemptions(start, prompts, kind, tmp_path):
    extra = {
        "cpu_bytes": "4MiB",
        "backends": [{"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}],
    }
    engine = start(
        extra, kind=kind, num_gpu_blocks_override=100, max_num_seqs=16, max_model_len=1024
    )
    rng = random.Random(3)
    heads = [rng.choices(range(3, 512), k=64 * n) for n in range(1, 9)]
    unique, preempted = {}, 0
    for wave in range(10):
        asked = [
            rng.choice(heads)[: 32 * rng.randrange(1, 17)] + rng.choices(range(3, 512), k=40)
            for _ in range(50)
        ]
        abort = {i: rng.randrange(1, 120) for i in rng.sample(range(50), 10)}
        answer = engine.generate(asked, 48, abort=abort, limit_s=240)
        assert all(answer["reasons"]), "a request never ended"
        for i, prompt in enumerate(asked):
            if answer["reasons"][i] == "length":
                unique[tuple(prompt)] = answer["tokens"][i]
        if wave % 3 == 2:
            engine.ask("reset", connector=wave == 5)
    metrics = engine.ask("quiet")
    preempted = metrics.get("vllm:num_preemptions", 0)
    assert preempted > 0, "the test was meant to preempt"
    assert metrics["vllm:kvoffload_host_chunks_busy"] == 0
    assert metrics["vllm:kv_offload_load_bytes"] > 0
    # A sample again, alone: what was loaded under pressure was what is computed in peace.
    for prompt in rng.sample(sorted(unique), 10):
        engine.ask("reset", connector=True)
        assert engine.generate([list(prompt)], 48)["tokens"][0] == unique[prompt]
    engine.kill()


def test_random_requests_for_as_long_as_wished(start, tmp_path):
    """Common prefixes, aborts, resets and sleeps; host memory and disk evict all the time."""
    rng = random.Random(7)
    heads = [rng.choices(range(3, 512), k=64 * n) for n in range(1, 9)]
    pool = [
        rng.choice(heads)[: 32 * rng.randrange(1, 17)] + rng.choices(range(3, 512), k=40)
        for _ in range(60)
    ]
    plain = start()
    told = plain.generate(pool, TOKENS)["tokens"]
    plain.kill()
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0, "capacity": "6MiB"}
    small = {"num_gpu_blocks_override": 100, "max_num_seqs": 16, "max_model_len": 1024}
    engine = start({"cpu_bytes": "3MiB", "backends": [disk]}, **small)
    end_s, waves, held = time.monotonic() + SECONDS, 0, None
    while waves < 20 or time.monotonic() < end_s:
        asked = rng.sample(range(len(pool)), rng.randrange(1, 33))
        abort = {i: rng.randrange(1, 60) for i in range(len(asked)) if rng.random() < 0.2}
        answer = engine.generate([pool[i] for i in asked], TOKENS, abort=abort, limit_s=240)
        for i, reason, tokens in zip(asked, answer["reasons"], answer["tokens"], strict=True):
            assert reason == "aborted" or tokens == told[i], (waves, i)
        waves += 1
        if waves % 10 == 0:
            assert engine.ask("quiet")["vllm:kvoffload_host_chunks_busy"] == 0
            if rng.random() < 0.3:
                assert engine.ask("sleep", level=rng.randrange(1, 3)) is None
            held = held or engine.held()
        elif rng.random() < 0.5:
            engine.ask("reset", connector=rng.random() < 0.1)
    check_counters(engine.ask("counted"))
    threads, descriptors = engine.held()
    # A pool of threads may still have been growing; a leak would be of one or more a wave.
    assert threads <= held[0] + 4
    assert descriptors <= held[1] + 8
    engine.kill()


def check_counters(counted):
    """Check what holds when nothing runs, however often what was evicted, aborted or reset."""
    ours = {name.partition("kvoffload_")[2]: value for name, value in counted.items()}
    for name in ("resident_bytes", "load_chunks", "store_chunks", "evictions"):
        for tier in ("cpu", "disk"):
            assert ours[f"{name} {tier}{' evicted' if name == 'evictions' else ''}"] > 0, name
    for tier in ("cpu", "disk"):
        assert ours[f"resident_bytes {tier}"] <= ours[f"capacity_bytes {tier}"]
        assert ours[f"inflight_bytes {tier}"] == 0
    assert ours["waiting_chunks disk"] == ours["host_chunks_busy"] == 0
    assert not any(value for name, value in ours.items() if name.startswith("corrupt_chunks"))
    saved = ours["saved_prefill_tokens"]
    assert ours["hit_tokens cpu"] + ours["hit_tokens disk"] == saved
    assert 0 < saved <= counted["vllm:external_prefix_cache_hits"]
