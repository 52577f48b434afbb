"""Requests that queue in a real vLLM keep their chunks, and get them early from a disk."""

import pytest

pytestmark = pytest.mark.timeout(1800)
TOKENS, CACHED = 1000, 992
ALONE = {"max_num_seqs": 1, "num_gpu_blocks_override": 40, "max_model_len": 1200}
"""One request runs at a time, and GPU memory keeps one prompt."""


def settings(chunks, root=None, **more):
    disk = {"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}
    return {
        "cpu_bytes": chunks * BLOCK_BYTES,
        "blocks_per_chunk": 1,
        "backends": [disk] if root else [],
        "lookup_timeout_s": 30.0,
        "canary": False,
        **more,
    }


BLOCK_BYTES = 64 << 10
"""At least what a block of the tiny model takes."""


@pytest.fixture(scope="module")
def plain(start, prompts):
    """What vLLM alone answers."""
    engine = start()
    answers = engine.generate(prompts(10, TOKENS), max_tokens=4)["tokens"]
    engine.kill()
    return answers


def test_five_sessions_in_memory_for_four_hit_nearly_what_is_possible(start, plain, prompts):
    engine, five = start(settings(4 * 32), **ALONE), prompts(10, TOKENS)[:5]
    rounds = 6
    answer = engine.generate(five * rounds, max_tokens=4)
    engine.kill()
    assert answer["tokens"] == plain[:5] * rounds
    later = answer["cached"][10:]
    print("hits of later rounds", sum(later) / (len(later) * CACHED))
    assert sum(later) >= 0.6 * len(later) * CACHED


@pytest.mark.long  # test_vllm_queue_steps has the same without a model
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_queued_prompts_come_early_from_disk(start, plain, prompts, tmp_path, backend):
    alone = {**ALONE, "distributed_executor_backend": backend}
    engine, ten = start(settings(7 * 32, tmp_path), **alone), prompts(10, TOKENS)
    assert engine.generate(ten, max_tokens=4)["tokens"] == plain
    engine.ask("quiet")
    answer = engine.generate(ten, max_tokens=4)
    engine.ask("quiet")
    found = engine.ask("metrics")
    engine.kill()
    assert answer["tokens"] == plain
    assert answer["cached"] == [CACHED] * 10
    assert found["vllm:kvoffload_queue_chunks read_early"] > 0
    assert found["vllm:kvoffload_queue_requests"] == 0
    assert found["vllm:kvoffload_queue_kept_bytes"] == 0
