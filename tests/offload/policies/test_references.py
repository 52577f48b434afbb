"""LRU and ARC decide as independent implementations of the textbook and of the paper do."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.offload.policies.arc import ARCPolicy
from kvoffload.offload.policies.lru import LRUPolicy

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "mooncake_conversation.jsonl"


class TextbookLRU:
    """A clock reading per page; the smallest leaves."""

    def __init__(self, size):
        self.size, self.clock, self.used_at, self.page_at = size, 0, {}, OrderedDict()

    def request(self, page):
        """Return the page evicted for this one, if any."""
        evicted = None
        if page in self.used_at:
            del self.page_at[self.used_at[page]]
        elif len(self.used_at) == self.size:
            _, evicted = self.page_at.popitem(last=False)
            del self.used_at[evicted]
        self.clock += 1
        self.used_at[page] = self.clock
        self.page_at[self.clock] = page
        return evicted


class PaperARC:
    """Figure 4 of the paper, its names and its order of steps: one call a request."""

    def __init__(self, c):
        self.c, self.p = c, 0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def replace(self, page):
        if self.t1 and (len(self.t1) > self.p or (page in self.b2 and len(self.t1) == self.p)):
            out, _ = self.t1.popitem(last=False)
            self.b1[out] = True
        else:
            out, _ = self.t2.popitem(last=False)
            self.b2[out] = True
        return out

    def request(self, page):
        """Return the page evicted for this one, if any."""
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        evicted = None
        if page in t1 or page in t2:  # case I
            t1.pop(page, None)
            t2.pop(page, None)
            t2[page] = True
        elif page in b1:  # case II
            self.p = min(c, self.p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)))
            evicted = self.replace(page)
            del b1[page]
            t2[page] = True
        elif page in b2:  # case III
            self.p = max(0, self.p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)))
            evicted = self.replace(page)
            del b2[page]
            t2[page] = True
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    evicted = self.replace(page)
                else:
                    evicted, _ = t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popitem(last=False)
                if len(t1) + len(t2) == c:
                    evicted = self.replace(page)
            t1[page] = True
        return evicted


def request(policy, capacity, key):
    """One request for one key, as a store makes it; returns the key evicted for it, if any."""
    policy.touch(key)
    if key in policy:
        return None
    victims = policy.victims(1) if len(policy) == capacity else [None]
    policy.add(key)
    return victims[0]


PAIRS = [
    pytest.param(LRUPolicy, TextbookLRU, id="lru"),
    pytest.param(ARCPolicy, PaperARC, id="arc"),
]


@pytest.mark.parametrize(("policy", "reference"), PAIRS)
@given(
    capacity=st.integers(1, 12),
    accesses=st.lists(st.one_of(st.integers(0, 8), st.integers(0, 40)), max_size=400),
)
@settings(max_examples=150, deadline=None)
def test_every_decision_is_the_reference_s_on_any_sequence(policy, reference, capacity, accesses):
    ours, theirs = policy(capacity), reference(capacity)
    for page in accesses:
        assert request(ours, capacity, bytes([page])) == theirs.request(bytes([page]))


@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not on this machine")
@pytest.mark.parametrize("capacity", [3000])
@pytest.mark.parametrize(("policy", "reference"), PAIRS)
def test_every_decision_is_the_reference_s_over_the_conversation_trace(policy, reference, capacity):
    ours, theirs = policy(capacity), reference(capacity)
    keys = {}
    with TRACE.open() as lines:
        for line in lines:
            for page in reversed(json.loads(line)["hash_ids"]):
                key = keys.setdefault(page, page.to_bytes(36, "big"))
                assert request(ours, capacity, key) == theirs.request(key)
    assert len(keys) == 182_790
