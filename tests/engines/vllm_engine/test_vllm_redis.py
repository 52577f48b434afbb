"""Two vLLMs, one Redis: each hits what the other stored, and goes on while the server is ill.

A real redis-server, two real engines in processes of their own. The first engine has host memory
for two of six prompts, so that what it asks for again comes from Redis while the server is killed.
"""

import time

import pytest

from tests.engines.vllm_engine.counted import events
from tests.support import redis_server
from tests.support.server_faults import FAULTS

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(redis_server.BINARY is None, reason=redis_server.MISSING),
]

LENGTH, CACHED, CHUNKS = 1000, 992, 31  # whole blocks of 32 tokens in a prompt
PROMPTS = 6
UNHURRIED = {"timeout_s": 2.0, "connect_timeout_s": 2.0, "lookup_timeout_s": 2.0}
"""A chunk is stored once: one that a busy machine loses stays a miss."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = redis_server.RedisServer(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


def settings(server, host):
    return {
        "cpu_bytes": host,
        "backends": [{"type": "redis", "url": server.url, **UNHURRIED}],
        "load_timeout_s": 10.0,
        "lookup_timeout_s": 5.0,
        "store_timeout_s": 10.0,
    }


@pytest.fixture(scope="module")
def first(start, server):
    return start(settings(server, 70 * 65536))


@pytest.fixture(scope="module")
def told(first, server, prompts):
    """Answers computed before anything was stored; and all of it stored in Redis."""
    answers = []
    for prompt in prompts(PROMPTS, LENGTH):
        answer = first.generate([prompt])
        assert answer["cached"] == [0]
        answers += answer["tokens"]
        first.ask("quiet")
    wait_until(lambda: num_keys(server) >= PROMPTS * CHUNKS)
    return answers


@pytest.fixture(scope="module")
def second(start, server, told):
    """Started when the first has stored: nothing is in its host memory or its KV cache."""
    return start(settings(server, "64MiB"))


def num_keys(server):
    return int(server.cli("dbsize"))


def wait_until(true, limit_s=300):
    until = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.05)


def test_a_second_instance_hits_through_redis_what_the_first_stored(second, told, prompts):
    answer = second.generate(prompts(PROMPTS, LENGTH))
    assert answer["cached"] == [CACHED] * PROMPTS
    assert answer["tokens"] == told
    metrics = second.ask("quiet")
    source = "vllm:prompt_tokens_cached_by_source external_unspecified"
    assert metrics[source] == CACHED * PROMPTS
    assert events(second)["redis_read_ok"] == CHUNKS * PROMPTS + 1  # one is the canary's


def test_the_first_hits_what_the_second_stores_while_both_run(first, second, prompts, server):
    before = num_keys(server)
    new = prompts(1, LENGTH, seed=7)
    answer = second.generate(new)
    second.ask("quiet")
    wait_until(lambda: num_keys(server) >= before + CHUNKS)
    again = first.generate(new)
    assert again["tokens"] == answer["tokens"]
    assert again["cached"] == [CACHED]


COUNTED = {
    "killed": ("redis_connect_failed", "redis_breaker_opened"),
    "paused": ("redis_connection_lost_timeout", "redis_breaker_opened"),
    "restarted empty": ("redis_read_missing", "redis_connection_lost_closed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_go_on_while_redis_is(first, told, prompts, server, traffic, fault):
    before = events(first)
    with traffic(first, prompts(PROMPTS, LENGTH), told) as running:
        running.wait_for(2 * PROMPTS)
        with FAULTS[fault](server):
            running.wait_for(2 * PROMPTS)
        running.wait_for(PROMPTS)
    told_why = events(first) - before
    assert any(told_why[reason] for reason in COUNTED[fault]), told_why
    with traffic(first, prompts(PROMPTS, LENGTH), told) as running:
        running.wait_for_hits(PROMPTS * CACHED // 2)  # back, and used again


def test_at_the_end_the_second_instance_hits_what_the_first_stores(first, second, prompts):
    """New prompts: chunks that stayed in the first's host memory are not written to Redis again.

    The server closed the second's connections as it died: its first prompt may be a miss.
    """
    for seed in range(20, 40):
        new = prompts(1, LENGTH, seed=seed)
        answer = first.generate(new)
        first.ask("quiet")
        again = second.generate(new)
        assert again["tokens"] == answer["tokens"]
        if again["cached"] == [CACHED]:
            return
        time.sleep(0.5)
    pytest.fail("no prompt that the first engine stored was a hit for the second")


def test_at_the_end_the_second_instance_has_all_it_used_in_host_memory(second, told, prompts):
    assert second.ask("reset")
    answer = second.generate(prompts(PROMPTS, LENGTH))
    assert answer["tokens"] == told
    assert answer["cached"] == [CACHED] * PROMPTS
