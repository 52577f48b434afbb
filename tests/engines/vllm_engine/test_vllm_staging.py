"""vLLM without a cache in host memory: chunks pass through a few slots, to a disk and back."""

import pytest

pytestmark = pytest.mark.timeout(600)

LENGTH, CACHED, CHUNKS = 1000, 992, 31  # whole blocks of 32 tokens in a prompt
PROMPTS = 3
SLOTS = 12  # fewer than a prompt has chunks


@pytest.fixture(scope="module")
def engine(start, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("disk"))
    return start(
        {
            "cpu_bytes": 0,
            "staging_bytes": SLOTS * 65536,
            "backends": [{"type": "disk", "root": root, "capacity": "1GiB", "min_free": 0}],
        }
    )


def test_prompts_larger_than_the_staging_memory_come_back_from_the_disk_alone(engine, prompts):
    wanted = prompts(PROMPTS, LENGTH)
    told = []
    for prompt in wanted:
        answer = engine.generate([prompt])
        assert answer["cached"] == [0]
        told += answer["tokens"]
        engine.ask("quiet")
    # What found no room during the few steps of an answer is stored when it is asked for again.
    for _ in range(CHUNKS):
        engine.ask("reset")
        answer = engine.generate(wanted)
        assert answer["tokens"] == told
        metrics = engine.ask("quiet")
        if answer["cached"] == [CACHED] * PROMPTS:
            break
    assert answer["cached"] == [CACHED] * PROMPTS
    assert metrics["vllm:kvoffload_host_chunks_busy"] == 0
    assert metrics["vllm:prompt_tokens_cached_by_source disk"] > 0
    assert metrics.get("vllm:prompt_tokens_cached_by_source host", 0) == 0
