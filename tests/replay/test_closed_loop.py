"""Sessions in a closed loop: the queue, the time to the first token, and what helps."""

import random
from itertools import pairwise

import pytest
from replays import from_ids

from kvoffload.errors import ConfigError
from kvoffload.replay.closed_loop import HELPED, Loop, of_oracle, of_policy, run
from kvoffload.replay.loop_stores import Oracle
from kvoffload.replay.sessions import gaps_of, sessions_of
from kvoffload.replay.synthetic import SyntheticOptions, timed
from kvoffload.replay.trace import from_timed


def sessions_in_turn(number, turns, length, pause_s=1.0):
    """Sessions that ask for the same chunks each time."""
    return from_timed(
        "turns",
        (
            (pause_s * turn, [f"{session}:{i}" for i in range(length)])
            for turn in range(turns)
            for session in range(number)
        ),
    )


@pytest.fixture(scope="module")
def agents():
    return from_timed("agent", timed("agent", SyntheticOptions(seed=5, requests=3000)))


def test_a_later_prompt_continues_the_session_that_it_extends():
    trace = from_timed(
        "t",
        [
            (0, ["s", "a", "b"]),
            (1, ["s", "c"]),
            (2, ["s", "a", "b2", "d"]),  # b was a partial block
            (5, ["s", "c", "e"]),
            (9, ["s", "a", "b2", "d", "f"]),
        ],
    )
    sessions = sessions_of(trace.requests)
    assert sessions == [[0, 2, 4], [1, 3]]
    assert list(gaps_of(trace.requests, sessions)) == [2, 4, 7, float("inf"), float("inf")]


@pytest.mark.parametrize("workload", ["agent", "chat"])
def test_sessions_of_a_made_load_are_mostly_found(workload):
    trace = from_timed(workload, timed(workload, SyntheticOptions(requests=1000)))
    sessions = sessions_of(trace.requests)
    assert sum(map(len, sessions)) == 1000
    for session in sessions:
        for before, after in pairwise(session):
            shared = set(trace.requests[before]) & set(trace.requests[after])
            assert 2 * len(shared) > len(trace.requests[before])


def test_five_sessions_in_the_queue_for_four_sessions_memory():
    trace = sessions_in_turn(5, 400, 16)
    loop = Loop(sessions=5, slots=64, prefill=16, block_tokens=16, seconds=1500)
    now = of_policy(trace, loop, "handicap", "")
    kept = of_policy(trace, loop, "handicap", "waiting")
    assert now.hit_rate == 0
    assert kept.hit_rate >= 0.6
    assert kept.per_hour > 1.5 * now.per_hour
    assert kept.mean_s < now.mean_s / 1.5
    assert of_oracle(trace, loop).hit_rate >= kept.hit_rate


@pytest.mark.parametrize("policy", ["lru", "arc", "handicap"])
def test_without_a_queue_keeping_changes_nothing(agents, policy):
    loop = Loop(sessions=4, slots=200, prefill=1e9, block_tokens=16, seconds=600)
    now = of_policy(agents, loop, policy, "")
    assert 0 < now.hit_rate < 1
    assert of_policy(agents, loop, policy, "waiting") == now


def test_the_time_to_the_first_token_is_the_wait_and_the_missing_part():
    trace = sessions_in_turn(1, 100, 10, pause_s=50)
    loop = Loop(sessions=1, slots=100, prefill=100, block_tokens=10, seconds=2000)
    served = of_policy(trace, loop, "lru", "")
    assert served.hit_rate == 1
    assert served.mean_s == pytest.approx(0.01)  # one token is computed
    assert served.per_hour == pytest.approx(3600 / 50.01, rel=0.05)
    nothing = of_policy(trace, Loop(1, 1, 100, 10, 2000), "lru", "")
    assert nothing.mean_s == pytest.approx(1.0, rel=0.11)


def test_an_engine_that_is_too_slow_is_asked_less():
    trace = sessions_in_turn(8, 200, 10)
    fast, slow = (of_policy(trace, Loop(8, 20, rate, 10, 600), "lru", "") for rate in (10_000, 100))
    assert fast.per_hour > 4 * slow.per_hour
    assert slow.mean_s > 4


@pytest.mark.parametrize("slots", [100, 250, 600])
def test_the_oracle_of_sessions_is_not_passed(agents, slots):
    loop = Loop(sessions=12, slots=slots, prefill=2000, block_tokens=64, seconds=1200)
    oracle = of_oracle(agents, loop)
    found = {helped: of_policy(agents, loop, "handicap", helped) for helped in HELPED}
    for served in found.values():
        assert served.hit_rate <= oracle.hit_rate + 0.005
    assert found["both"].hit_rate > found[""].hit_rate
    assert found["both"].hit_rate > 0.8 * oracle.hit_rate


def test_the_oracle_holds_no_more_than_fits(agents):
    clock = [0.0]
    oracle = Oracle(150, lambda: clock[0])
    loop = Loop(sessions=9, slots=150, prefill=3000, block_tokens=64, seconds=300)
    sizes = []
    ended = oracle.ended

    def watched(asked):
        ended(asked)
        sizes.append(len(oracle._held))

    oracle.ended = watched
    run(agents, loop, oracle, clock)
    assert 140 < max(sizes) <= 150


@pytest.mark.parametrize("policy", ["lru", "arc", "handicap"])
def test_host_memory_larger_than_the_trace_holds_all_of_it(agents, policy):
    loops = (Loop(9, slots, 3000, 64, 300) for slots in (agents.distinct, 10**18))
    enough, huge = (of_policy(agents, loop, policy, "both") for loop in loops)
    assert huge == enough


def test_the_same_seed_runs_the_same_loop(agents):
    loop = Loop(sessions=9, slots=150, prefill=3000, block_tokens=64, seconds=300)
    once, again = (of_policy(agents, loop, "handicap", "both") for _ in range(2))
    assert once == again
    other = Loop(9, 150, 3000, 64, 300, seed=random.Random(1).randrange(1, 99))
    assert of_policy(agents, other, "handicap", "both") != once


def test_a_trace_without_times_has_no_pauses():
    with pytest.raises(ConfigError, match="no times"):
        of_policy(from_ids("t", [[1, 2], [1, 2, 3]]), Loop(1, 9, 1, 1), "lru", "")
