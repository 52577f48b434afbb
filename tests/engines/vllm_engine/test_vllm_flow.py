"""Loads from a slow tier: declined if computing is quicker, and never ended while chunks come."""

import time

import pytest

from kvoffload.config import KNOWN_HINTS
from tests.engines.vllm_engine.counted import events

pytestmark = pytest.mark.timeout(900)
LENGTH, CACHED, CHUNKS = 1000, 992, 31  # whole blocks of 32 tokens in a prompt
TIMEOUT_S = 4.0
TRICKLE_S = 0.15
"""Before each chunk: a load of all of them takes longer than the timeout."""


@pytest.fixture(scope="module")
def engine(start, faulty_tier, tmp_path_factory):
    """Chunks only pass through host memory: all loads come from the tier."""
    env, plan, _ = faulty_tier
    root = tmp_path_factory.mktemp("store")
    extra = {
        "cpu_bytes": 0,
        "staging_bytes": "16MiB",
        "backends": [{"type": "faulty", "root": str(root / "kv"), "plan": plan}],
        "client_hints": KNOWN_HINTS,
        "load_timeout_s": TIMEOUT_S,
    }
    return start(extra, env=env)


@pytest.fixture(scope="module")
def told(engine, prompts):
    """What is right for four prompts, computed before anything was stored."""
    answer = engine.generate(prompts(4, LENGTH))
    engine.ask("quiet")
    return answer["tokens"]


def generate(engine, wanted, **more):
    """Ask for prompts that GPU memory has forgotten; return also how long it took."""
    engine.ask("quiet")
    assert engine.ask("reset")
    begun_s = time.monotonic()
    answer = engine.generate(wanted, **more)
    return answer, time.monotonic() - begun_s


def test_loads_at_a_slow_but_steady_rate_never_time_out(engine, prompts, told, set_plan):
    """The second load waits for the first one, which alone takes longer than the timeout."""
    set_plan(trickle={"seconds": TRICKLE_S})
    answer, took_s = generate(engine, prompts(4, LENGTH)[:2])
    set_plan()
    assert answer["cached"] == [CACHED] * 2
    assert answer["tokens"] == told[:2]
    assert took_s > 2 * CHUNKS * TRICKLE_S
    assert not events(engine)["failed_deadline"]


def test_a_load_that_stalls_ends_its_timeout_after_the_last_chunk(engine, prompts, told, set_plan):
    set_plan(trickle={"seconds": TRICKLE_S, "chunks": 20})
    answer, took_s = generate(engine, prompts(4, LENGTH)[2:3])
    set_plan()
    assert answer["tokens"] == told[2:3]
    assert 20 * TRICKLE_S + TIMEOUT_S <= took_s < 20 * TRICKLE_S + 5 * TIMEOUT_S
    counted = events(engine)
    assert counted["failed_deadline"] == counted["recomputed_blocks"] == CHUNKS - 20


def test_a_tier_slower_than_computing_is_declined_until_it_is_fast(engine, prompts, told, set_plan):
    wanted = prompts(4, LENGTH)
    for seed in range(1, 6):  # the speed of computing is measured
        engine.generate(prompts(1, LENGTH, seed=seed))
    engine.ask("quiet")
    set_plan(trickle={"seconds": 0.1})
    for _ in range(4):
        if not generate(engine, wanted[:1])[0]["cached"][0]:
            break
    before = events(engine)["lookups_faulty_declined"]
    whole = (0, 1, 3)  # the tier lost a part of the third prompt when it stalled
    for i in whole:
        answer, _ = generate(engine, wanted[i : i + 1], hints={"explain": True})
        assert answer["cached"] == [0]
        assert answer["tokens"] == told[i : i + 1]
        assert answer["told"][0]["kvoffload"]["chunks"] == [["too_slow"] * CHUNKS]
    assert events(engine)["lookups_faulty_declined"] == before + len(whole)
    set_plan()
    end_s = time.monotonic() + 120
    while generate(engine, wanted[:1])[0]["cached"] == [0]:
        assert time.monotonic() < end_s, "the tier was never tried again"
        time.sleep(0.2)
    for i in whole:
        answer, _ = generate(engine, wanted[i : i + 1])
        assert answer["cached"] == [CACHED]
        assert answer["tokens"] == told[i : i + 1]
