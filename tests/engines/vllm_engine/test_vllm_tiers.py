"""Hits from host memory, from disk after a kill, in a second instance; outputs stay the same."""

import os
import time

import pytest

from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def plain(start, prompts):
    """What vLLM alone answers."""
    engine = start()
    answers = engine.generate(prompts(4, 1000))["tokens"]
    engine.kill()
    return answers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def settings(root):
    return {
        "cpu_bytes": "256MiB",
        "backends": [{"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}],
        "lookup_timeout_s": 30.0,  # until the folder is listed, however long it takes
    }


@pytest.fixture(scope="module")
def first(start, root):
    """In vLLM's own processes; the others have one each, and share its chunks."""
    return start(settings(root), distributed_executor_backend="mp")


def test_the_model_runner_is_the_one_asked_for(first):
    asked_for_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    assert ("Using V2 Model Runner" in first.log) == asked_for_v2


def test_outputs_are_those_of_vllm_alone(first, plain, prompts):
    answer = first.generate(prompts(4, 1000))
    assert answer["tokens"] == plain
    assert answer["cached"] == [0, 0, 0, 0]


def test_after_a_reset_of_the_prefix_cache_host_memory_still_hits(first, plain, prompts):
    first.ask("quiet")
    assert first.ask("reset")
    answer = first.generate(prompts(4, 1000))
    assert answer["tokens"] == plain
    assert answer["cached"] == [992] * 4  # all but the last, incomplete block


def test_a_second_instance_hits_what_the_first_one_stored(first, start, root, plain, prompts):
    first.ask("quiet")
    wait_for_chunks(root, 4 * 31)
    second = start(settings(root))
    answer = second.generate(prompts(4, 1000))
    assert answer["tokens"] == plain
    assert answer["cached"] == [992] * 4
    # ... and the other way: what the second stores while both run, the first finds.
    new = prompts(1, 1000, seed=7)
    told = second.generate(new)["tokens"]
    second.ask("quiet")
    wait_until_first_sees(first, second, root, 5 * 31, prompts)
    answer = first.generate(new)
    assert answer["tokens"] == told
    assert answer["cached"] == [992]
    second.kill()


@pytest.mark.long
def test_dummy_weights_of_another_seed_hit_nothing(start, root, prompts):
    for seed in range(2):
        engine = start(settings(root), load_format="dummy", seed=seed)
        assert engine.generate(prompts(4, 1000))["cached"] == [0, 0, 0, 0]
        engine.ask("quiet")
        engine.kill()


def test_asleep_and_awake_again_it_hits_until_sleep_empties_the_caches(first, prompts):
    new = prompts(1, 1000, seed=8)
    told = first.generate(new, max_tokens=1)["tokens"]
    first.ask("sleep", level=0)  # with stores under way
    first.ask("quiet")
    assert first.ask("reset")
    answer = first.generate(new, max_tokens=1)
    assert [answer["tokens"], answer["cached"]] == [told, [992]]
    # Deeper, vLLM empties all caches, the connector's too: weights may change meanwhile.
    first.generate(prompts(1, 1000, seed=9), max_tokens=1)
    first.ask("sleep", level=1)
    for cached in ([0], [992]):
        answer = first.generate(new, max_tokens=1)
        assert [answer["tokens"], answer["cached"]] == [told, cached]
        first.ask("quiet")
        assert first.ask("reset")


def test_killed_and_started_anew_it_hits_from_disk_until_it_is_reset(
    first, start, root, plain, prompts
):
    first.kill()
    again = start(settings(root), distributed_executor_backend="mp")
    answer = again.generate(prompts(4, 1000))
    assert answer["tokens"] == plain
    assert answer["cached"] == [992] * 4
    metrics = again.ask("metrics")
    assert metrics["vllm:kv_offload_load_bytes"] > 0
    # Resetting the connector invalidates every tier.
    again.ask("quiet")
    assert again.ask("reset", connector=True)
    answer = again.generate(prompts(4, 1000))
    assert answer["cached"] == [0, 0, 0, 0]
    assert answer["tokens"] == plain
    again.ask("quiet")
    assert again.ask("reset")
    assert again.generate(prompts(4, 1000))["cached"] == [992] * 4
    assert again.ask("quiet")["vllm:kvoffload_host_chunks_busy"] == 0
    again.kill()


def wait_for_chunks(root, count, limit_s=300):
    until = time.monotonic() + limit_s
    while len(stored_in(root)) < count:
        assert time.monotonic() < until, f"{len(stored_in(root))} of {count} chunks"
        time.sleep(0.1)


def wait_until_first_sees(first, second, root, count, prompts):
    """Wait until the first engine has looked at the folder, in which there are so many chunks.

    It looks now and then. The second engine stores prompts of one block, and the first is asked one
    after the other: what it hits was there when it looked, and so was all that is older.
    """
    wait_for_chunks(root, count)
    markers = prompts(40, 40, seed=8)
    second.generate(markers, 1)
    second.ask("quiet")
    wait_for_chunks(root, count + len(markers))
    for marker in markers:
        if first.generate([marker], 1)["cached"] == [32]:
            return
        time.sleep(0.5)
    raise AssertionError("the first engine never saw what the second one stored")
