"""Presence by probing: batched, bounded in time, never stuck."""

import asyncio
import threading
import time

import pytest

from kvoffload.backends import presence as presence_module
from kvoffload.backends.presence import PresenceCache
from kvoffload.connectors.vllm.tier_loop import IOLoop, presence_on


class Store:
    def __init__(self, held):
        self.held, self.batches = set(held), []

    async def contains(self, keys):
        self.batches.append(list(keys))
        return [key in self.held for key in keys]


class Silent(Store):
    async def contains(self, keys):
        await asyncio.Event().wait()


class Liar(Store):
    async def contains(self, keys):
        return [True] * (len(keys) + 1)


@pytest.fixture
def io():
    io = IOLoop()
    yield io
    io.close()


def answer(prober, key, until):
    return until(lambda: [a] if (a := prober.holds(key)) is not None else None)[0]


def test_a_probe_answers_and_is_believed_for_a_while(io, until):
    store = Store([b"here"])
    prober = presence_on(io, store, timeout_s=5.0)
    assert prober.holds(b"here") is None
    assert answer(prober, b"here", until) is True
    assert answer(prober, b"gone", until) is False
    assert sum(batch.count(b"here") for batch in store.batches) == 1


def test_questions_never_stop_being_answered(io, until):
    """A key that is added while a probe takes the list must not wait for ever."""
    store = Store(str(i).encode() for i in range(0, 4000, 2))
    prober = presence_on(io, store, timeout_s=30.0)
    keys = [str(i).encode() for i in range(4000)]
    for key in keys:
        prober.holds(key)
        if len(key) % 2:
            time.sleep(0)
    assert [answer(prober, key, until) for key in keys] == [i % 2 == 0 for i in range(4000)]


def test_no_answer_in_time_is_no(io):
    now = [0.0]
    prober = presence_on(io, Silent([]), timeout_s=1.0, clock=lambda: now[0])
    assert prober.holds(b"a") is None
    now[0] = 1.1
    assert prober.holds(b"a") is False


def test_a_wrong_number_of_answers_is_no(io, until):
    prober = presence_on(io, Liar([]), timeout_s=5.0)
    prober.holds(b"a"), prober.holds(b"b"), prober.holds(b"c")
    assert [answer(prober, key, until) for key in (b"a", b"b", b"c")] == [False] * 3


def test_a_chunk_that_could_not_be_loaded_is_not_promised_again_soon(io, until):
    now = [0.0]
    prober = presence_on(io, Store([b"a"]), timeout_s=5.0, clock=lambda: now[0])
    assert answer(prober, b"a", until) is True
    prober.forget([b"a"])
    now[0] = 30.0
    assert prober.holds(b"a") is False
    now[0] = 100.0
    assert answer(prober, b"a", until) is True


async def test_the_log_names_a_timeout_which_has_no_words(caplog):
    io = IOLoop()
    prober = presence_on(io, Silent([]), timeout_s=0.02)
    assert prober.holds(b"k") is None
    for _ in range(500):
        if caplog.records:
            break
        await asyncio.sleep(0.01)
    io.close()
    assert caplog.messages == ["probing 1 keys failed: TimeoutError"]


def test_an_answer_is_believed_for_two_seconds_and_asked_for_again_after_them(io, until):
    now, store = [0.0], Store([b"here"])
    prober = presence_on(io, store, timeout_s=5.0, clock=lambda: now[0])
    for key, present in ((b"here", True), (b"gone", False)):
        now[0] = 0.0
        assert answer(prober, key, until) is present
        now[0] = 1.99
        assert prober.holds(key) is present
        now[0] = 2.0
        assert prober.holds(key) is None
        assert answer(prober, key, until) is present
    assert sum(map(len, store.batches)) == 4


def test_answers_are_bounded_and_the_oldest_are_dropped_first(io, until, monkeypatch):
    monkeypatch.setattr(presence_module, "MAX_ENTRIES", 10)
    store = Store(b"%d" % i for i in range(30))
    prober = presence_on(io, store, timeout_s=30.0, clock=lambda: 0.0)
    for i in range(30):
        assert answer(prober, b"%d" % i, until) is True
    assert [prober.holds(b"%d" % i) for i in range(21, 30)] == [True] * 9
    assert prober.holds(b"0") is None


def test_an_answer_that_comes_after_a_chunk_was_forgotten_changes_nothing(io, until):
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Store):
        async def contains(self, keys):
            asked.set()
            await asyncio.to_thread(go_on.wait)
            return await super().contains(keys)

    prober = presence_on(io, Slow([b"a"]), timeout_s=30.0)
    assert prober.holds(b"a") is None
    assert asked.wait(10)
    prober.forget([b"a"])
    go_on.set()
    assert prober.holds(b"b") is None
    until(lambda: prober.holds(b"b") is not None)
    assert prober.holds(b"a") is False


class Indexed(Store):
    """A store with an index of its own."""

    def holds(self, key):
        return True

    def forget(self, keys):
        pass


def test_a_store_with_an_index_of_its_own_connects_and_answers_itself(io, until):
    indexed = Indexed([])
    assert presence_on(io, indexed, 5.0) is indexed
    assert until(lambda: indexed.batches) == [[]]
    assert isinstance(presence_on(io, Store([]), 5.0), PresenceCache)


def test_a_store_that_cannot_connect_is_named_in_the_log_and_asked_later(io, until, caplog):
    class Unreachable(Indexed):
        async def contains(self, keys):
            raise self.error

    for error, told in ((OSError("no route"), "no route"), (TimeoutError(), "TimeoutError")):
        store = Unreachable([])
        store.error = error
        caplog.clear()
        assert presence_on(io, store, 5.0) is store
        assert until(lambda: caplog.messages) == [f"the first call of a store failed: {told}"]
