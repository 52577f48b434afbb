"""The handicap policy learns from its load how much being seen once should count."""

import random

import pytest
from replays import from_ids, generate, replay

from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.replay.synthetic import SyntheticOptions


def requests_of(workload, seed=7, requests=2500):
    return from_ids("t", generate(workload, SyntheticOptions(seed, requests))).requests


@pytest.mark.parametrize("workload", ["chat", "rag", "scan", "shared"])
def test_it_hits_about_as_much_as_the_better_of_lru_and_arc_on_any_load(workload):
    requests = requests_of(workload)
    rate = {
        policy: replay(requests, policy(1000), 1000).prefix_rate
        for policy in (HandicapPolicy, LRUPolicy, ARCPolicy)
    }
    assert rate[HandicapPolicy] > max(rate[LRUPolicy], rate[ARCPolicy]) - 0.01


def test_a_scan_does_not_flush_what_is_used_again_and_again():
    policy, capacity = HandicapPolicy(100), 100
    hot = [b"hot%d" % i for i in range(40)]
    rng = random.Random(1)
    number = 0

    def use(key):
        policy.touch([key])
        if key not in policy:
            if len(policy) == capacity:
                policy.victims(1)
            policy.add([key])

    for _ in range(150):
        for key in hot:
            use(key)
        for _ in range(rng.randrange(100, 300)):
            number += 1
            use(b"once%d" % number)
    assert sum(key in policy for key in hot) == len(hot)


def test_a_pin_is_no_use():
    """A key loaded or written through again and again is still one that was seen once."""
    policy = HandicapPolicy(100)
    policy.add([b"pinned"])
    for _ in range(10):
        policy.remove([b"pinned"])
        policy.add([b"pinned"])
    policy.add([b"other"])
    assert list(policy.victims(1)) == [b"pinned"]
    again = HandicapPolicy(100)
    again.add([b"used", b"other"])
    again.remove([b"used"])
    again.touch([b"used"])
    again.add([b"used"])
    assert list(again.victims(2)) == [b"other", b"used"]
