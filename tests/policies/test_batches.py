"""A batch decides as calls for each key do, after any history."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvoffload_policies.lru2 import LRU2Policy
from kvoffload_policies.s3fifo import S3FIFOPolicy

from kvoffload.errors import ConfigError
from kvoffload.offload.host_cache import HostCache
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.base import refusal
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.registry import POLICIES, load

CALLS = ["store", "load", "use", "evict"]


def key_of(number):
    return number.to_bytes(4, "big")


@pytest.mark.parametrize(
    "policy_class", [LRUPolicy, ARCPolicy, HandicapPolicy, LRU2Policy, S3FIFOPolicy]
)
@given(
    capacity=st.integers(1, 40),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 90)), max_size=60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_batches_decide_as_single_calls(policy_class, capacity, calls, seed):
    batch, single = policy_class(capacity), policy_class(capacity)
    rng = random.Random(seed)
    pinned = []

    def both(verb, keys):
        getattr(batch, verb)(keys)
        for key in keys:
            getattr(single, verb)([key])

    for call, first in calls:
        keys = [key_of(first + i) for i in range(rng.randrange(1, 12))]
        if call == "use":
            both("touch", keys)
        elif call == "evict":
            count = rng.randrange(8)
            together = list(batch.victims(count))
            assert together == [key for _ in range(count) for key in single.victims(1)]
        elif call == "load" and pinned:
            both("add", pinned)
            pinned = []
        elif call == "load":
            pinned = [key for key in keys if key in batch]
            both("remove", pinned)
        else:
            new = [key for key in keys if key not in batch and key not in pinned][:capacity]
            short = len(batch) + len(pinned) + len(new) - capacity
            assert list(batch.victims(max(0, short))) == list(single.victims(max(0, short)))
            both("add", new[: capacity - len(batch) - len(pinned)])
        assert len(batch) == len(single)
    assert list(batch.victims(capacity)) == list(single.victims(capacity))


class MostRecentFirst(LRUPolicy):
    def victims(self, count):
        order = self._table
        return [order.popitem()[0] for _ in range(min(count, len(self)))]


def test_a_subclass_that_changes_what_leaves_first_decides():
    host = HostCache(2, MostRecentFirst(2))
    for key in (b"old", b"new"):
        (slot,), _ = host.reserve([key])
        host.make_evictable((key,), (slot,))
    assert host.reserve([b"newest"])[1] == [b"new"]


class OneKeyACall:
    """A policy as this package had them: each call takes one key."""

    def __init__(self, capacity):
        self.order = {}

    def add(self, key):
        self.order[key] = None

    def touch(self, key):
        if key in self.order:
            self.order[key] = self.order.pop(key)

    def remove(self, key):
        self.order.pop(key, None)

    def victims(self, count):
        return [self.order.popitem()[0] for _ in range(min(count, len(self.order)))]

    def clear(self):
        self.order.clear()


class OldSubclass(LRUPolicy):
    def add(self, key):
        super().add([key])


class Entry:
    value = "plug_in:Policy"

    def __init__(self, policy):
        self.load = lambda: policy


@pytest.mark.parametrize("policy", [OneKeyACall, OldSubclass])
def test_a_policy_that_takes_one_key_a_call_is_refused_by_name(policy, monkeypatch):
    monkeypatch.setattr("kvoffload.registry._named", lambda group: {"mine": [Entry(policy)]})
    with pytest.raises(ConfigError) as refused:
        load(POLICIES, "mine", "policy")
    for part in ("policy", "mine", "plug_in:Policy", "a sequence of keys", "PolicySuite"):
        assert part in str(refused.value)


def test_a_policy_that_evicts_other_keys_is_refused():
    class Invents(LRUPolicy):
        def victims(self, count):
            return [b"other"] * count

    assert "evicted [b'other', b'other']" in refusal(Invents)
    assert refusal(LRUPolicy) == ""


def test_a_policy_whose_victims_are_an_iterator_is_refused():
    class Iterates(LRUPolicy):
        def victims(self, count):
            return iter(super().victims(count))

    assert "list_iterator" in refusal(Iterates)
