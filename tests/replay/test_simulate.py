"""Replays count what they say they count."""

import random
from itertools import combinations

import pytest
from kvoffload_policies.fifo import FIFOPolicy
from named_policies import NAMED_POLICIES
from replays import from_ids, generate, replay

from kvoffload.policies.lru import LRUPolicy
from kvoffload.replay.simulate import Level, belady, infinite, replay_levels
from kvoffload.replay.synthetic import WORKLOADS, SyntheticOptions


def requests_of(*requests):
    return from_ids("t", requests).requests


def test_only_the_contiguous_prefix_counts_as_prefix_hits():
    hits = replay(requests_of([1, 2, 3], [1, 9, 3]), LRUPolicy(10), 10)
    assert (hits.accesses, hits.prefix, hits.blocks) == (6, 1, 2)


@pytest.mark.parametrize("workload", ["agent", "chat"])
@pytest.mark.parametrize("name", ["lru", "arc", "handicap"])
def test_each_prefix_hit_is_a_block_hit(workload, name):
    requests = from_ids("t", generate(workload, SyntheticOptions(requests=300))).requests
    for capacity in (5, 100):  # less than a request, too
        hits = replay(requests, NAMED_POLICIES[name](capacity), capacity)
        bound = belady(requests, capacity)
        assert 0 < hits.prefix <= hits.blocks <= bound.blocks
        assert bound.prefix <= bound.blocks


def test_blocks_are_counted_at_the_lookup_and_not_after_the_request_has_evicted():
    hits = replay(requests_of([1, 2], [3, 1, 2]), LRUPolicy(2), 2)
    assert (hits.prefix, hits.blocks) == (0, 2)


@pytest.mark.parametrize("name", sorted(NAMED_POLICIES))
@pytest.mark.parametrize("capacity", [1, 2, 3, 10])
def test_a_request_that_names_a_block_twice_has_it_once(name, capacity):
    requests = requests_of([1, 2, 1, 2], [1, 1, 2, 3], [2, 2])
    hits = replay(requests, NAMED_POLICIES[name](capacity), capacity)
    assert hits.accesses == 10
    if capacity == 10:
        assert (hits.prefix, hits.blocks) == (5, 5)


def test_tails_leave_before_heads():
    hits = replay(requests_of([1, 2, 3], [7], [1, 2, 3]), LRUPolicy(3), 3)
    assert hits.prefix == 2, "block 3, the tail, made room for block 7"


def test_a_request_larger_than_the_store_leaves_its_head():
    hits = replay(requests_of([1, 2, 3, 4], [1, 2, 3, 4]), LRUPolicy(2), 2)
    assert hits.prefix == 2


def test_the_infinite_store_is_an_upper_bound_and_capacity_of_all_blocks_reaches_it():
    requests = from_ids("t", generate("chat", SyntheticOptions(requests=300))).requests
    everything = infinite(requests)
    distinct = len({key for request in requests for key in request})
    assert replay(requests, LRUPolicy(distinct), distinct) == everything
    assert belady(requests, distinct) == everything


def _best(uses, capacity):
    """The most hits any store can have, by trying everything it could keep."""
    states = {frozenset(): 0}
    for use in uses:
        after = {}
        for held, hits in states.items():
            hits += use in held
            for size in range(capacity + 1):
                for kept in combinations(sorted(held | {use}), size):
                    kept = frozenset(kept)
                    after[kept] = max(hits, after.get(kept, 0))
        states = after
    return max(states.values())


def test_belady_has_the_most_block_hits_there_can_be():
    rng = random.Random(5)
    for _ in range(25):
        uses = [rng.randrange(5) for _ in range(12)]
        capacity = rng.choice([1, 2, 3])
        assert belady(requests_of(*([use] for use in uses)), capacity).blocks == _best(
            uses, capacity
        )


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_no_policy_beats_belady_in_blocks_or_in_prefixes(workload):
    """It gives up the tail of a prompt before its head, so all its hits are in prefixes."""
    requests = from_ids("t", generate(workload, SyntheticOptions(requests=400))).requests
    for capacity in (50, 500):
        bound = belady(requests, capacity)
        takes_each = belady(requests, capacity, takes_each=True)
        assert bound.prefix == bound.blocks >= takes_each.prefix == takes_each.blocks
        for policy in (LRUPolicy(capacity), FIFOPolicy(capacity)):
            assert takes_each.prefix >= replay(requests, policy, capacity).prefix


def test_one_level_is_one_store():
    requests = from_ids("t", generate("agent", SyntheticOptions(requests=200))).requests
    level = Level("cpu", 200, LRUPolicy(200))
    assert replay_levels(requests, [level]) == replay(requests, LRUPolicy(200), 200)
    assert level.prefix == replay(requests, LRUPolicy(200), 200).prefix


def test_what_left_the_first_level_comes_from_the_second():
    levels = [Level("cpu", 1, LRUPolicy(1)), Level("disk", 2, LRUPolicy(2))]
    hits = replay_levels(requests_of([1], [2], [1], [3], [2]), levels)
    assert [level.prefix for level in levels] == [0, 1]
    assert hits.blocks == 1


def test_progress_adds_up_to_all_accesses():
    requests = from_ids("t", generate("scan", SyntheticOptions(requests=700))).requests
    told = []
    hits = replay(requests, LRUPolicy(100), 100, told.append)
    assert sum(told) == hits.accesses
    assert len(told) > 2


def test_the_same_seed_makes_the_same_requests_and_another_others():
    for name in WORKLOADS:
        once, again, other = (
            list(generate(name, SyntheticOptions(seed=seed, requests=50))) for seed in (1, 1, 2)
        )
        assert once == again != other
        assert all(once)
