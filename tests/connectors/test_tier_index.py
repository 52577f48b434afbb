"""The scheduler's index of a tier against a model: a set of keys a rank, and two sets of flags."""

import random
from functools import partial

import pytest
from opcodes import count_opcodes

from kvoffload.backends.base import Removal
from kvoffload.connectors.vllm import tier_index
from kvoffload.connectors.vllm.tier_index import TierIndex
from kvoffload.messages import make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy

KEYS = [bytes([i]) * 36 for i in range(24)]


class Model:
    """What the ranks told, rank by rank."""

    def __init__(self, ranks):
        self.told = {rank: set() for rank in ranks}
        self.complete, self.forgotten, self.announced, self.removals = set(), set(), set(), []

    def restart(self, rank):
        self.told[rank] = set()
        self.complete.discard(rank)

    def apply(self, rank, added, removed):
        self.told[rank] |= set(added)
        self.forgotten -= set(added)
        self.told[rank] -= set(removed)

    def completed(self, rank):
        self.complete.add(rank)

    def forget(self, keys):
        self.forgotten |= set(keys)
        self.announced -= set(keys)

    def written(self, keys):
        for told in self.told.values():
            told |= set(keys)
        self.forgotten -= set(keys)
        self.announced |= set(keys)

    def removed(self, removals):
        self.removals += [it for it in removals if it.key in self.announced]
        self.announced -= {it.key for it in removals}

    def take_removals(self):
        taken, self.removals = self.removals, []
        return taken

    def holds(self, key):
        lacking = {rank for rank, told in self.told.items() if key not in told}
        if not lacking and key not in self.forgotten:
            return True
        known = any(key in told for told in self.told.values())
        if lacking & self.complete or (known and key in self.forgotten):
            return False
        return None


def some(rng):
    return rng.sample(KEYS, rng.randrange(1, 6))


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(8))
def test_it_agrees_with_the_model_in_every_order_of_reports(num_ranks, seed, monkeypatch):
    monkeypatch.setattr(tier_index, "_MOST_BITS", 14)  # bits run out soon
    monkeypatch.setattr(tier_index, "_LEAST_LIMIT", 6)
    rng, ranks = random.Random(seed), [3 * i for i in range(num_ranks)]
    index, model = TierIndex(ranks, 1.0, clock=lambda: 0.0), Model(ranks)
    verbs = ("apply",) * 6 + ("written", "written", "removed", "forget", "restart", "completed")
    for _ in range(1500):
        verb, rank = rng.choice(verbs), rng.choice(ranks)
        if verb == "apply":
            added = set(some(rng))
            arguments = (rank, sorted(added), sorted(set(some(rng)) - added))
        elif verb in ("restart", "completed"):
            arguments = (rank,)
        elif verb == "removed":
            # A store gives up what a rank then no longer has.
            arguments = ([Removal(key, "evicted") for key in some(rng)],)
        else:
            arguments = (some(rng),)
        for it in (index, model):
            getattr(it, verb)(*arguments)
        # Memory is bounded, so an index may drop flags of chunks that no rank has.
        for key in KEYS:
            if not any(key in told for told in model.told.values()):
                model.forgotten.discard(key)
                if key not in index._masks:
                    model.announced.discard(key)
        assert index.take_removals() == model.take_removals()
        assert [index.holds(key) for key in KEYS] == [model.holds(key) for key in KEYS]
        assert index.is_complete == (model.complete == set(ranks))
        order = rng.sample(KEYS, len(KEYS))
        leading = next((i for i, key in enumerate(order) if not model.holds(key)), len(order))
        assert index.num_leading(order) == leading
        assert max(index._masks.values(), default=0).bit_length() <= max(14, num_ranks * 2 + 3)


def test_a_lookup_waits_for_a_listing_only_so_long():
    now = [0.0]
    index = TierIndex([0, 1], 0.25, clock=lambda: now[0])
    index.apply(0, KEYS[:2], [])
    index.completed(0)
    assert [index.holds(key) for key in KEYS[:3]] == [None, None, False]
    now[0] = 0.2
    assert [index.holds(key) for key in KEYS[:2]] == [None, None]
    now[0] = 0.25
    assert index.holds(KEYS[0]) is False
    index.apply(1, KEYS[:1], [])
    assert index.holds(KEYS[0]) is True
    index.completed(1)
    assert [index.holds(key) for key in KEYS[:2]] == [True, False]


def test_lookups_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(tier_index, "_MAX_ASKED", 4)
    index = TierIndex([0], 0.25, clock=lambda: 0.0)
    assert [index.holds(key) for key in KEYS[:6]] == [None] * 4 + [False] * 2
    index.completed(0)
    assert not index._asked


@pytest.mark.parametrize("restarts", [1, 200])
def test_what_no_rank_has_any_more_leaves_memory(restarts, monkeypatch):
    monkeypatch.setattr(tier_index, "_LEAST_LIMIT", 100)
    index = TierIndex([0, 1], 1.0)
    for turn in range(restarts):
        for rank in (0, 1):
            index.restart(rank)
            index.apply(rank, [b"%d %d" % (turn, i) for i in range(60)], [])
    assert index.num_leading([b"%d %d" % (restarts - 1, i) for i in range(60)]) == 60
    assert len(index._masks) <= 2 * 100
    assert max(index._masks.values()) < 1 << 60


def test_a_store_that_reports_no_removals_leaves_no_flags_behind(monkeypatch):
    monkeypatch.setattr(tier_index, "_LEAST_LIMIT", 100)
    index = TierIndex([0], 1.0)
    for turn in range(20):
        keys = [b"%d %d" % (turn, i) for i in range(60)]
        index.written(keys)
        index.apply(0, keys, [])
        index.apply(0, [], keys)
    assert len(index._masks) <= 160


def test_a_chunk_removed_in_the_step_of_its_write_is_told_of_once():
    index = TierIndex([0], 1.0)
    index.completed(0)
    index.written(KEYS[:1])
    index.removed([Removal(KEYS[0], "evicted")] * 2)
    index.apply(0, [], KEYS[:1])
    assert index.take_removals() == [Removal(KEYS[0], "evicted")]
    assert index.holds(KEYS[0]) is False
    assert len(index._masks) == 0 or index.take_removals() == []


def test_a_prompt_costs_a_few_steps_a_chunk_whatever_the_number_of_ranks():
    costs = []
    for num_ranks in (1, 8):
        took = []
        for count in (100, 600):
            keys = [make_offload_key(i.to_bytes(32, "big"), 0) for i in range(count)]
            index = TierIndex(range(num_ranks), 1.0)
            for rank in range(num_ranks):
                index.apply(rank, keys, [])
            manager = TieredOffloadingManager(
                HostCache(count, LRUPolicy(count)), [Tier("disk", index)]
            )
            lookup = partial(manager.lookup_prefix, keys)
            assert lookup() == (count, False)
            took.append(count_opcodes(lookup, "/kvoffload/"))
        costs.append((took[1] - took[0]) / 500)
    assert costs[0] == costs[1] < 25
