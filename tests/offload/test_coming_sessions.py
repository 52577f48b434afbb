"""Sessions that say when they return: when their chunks are read, and when no more."""

import tracemalloc

import pytest
from manager_parts import Store, figures, keys, new_manager, put

from kvoffload.config import KNOWN_HINTS
from kvoffload.offload import coming_sessions, returns
from kvoffload.offload.base import ReqContext
from kvoffload.offload.coming_sessions import LATE_S, LEAST_LEAD_S
from kvoffload.offload.hints import Hints
from kvoffload.offload.host_cache import HostCache
from kvoffload.policies import return_order
from tests.support.manager_check import check

CHUNKS = keys("p", 12)


@pytest.fixture
def clock(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(HostCache, "now_s", staticmethod(lambda: now_s[0]))
    return now_s


def manager_of(chunks, slots=64, **settings):
    settings = {"waiting_share": 0.9, "max_persisting_slots": 0, **settings}
    return new_manager(slots, [Store(chunks)], client_hints=KNOWN_HINTS, **settings)


def request(manager, name, chunks, **told):
    """Serve a request whose chunks are in host memory or not; it stores nothing."""
    context = ReqContext(name, {"kvoffload": told} if told else None)
    manager.touch(chunks, context)
    manager.retire(chunks, context)
    check(manager)


def reads(manager, clock, at_s):
    """Return what is read early until a time of the clock."""
    read = []
    while clock[0] < at_s:
        clock[0] += 0.25
        for _ in range(8):
            manager.serve_queue()
            for job in manager.take_transfers():
                read += job.keys
                manager.complete(job, [True] * len(job.keys))
        check(manager)
    return read


def test_the_chunks_of_a_session_come_shortly_before_it_returns(clock):
    manager = manager_of(CHUNKS)
    request(manager, "1", CHUNKS, returns_in_s=30)
    assert reads(manager, clock, 130 - LEAST_LEAD_S - 0.5) == []
    assert reads(manager, clock, 130) == [*CHUNKS]
    assert manager.lookup_prefix(CHUNKS, ReqContext("2")) == (12, False)
    request(manager, "2", CHUNKS, session="a", returns="never")
    assert not manager.waiting.requests
    assert not manager._host.claims


def test_a_read_begins_earlier_where_the_tier_is_slow(clock, monkeypatch):
    manager = manager_of(CHUNKS)
    monkeypatch.setattr(manager.promises, "read_s", lambda tier, num_bytes: 5.0)
    request(manager, "1", CHUNKS, returns_in_s=30)
    assert reads(manager, clock, 130 - 5 * coming_sessions.MARGIN - 0.5) == []
    assert reads(manager, clock, 130 - 5 * coming_sessions.MARGIN + 1) == [*CHUNKS]


@pytest.mark.parametrize(
    "told",
    [{"returns": "never", "session": "a"}, {"session": "a"}, {"returns_in_s": 60, "session": "a"}],
)
def test_what_a_session_says_last_counts(clock, told):
    manager = manager_of(CHUNKS)
    request(manager, "1", CHUNKS, returns_in_s=30, session="a")
    request(manager, "2", CHUNKS, **told)
    assert reads(manager, clock, 150) == []


def test_a_session_that_does_not_come_leaves_the_queue(clock):
    manager = manager_of(CHUNKS)
    request(manager, "1", CHUNKS, returns_in_s=3, session="a")
    reads(manager, clock, 103 + LATE_S - 0.5)
    assert len(manager._host.claims) == 12
    reads(manager, clock, 103 + LATE_S + 0.5)
    assert not manager._host.claims
    assert not manager.waiting.requests
    assert not manager.coming.times


def test_sessions_are_awaited_through_a_reset(clock):
    """The tier is as it was: the session that queues, and the one to come, find their chunks."""
    queued, later, absent = (keys(name, 12) for name in "pqr")
    manager = manager_of([*queued, *later])
    request(manager, "1", queued, returns_in_s=3)
    assert reads(manager, clock, 103) == queued
    request(manager, "2", later, returns_in_s=60)
    request(manager, "3", absent, returns_in_s=60)
    manager.reset_cache()
    check(manager)
    assert not manager._host.claims
    assert reads(manager, clock, 106) == queued
    assert reads(manager, clock, 163) == later
    assert reads(manager, clock, 200) == []
    assert not manager._host.claims
    assert not manager.waiting.requests


def test_without_a_share_for_the_queue_nothing_is_read(clock):
    manager = manager_of(CHUNKS, waiting_share=0.0)
    request(manager, "1", CHUNKS, returns_in_s=3)
    assert reads(manager, clock, 110) == []


def test_chunks_that_are_read_for_an_awaited_session_are_its_tenant_s(clock):
    manager = manager_of(CHUNKS, tenant_share=0.5)
    context = ReqContext("r", {"kvoffload": {"returns_in_s": 3}}, tenant=b"a")
    manager.touch(CHUNKS, context)
    manager.retire(CHUNKS, context)
    assert reads(manager, clock, 110)
    assert manager._host.tenants_of(CHUNKS) == [b"a"] * 12


def test_any_number_of_sessions_takes_bounded_memory():
    coming = manager_of([]).coming
    chunks = keys("p", 100)
    for i in range(20_000):
        coming.expect(b"%d" % (i % 5000), chunks, 3600.0, b"")
    assert len(coming._sessions) == coming_sessions.MOST_CHUNKS // 100
    assert len(coming.times) <= 2 * len(coming._sessions) + 65


def test_a_million_sessions_take_32_mib_at_most_with_all_that_is_noted_of_them(monkeypatch):
    """With limits an eighth as large, an eighth of that; beyond them, sessions take turns."""
    for module, name in (
        (return_order, "MAX_CLAIMS"),
        (coming_sessions, "MOST_SESSIONS"),
        (returns, "MOST_UNTOLD"),
        (returns, "REMEMBERED_REQUESTS"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // 8)
    manager, sizes = manager_of([], slots=20_000), []
    tracemalloc.start()
    try:
        for i in range(12_000):
            (key,) = keys(f"session {i}".ljust(8), 1)
            hints = Hints(session=f"session {i}", returns_in_s=float(i % 3600))
            manager.returns.ended([key], hints, f"request {i}", b"")
            if i % 1000 == 999:
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes) < (32 << 20) / 8
    assert len(manager.coming._sessions) == coming_sessions.MOST_SESSIONS


@pytest.mark.parametrize("jump_s", [1e9, -1e9, 1e18, -1e18])
def test_a_clock_that_jumps_loses_no_session_and_no_slot(clock, jump_s):
    manager = manager_of(CHUNKS)
    request(manager, "1", CHUNKS, returns_in_s=3, session="a")
    reads(manager, clock, 102.5)
    clock[0] += jump_s
    manager.serve_queue()
    check(manager)
    request(manager, "2", CHUNKS, returns_in_s=3, session="a")
    clock[0] = 2e9
    manager.serve_queue()
    assert not manager.waiting.requests
    assert not manager._host.claims
    assert not manager.coming._sessions or jump_s > 2e9
    check(manager)


def test_a_session_that_returns_in_years_leaves_room_for_others(clock):
    manager = manager_of(CHUNKS)
    manager.coming.expect(b"far", keys("far", coming_sessions.MOST_CHUNKS), 1.7e9, b"")
    request(manager, "1", CHUNKS, returns_in_s=3)
    assert reads(manager, clock, 103) == [*CHUNKS]


def test_a_session_whose_requests_load_from_no_tier_is_not_awaited(clock):
    manager = manager_of(CHUNKS)
    request(manager, "1", CHUNKS, returns_in_s=3, max_load_tokens=0)
    assert reads(manager, clock, 110) == []


@pytest.mark.parametrize("hint", [{"session": "a"}, {}])
def test_what_became_of_the_chunks_of_a_session_is_counted_and_explained(clock, hint):
    chunks, manager = keys("p", 12), new_manager(16, waiting_share=0.9)
    put(manager, chunks)
    request(manager, "1", chunks, returns_in_s=30, **hint)
    put(manager, keys("running", 8))
    longer = [*chunks, *keys("q", 1)]
    again = ReqContext("2", {"kvoffload": hint} if hint else None)
    said = manager.explain(longer, again)
    assert said == ["CPU"] * 8 + ["evicted_before_return"] * 4 + ["never_stored"]
    manager.touch(longer, again)
    assert manager.explain(longer, again) == said
    assert "evicted" in manager.explain(longer, ReqContext("another"))
    manager.retire(longer, again)
    request(manager, "3", chunks, returns_in_s=3, **hint)
    reads(manager, clock, 110)
    counts = figures(manager)["return_chunks"]
    assert counts == {"told": 24, "kept": 8, "lost": 4, "overdue": 12}


@pytest.mark.parametrize("hint_share", [0.25, 0.5])
def test_sessions_that_say_they_return_at_once_leave_room_to_what_waits(clock, hint_share):
    """Whether they lie or not: what they hold is a part of host memory, as in its order."""
    manager = new_manager(100, waiting_share=0.9)
    manager._host.hint_share = hint_share
    for i in range(9):
        put(manager, keys(f"liar{i}", 10))
        request(manager, f"liar{i}", keys(f"liar{i}", 10), returns_in_s=0, session=f"{i}")
    put(manager, keys("waits", 10))
    reads(manager, clock, 101)
    claimed = len(manager._host.claims)
    assert 0 < claimed <= 100 * hint_share
    manager.request_queued(lambda: keys("waits", 10), ReqContext("waits"))
    manager.serve_queue()
    assert len(manager._host.claims) == claimed + 10
    reads(manager, clock, 110)
    assert len(manager._host.claims) == 10


def test_what_an_awaited_session_needs_gives_way_before_what_a_request_waits_for(clock):
    manager = new_manager(40, waiting_share=1.0)
    put(manager, keys("comes", 16))
    request(manager, "comes", keys("comes", 16), returns_in_s=1)
    put(manager, keys("waits", 16))
    reads(manager, clock, 101)
    manager.request_queued(lambda: keys("waits", 16), ReqContext("waits"))
    reads(manager, clock, 101.25)
    assert len(manager._host.claims) == 32
    put(manager, keys("running", 16))
    check(manager)
    assert sum(map(manager._host.claims.__contains__, keys("waits", 16))) == 16


def test_sessions_that_are_awaited_count_as_their_tenant_s(clock):
    manager = new_manager(40, waiting_share=1.0)
    for name in ("s1", "s2", "other"):
        put(manager, keys(name, 12))
    for name in ("s1", "s2"):
        told = {"kvoffload": {"returns_in_s": 3, "session": name}}
        context = ReqContext(name, told, tenant=b"greedy")
        manager.request_queued(lambda name=name: keys(name, 12), context)
        manager.touch(keys(name, 12), context)
        manager.request_admitted(context)
        manager.retire(keys(name, 12), context)
    manager.request_queued(lambda: keys("other", 12), ReqContext("other"))
    reads(manager, clock, 103)
    claims = manager._host.claims
    assert sum(map(claims.__contains__, keys("other", 12))) == 12
    assert sum(key in claims for name in ("s1", "s2") for key in keys(name, 12)) == 20
