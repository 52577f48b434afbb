"""Policies decide as independent implementations of the textbook and of the papers do."""

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvoffload_policies.lru2 import LRU2Policy
from kvoffload_policies.s3fifo import S3FIFOPolicy

from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.lru import LRUPolicy

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


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


class PaperLRU2:
    """LRU-K of the paper for K = 2: a search over all pages for the oldest last but one use.

    The paper retains the uses of absent pages for a time; here it is for 3 capacities of pages.
    """

    def __init__(self, size):
        self.size, self.clock, self.resident, self.retained = size, 0, {}, OrderedDict()

    def request(self, page):
        """Return the page evicted for this one, if any."""
        evicted = None
        self.clock += 1
        if page in self.resident:
            self.resident[page] = (self.resident[page][1], self.clock)
            return None
        if len(self.resident) == self.size:
            # A last but one use that never was is older than any; then the last use decides.
            evicted = min(self.resident, key=self.resident.__getitem__)
            self.retained[evicted] = self.resident.pop(evicted)[1]
            if len(self.retained) == 3 * self.size + 1:
                self.retained.popitem(last=False)
        self.resident[page] = (self.retained.pop(page, 0), self.clock)
        return evicted


class PaperS3FIFO:
    """Algorithm 1 of the paper, its names; EVICTS looks at one page, as INSERT calls it again."""

    def __init__(self, size):
        self.size, self.share = size, max(1, size // 10)
        self.s, self.m, self.g, self.freq = [], [], [], {}

    def request(self, page):
        """Return the page evicted for this one, if any."""
        if page in self.freq:
            self.freq[page] = min(self.freq[page] + 1, 3)
            return None
        evicted = None
        while len(self.s) + len(self.m) == self.size:
            evicted = self.evict_s() if len(self.s) >= self.share or not self.m else self.evict_m()
        if page in self.g:
            self.g.remove(page)
            self.m.append(page)
        else:
            self.s.append(page)
        self.freq[page] = 0
        return evicted

    def evict_s(self):
        tail = self.s.pop(0)
        if self.freq[tail] > 1:
            self.m.append(tail)
            self.freq[tail] = 0
            return self.evict_m() if len(self.m) > self.size - self.share else None
        self.g = [*self.g, tail][-(self.size - self.size // 10) :]
        del self.freq[tail]
        return tail

    def evict_m(self):
        while True:
            tail = self.m.pop(0)
            if not self.freq[tail]:
                del self.freq[tail]
                return tail
            self.freq[tail] -= 1
            self.m.append(tail)


def request(policy, capacity, key):
    """One request for one key, as a store makes it; returns the key evicted for it, if any."""
    policy.touch([key])
    if key in policy:
        return None
    victims = policy.victims(1) if len(policy) == capacity else [None]
    policy.add([key])
    return victims[0]


PAIRS = [
    pytest.param(LRUPolicy, TextbookLRU, id="lru"),
    pytest.param(ARCPolicy, PaperARC, id="arc"),
]
SLOW_PAIRS = [
    pytest.param(LRU2Policy, PaperLRU2, id="lru2"),
    pytest.param(S3FIFOPolicy, PaperS3FIFO, id="s3fifo"),
]
"""Their references search all pages, too slowly for a trace."""


@pytest.mark.parametrize(("policy", "reference"), [*PAIRS, *SLOW_PAIRS])
@given(
    capacity=st.integers(1, 12),
    accesses=st.lists(st.one_of(st.integers(0, 8), st.integers(0, 40)), max_size=400),
)
@settings(max_examples=150)
def test_every_decision_is_the_reference_s_on_any_sequence(policy, reference, capacity, accesses):
    ours, theirs = policy(capacity), reference(capacity)
    for page in accesses:
        assert request(ours, capacity, bytes([page])) == theirs.request(bytes([page]))


@pytest.mark.parametrize("capacity", [1, 2, 9, 20, 36])
@pytest.mark.parametrize(("policy", "reference"), [*PAIRS, *SLOW_PAIRS])
def test_every_decision_is_the_reference_s_where_some_keys_are_popular(policy, reference, capacity):
    ours, theirs, draw = policy(capacity), reference(capacity), random.Random(capacity)
    pages = [page.to_bytes(2, "big") for page in range(6 * capacity)]
    for page in draw.choices(pages, [1 / (1 + at) for at in range(len(pages))], k=3000):
        assert request(ours, capacity, page) == theirs.request(page)


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
