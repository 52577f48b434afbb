"""Calls for many keys at once decide as calls for each key do, whatever happened before."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.offload.idle import ByPolicy, InOwnOrder, idle_in
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.fifo import FIFOPolicy
from kvoffload.policies.lru import LRUPolicy

DEEDS = ["store", "load", "use", "evict"]


def key_of(number):
    return number.to_bytes(4, "big")


@pytest.mark.parametrize("policy_class", [LRUPolicy, ARCPolicy])
@given(
    capacity=st.integers(1, 40),
    deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 90)), max_size=60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_bulk_calls_decide_as_single_calls(policy_class, capacity, deeds, seed):
    bulk, single = policy_class(capacity), policy_class(capacity)
    rng = random.Random(seed)
    pinned = []

    def both(verb, keys):
        getattr(bulk, f"{verb}_all")(keys)
        for key in keys:
            getattr(single, verb)(key)

    for deed, first in deeds:
        keys = [key_of(first + i) for i in range(rng.randrange(1, 12))]
        if deed == "use":
            for key in keys:
                bulk.touch(key)
                single.touch(key)
        elif deed == "evict":
            count = rng.randrange(8)
            assert list(bulk.victims(count)) == [k for _ in range(count) for k in single.victims(1)]
        elif deed == "load" and pinned:
            both("add", pinned)
            pinned = []
        elif deed == "load":
            pinned = [key for key in keys if key in bulk]
            both("remove", pinned)
        else:
            new = [key for key in keys if key not in bulk and key not in pinned][:capacity]
            short = len(bulk) + len(pinned) + len(new) - capacity
            assert list(bulk.victims(max(0, short))) == list(single.victims(max(0, short)))
            both("add", new[: capacity - len(bulk) - len(pinned)])
        assert len(bulk) == len(single)
    assert list(bulk.victims(capacity)) == list(single.victims(capacity))


@pytest.mark.parametrize("capacity", [5, 64, 1000])
def test_lru_leaves_in_the_order_of_last_use_with_the_numbers_it_was_given(capacity):
    """Far more turnover than one look at the oldest keys sees, against an ``OrderedDict``."""
    policy, reference, rng = LRUPolicy(capacity), OrderedDict(), random.Random(capacity)
    for step in range(20 * capacity):
        key = key_of(rng.randrange(2 * capacity))
        if key in reference:
            if rng.random() < 0.2:
                policy.remove(key)
                del reference[key]
            else:
                policy.touch(key)
                reference.move_to_end(key)
            continue
        if len(reference) == capacity:
            count = rng.randrange(1, 1 + min(capacity, rng.choice([1, 3, capacity])))
            gone = [reference.popitem(last=False) for _ in range(count)]
            assert policy.evict(count) == ([k for k, _ in gone], [n for _, n in gone])
        policy.put_all([key], [step])
        reference[key] = step
    assert policy.evict(capacity) == (list(reference), list(reference.values()))


def test_a_policy_that_carries_numbers_is_the_table_of_slots():
    assert isinstance(idle_in(LRUPolicy(10)), InOwnOrder)
    assert isinstance(idle_in(ARCPolicy(10)), ByPolicy)


def test_a_subclass_that_changes_what_leaves_first_is_asked():
    class MostRecentFirst(LRUPolicy):
        def victims(self, count):
            return [self.numbers.popitem()[0] for _ in range(min(count, len(self)))]

    idle = idle_in(MostRecentFirst(10))
    idle.put_all([b"old", b"new"], [1, 2])
    assert idle.victims(1) == ([b"new"], [2])
    assert isinstance(idle_in(FIFOPolicy(10)), ByPolicy)
