"""Presence by probing: batched, bounded in time, never stuck."""

import asyncio
import time

import pytest

from kvoffload.transfer.io_loop import IOLoop, presence_on


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
