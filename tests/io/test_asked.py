"""Presence in a store without an index: asked in batches, bounded in time, never stuck."""

import asyncio
import threading
import time

import pytest

from kvoffload.io import presence as presence_module
from kvoffload.io.link import CLOGGED_BYTES
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import client_over, loop_of


class Store:
    def __init__(self, held):
        self.held, self.batches = set(held), []

    async def contains(self, keys):
        if keys:
            self.batches.append(list(keys))
        return [key in self.held for key in keys]

    async def close(self):
        pass


class Silent(Store):
    async def contains(self, keys):
        await asyncio.Event().wait()


class Liar(Store):
    async def contains(self, keys):
        return [True] * (len(keys) + 1)


@pytest.fixture
def presence_on(closing):
    """Open a store behind an I/O client; return what the engine's side knows of it."""

    def presence(store, timeout_s, clock=None):
        client = closing(client_over({"t": store}, Slab(1, 4096), lookup_timeout_s=timeout_s))
        tier = client.tiers["t"]
        if clock is not None:
            tier._cache._clock = clock
        return tier

    return presence


def answer(prober, key, until):
    return until(lambda: [a] if (a := prober.holds(key)) is not None else None)[0]


def test_a_probe_answers_and_is_believed_for_a_while(presence_on, until):
    store = Store([b"here"])
    prober = presence_on(store, timeout_s=5.0)
    assert prober.holds(b"here") is None
    assert answer(prober, b"here", until) is True
    assert answer(prober, b"gone", until) is False
    assert sum(batch.count(b"here") for batch in store.batches) == 1


def test_questions_never_stop_being_answered(presence_on, until):
    """A key that is added while a probe takes the list must not wait for ever."""
    store = Store(str(i).encode() for i in range(0, 4000, 2))
    prober = presence_on(store, timeout_s=30.0)
    keys = [str(i).encode() for i in range(4000)]
    for key in keys:
        prober.holds(key)
        if len(key) % 2:
            time.sleep(0)
    assert [answer(prober, key, until) for key in keys] == [i % 2 == 0 for i in range(4000)]


def test_no_answer_in_time_is_no(presence_on):
    now = [0.0]
    prober = presence_on(Silent([]), timeout_s=1.0, clock=lambda: now[0])
    assert prober.holds(b"a") is None
    now[0] = 1.1
    assert prober.holds(b"a") is False


def test_a_wrong_number_of_answers_is_no(presence_on, until):
    prober = presence_on(Liar([]), timeout_s=5.0)
    prober.holds(b"a"), prober.holds(b"b"), prober.holds(b"c")
    assert [answer(prober, key, until) for key in (b"a", b"b", b"c")] == [False] * 3


def test_a_chunk_that_could_not_be_loaded_is_not_promised_again_soon(presence_on, until):
    now = [0.0]
    prober = presence_on(Store([b"a"]), timeout_s=5.0, clock=lambda: now[0])
    assert answer(prober, b"a", until) is True
    prober.forget([b"a"])
    now[0] = 30.0
    assert prober.holds(b"a") is False
    now[0] = 100.0
    assert answer(prober, b"a", until) is True


def test_the_log_names_a_timeout_which_has_no_words(presence_on, until, caplog):
    prober = presence_on(Silent([]), timeout_s=0.02)
    assert prober.holds(b"k") is None
    told = "t: a lookup of 1 chunks failed, and they count as missing: no answer within 0.02 s"
    until(lambda: f"{told}, the lookup_timeout_s" in caplog.messages)


def test_a_timeout_of_the_store_itself_is_told_as_that(presence_on, until, caplog):
    class Refusing(Store):
        async def contains(self, keys):
            raise TimeoutError("no connection in 3 s")

    prober = presence_on(Refusing([]), timeout_s=60.0)
    assert prober.holds(b"k") is None
    until(lambda: [line for line in caplog.messages if "a lookup of 1 chunks failed" in line])
    assert caplog.messages[-1].endswith("count as missing: no connection in 3 s")


def test_an_answer_is_believed_for_two_seconds_and_asked_for_again_after_them(presence_on, until):
    now, store = [0.0], Store([b"here"])
    prober = presence_on(store, timeout_s=5.0, clock=lambda: now[0])
    for key, present in ((b"here", True), (b"gone", False)):
        now[0] = 0.0
        assert answer(prober, key, until) is present
        now[0] = 1.99
        listing = prober.listing
        assert prober.holds(key) is present, (listing, vars(prober), vars(prober._cache))
        now[0] = 2.0
        assert prober.holds(key) is None
        assert answer(prober, key, until) is present
    assert sum(map(len, store.batches)) == 4


def test_answers_are_bounded_and_the_oldest_are_dropped_first(presence_on, until, monkeypatch):
    monkeypatch.setattr(presence_module, "MAX_ENTRIES", 10)
    store = Store(b"%d" % i for i in range(30))
    prober = presence_on(store, timeout_s=30.0, clock=lambda: 0.0)
    for i in range(30):
        assert answer(prober, b"%d" % i, until) is True
    assert [prober.holds(b"%d" % i) for i in range(21, 30)] == [True] * 9
    assert prober.holds(b"0") is None


def test_an_answer_that_comes_after_a_chunk_was_forgotten_changes_nothing(presence_on, until):
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Store):
        async def contains(self, keys):
            asked.set()
            await asyncio.to_thread(go_on.wait)
            return await super().contains(keys)

    prober = presence_on(Slow([b"a"]), timeout_s=30.0)
    assert prober.holds(b"a") is None
    assert asked.wait(10)
    prober.forget([b"a"])
    go_on.set()
    assert prober.holds(b"b") is None
    until(lambda: prober.holds(b"b") is not None)
    assert prober.holds(b"a") is False


def test_questions_that_a_blocked_server_does_not_read_do_not_pile_up(until):
    client = client_over({"t": Store([])}, Slab(1, 4096), lookup_timeout_s=0.1)
    tier, gate = client.tiers["t"], threading.Event()
    loop_of(client).call_soon_threadsafe(gate.wait, 60)
    for first in range(0, 60_000, 1000):
        for i in range(first, first + 1000):
            tier.holds(b"%036d" % i)
        until(lambda: not tier._cache._questions)
    assert len(client._link._out) < CLOGGED_BYTES + 100_000
    gate.set()
    until(lambda: not client._link._out)
    assert until(lambda: tier.holds(b"asked again") is False)
    client.close()
