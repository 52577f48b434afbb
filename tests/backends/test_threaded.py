"""Three blocking functions as a backend: batches, cancellation, threads that hang."""

import asyncio
import threading
import time

import pytest

from kvoffload.backends.base import ReadResult, reason_of
from kvoffload.backends.threaded import InlineBackend, ThreadedBackend
from kvoffload.testing import BackendSuite
from kvoffload.testing.backends import filled, keys_of, slots, wrong_bytes
from tests.support.guide import follow


def test_the_backend_of_the_guide_passes_the_suite_as_printed(tmp_path):
    assert follow("write-a-backend.md", tmp_path) >= 27


class Functions:
    """The shortest ones. They wait while ``gate`` is closed."""

    def __init__(self, **threads):
        super().__init__(**threads)
        self.chunks = {}
        self.gate = threading.Event()
        self.gate.set()
        self.released = 0

    def get(self, key, into):
        self.gate.wait()
        if len(self.chunks.get(key, b"")) != len(into):
            return False
        into[:] = self.chunks[key]
        return True

    def put(self, key, chunk):
        self.gate.wait()
        self.chunks[key] = bytes(chunk)
        return True

    def has(self, key):
        return key in self.chunks

    def delete(self, key):
        self.chunks.pop(key, None)

    def release(self):
        self.released += 1


class Dictionary(Functions, ThreadedBackend):
    """On threads."""


class OnTheLoop(Functions, InlineBackend):
    """On the event loop."""


class Suite(BackendSuite):
    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # no medium that could damage it


class TestThreads(Suite):
    def open(self, namespace):
        return Dictionary()


class TestOneThread(Suite):
    def open(self, namespace):
        return Dictionary(threads=1, store_threads=0)


class TestOnTheLoop(Suite):
    def open(self, namespace):
        return OnTheLoop()


@pytest.mark.parametrize("base", [Dictionary, OnTheLoop])
async def test_what_a_function_raises_is_a_miss_of_that_chunk_alone(base, caplog):
    class Raising(base):
        def get(self, key, into):
            if key == keys[1]:
                raise OSError("bad sector")
            return super().get(key, into)

    backend, keys, into = Raising(), keys_of(3), slots(3)
    assert await backend.write(keys, filled(keys)) == [True] * 3
    assert await backend.read(keys, into) == [True, False, True]
    assert wrong_bytes(keys, into, [True, False, True]) == []
    assert backend.counters()["read_failed"] == 1
    assert "bad sector" in caplog.text
    await backend.close()


async def test_a_cancelled_read_ends_after_its_functions():
    backend, keys = Dictionary(threads=2), keys_of(8)
    await backend.write(keys, filled(keys))
    backend.gate.clear()
    task = asyncio.ensure_future(backend.read(keys, slots(8)))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    backend.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await backend.contains(keys) == [True] * 8
    await backend.close()


async def test_hung_threads_are_misses_at_once_and_close_does_not_wait_for_them(caplog):
    backend, keys = Dictionary(threads=1, stall_s=0.05), keys_of(2)
    await backend.write(keys, filled(keys))
    backend.gate.clear()
    hung = asyncio.ensure_future(backend.read(keys, slots(2)))
    await asyncio.sleep(0.1)
    begun_s = time.monotonic()
    assert await backend.read(keys, slots(2)) == [False, False]
    assert time.monotonic() - begun_s < 10
    assert backend.counters()["read_stalled"] >= 2
    assert "hung in a read" in caplog.text
    await backend.close()
    assert backend.released == 0
    backend.gate.set()
    await hung
    async with asyncio.timeout(30):
        while not backend.released:  # noqa: ASYNC110 - it happens on a thread
            await asyncio.sleep(0.01)


async def test_a_store_that_hangs_counts_as_one_on_the_threads_of_loads(caplog):
    backend, keys = Dictionary(threads=1, store_threads=0, stall_s=0.05), keys_of(3)
    backend.gate.clear()
    hung = asyncio.ensure_future(backend.write(keys, filled(keys)))
    try:
        async with asyncio.timeout(30):
            while not backend.counters():  # noqa: ASYNC110 - it happens on a thread
                await asyncio.sleep(0.01)
    finally:
        backend.gate.set()
    assert backend.counters() == {"write_stalled": 2}
    assert "hung in a write" in caplog.text
    assert await hung == [True, False, False]
    await backend.close()


async def test_release_comes_once_and_last():
    backend, keys = Dictionary(), keys_of(4)
    backend.gate.clear()
    writing = asyncio.ensure_future(backend.write(keys, filled(keys)))
    await asyncio.sleep(0.02)
    closing = asyncio.ensure_future(backend.close())
    await asyncio.sleep(0.02)
    assert backend.released == 0
    backend.gate.set()
    await closing
    await writing
    await backend.close()
    assert backend.released == 1


async def test_a_read_says_why_by_value():
    class Knowing(Dictionary):
        def get(self, key, into):
            return ReadResult.CORRUPT if key == keys[1] else super().get(key, into)

    backend, keys = Knowing(threads=1), keys_of(3)
    await backend.write(keys[:2], filled(keys[:2]))
    answers = await backend.read(keys, slots(3))
    assert answers == [True, False, False]
    assert (answers[1], reason_of(answers)) == (ReadResult.CORRUPT, "corrupt")
    assert reason_of(answers[:1]) == ""
    assert reason_of(answers[2:]) == "missing"
    await backend.close()
    answers = await backend.read(keys, slots(3))
    assert [answer.value for answer in answers] == ["unavailable"] * 3


def test_a_result_equals_the_bool_it_stands_for_and_no_other_result():
    for one in ReadResult:
        assert one == bool(one)
        assert one != (not one)
        assert [other for other in ReadResult if other == one] == [one]
    assert [one for one in ReadResult if one] == [ReadResult.HIT]
    reasons = ("", "missing", "corrupt_key", "lost_timeout", "io_EIO")
    assert [ReadResult.of(reason) for reason in reasons] == list(ReadResult)
