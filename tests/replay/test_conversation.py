"""The published figures of the conversation trace, and the default policy's place among them."""

from itertools import takewhile

import pytest
from named_policies import NAMED_POLICIES
from replays import replay

from kvoffload.replay.simulate import belady, infinite

PUBLISHED = {
    "fifo": {1000: 4.34, 3000: 6.27, 10_000: 18.15, 30_000: 29.44},
    "lru": {1000: 4.45, 3000: 6.53, 10_000: 21.16, 30_000: 32.57},
    "lru2": {1000: 7.69, 3000: 13.43, 10_000: 21.56, 30_000: 27.97},
    "arc": {1000: 5.29, 3000: 8.71, 10_000: 22.51, 30_000: 31.11},
    "s3fifo": {1000: 5.56, 3000: 8.77, 10_000: 19.53, 30_000: 30.43},
}
"""Contiguous-prefix hits in percent of block accesses, by capacity in blocks."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_classic_policies_reach_their_published_hit_rates(conversation, name):
    for capacity, percent in PUBLISHED[name].items():
        if capacity in (3000, 30_000):
            policy = NAMED_POLICIES[name](capacity)
            hits = textbook_hits(conversation.requests, policy, capacity)
            assert 100 * hits / conversation.accesses == pytest.approx(percent, abs=0.3)


def textbook_hits(requests, policy, capacity):
    """Count prefix hits of a store that uses a request's blocks one by one, tail first.

    Nothing is pinned. An engine pins what it loads, which makes FIFO and S3-FIFO other policies.
    """
    held, found = set(), 0
    for request in requests:
        found += sum(takewhile(bool, (key in held for key in request)))
        for key in reversed(request):
            policy.touch((key,))
            if key not in held:
                if len(held) >= capacity:
                    held.difference_update(policy.victims(1))
                policy.add((key,))
                held.add(key)
    return found


def test_the_bounds_are_the_published_ones(conversation):
    assert (conversation.accesses, conversation.distinct) == (288_500, 182_790)
    assert 100 * infinite(conversation.requests).prefix_rate == pytest.approx(36.64, abs=0.005)
    bound = belady(conversation.requests, 3000)
    assert 100 * bound.block_rate == pytest.approx(29.45, abs=0.005)


def test_the_handicap_policy_is_no_worse_than_lru_and_arc(conversation):
    for capacity in (3000, 30_000):
        hits = replay(conversation.requests, NAMED_POLICIES["handicap"](capacity), capacity)
        best = max(PUBLISHED[name][capacity] for name in ("lru", "arc"))
        assert 100 * hits.prefix_rate >= best
