"""What claimants said last, kept for stores that open later."""

import math

import pytest

from kvoffload.policies import told_return
from kvoffload.policies.told_return import LatestReturns, ToldReturn


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(told_return.time, "monotonic", lambda: now_s[0])
    return now_s


def said(claim, in_s, num_chunks=2):
    return ToldReturn(claim, [b"%d" % i for i in range(num_chunks)], in_s, num_chunks)


def claims_of(latest):
    return [told.claim for told in latest.to_come()]


def test_the_last_word_counts_and_time_passes(clock):
    latest = LatestReturns()
    latest.note([said(b"a", 30.0), said(b"b", 30.0), said(b"c", math.inf), said(b"d", 5.0)])
    clock[0] += 10
    latest.note([said(b"a", 30.0), said(b"b", None), said(b"unknown", None)])
    clock[0] += 5
    assert [(told.claim, told.in_s, told.num_used) for told in latest.to_come()] == [
        (b"c", math.inf, 0),
        (b"a", 25.0, 0),
    ]


def test_it_is_bounded_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(LatestReturns, "MOST_CLAIMANTS", 4)
    monkeypatch.setattr(LatestReturns, "MOST_CHUNKS", 30)
    latest = LatestReturns()
    latest.note([said(b"%d" % i, 60.0) for i in range(10)])
    assert claims_of(latest) == [b"6", b"7", b"8", b"9"]
    latest.note([said(b"7", 60.0, num_chunks=27)])
    assert claims_of(latest) == [b"9", b"7"]
    latest.note([said(b"long", 60.0, num_chunks=100)])
    assert claims_of(latest) == [b"long"]
    latest.note([said(b"long", None), said(b"x", 60.0, num_chunks=30)])
    assert claims_of(latest) == [b"x"]
