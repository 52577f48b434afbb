"""More demand than space: preemptions, aborts, resets; nothing is stuck, nothing pinned."""

import random

import pytest

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]


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
