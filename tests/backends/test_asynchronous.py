"""Three coroutines as a backend: verification, chunks in flight, cancellation, a hung client."""

import asyncio

import pytest
from disk_parts import closed_later, until

from kvoffload.backends import asynchronous
from kvoffload.backends.asynchronous import AsyncBackend
from kvoffload.backends.base import ReadResult
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots, wrong_bytes
from tests.backends import test_threaded


class Moving(AsyncBackend):
    """Moves bytes in two steps, and looks at none. It waits while ``gate`` is closed."""

    def __init__(self, namespace="suite", **settings):
        super().__init__(namespace, **settings)
        self.stored = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_flight = self.most_in_flight = self.released = 0

    async def get(self, key, header, into):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            value = self.stored.get(key)
            if value is None:
                return False
            for part, start in ((header, 0), (into, len(header))):
                found = value[start : start + len(part)]
                part[: len(found)] = found
                await asyncio.sleep(0)
            return True
        finally:
            self.in_flight -= 1

    async def put(self, key, header, chunk):
        await self.gate.wait()
        value = [header, bytes(chunk[:100])]
        await asyncio.sleep(0)
        self.stored[key] = b"".join([*value, chunk[100:]])
        return True

    async def has(self, key):
        return key in self.stored

    async def delete(self, key):
        self.stored.pop(key, None)

    async def release(self):
        self.released += 1


class TestMoving(test_threaded.TestMoving):
    new = Moving


class TestEncrypted(test_threaded.TestEncrypted):
    new = Moving


class TestVerified(test_threaded.TestVerified):
    new = Moving


class TestOneByOne(TestMoving):
    def open(self, namespace):
        return Moving(at_once=1)


async def test_a_hit_is_what_was_verified_and_not_what_a_subclass_says():
    class Sure(Moving):
        async def get(self, key, header, into):
            await super().get(key, header, into)
            return ReadResult.HIT

    backend, keys = closed_later(Sure()), keys_of(2)
    assert await backend.write(keys, filled(keys)) == [True] * 2
    backend.stored[keys[0]] = backend.stored[keys[1]]
    assert await backend.read(keys, slots(2)) == [ReadResult.CORRUPT, ReadResult.HIT]


async def test_the_checksum_of_a_large_chunk_is_computed_on_a_thread(monkeypatch):
    monkeypatch.setattr(asynchronous, "INLINE_BYTES", CHUNK_BYTES - 1)
    threads = []

    async def noted(work, *args):
        threads.append(work.__name__)
        return await run_once(work, *args)

    run_once = asynchronous.run_once
    monkeypatch.setattr(asynchronous, "run_once", noted)
    backend, keys, into = closed_later(Moving()), keys_of(1), slots(1)
    assert await backend.write(keys, filled(keys)) == [True]
    assert await backend.read(keys, into) == [True]
    assert wrong_bytes(keys, into) == []
    assert threads == ["pack", "verdict"]


async def test_calls_share_the_limit_of_chunks_in_flight():
    backend, keys = closed_later(Moving(at_once=3)), keys_of(8)
    await backend.write(keys, filled(keys))
    await asyncio.gather(*(backend.read(keys, slots(8)) for _ in range(4)))
    assert backend.most_in_flight == 3


async def test_what_a_coroutine_raises_is_a_miss_of_that_chunk_alone(caplog):
    class Raising(Moving):
        async def get(self, key, header, into):
            if key == keys[1]:
                raise OSError("connection reset")
            return await super().get(key, header, into)

    backend, keys = closed_later(Raising()), keys_of(3)
    await backend.write(keys, filled(keys))
    answers = await backend.read(keys, slots(3))
    assert answers == [True, False, True]
    assert answers[1] is ReadResult.UNAVAILABLE
    assert backend.counters() == {"read_failed": 1}
    assert "Raising: a read failed" in caplog.text
    assert "connection reset" in caplog.text


async def test_a_coroutine_that_cancels_itself_is_a_miss():
    class Cancelled(Moving):
        async def get(self, key, header, into):
            raise asyncio.CancelledError

    backend, keys = closed_later(Cancelled()), keys_of(3)
    await backend.write(keys, filled(keys))
    assert await backend.read(keys, slots(3)) == [False] * 3


async def test_a_cancelled_call_ends_after_its_chunks_in_flight_and_begins_no_more():
    backend, keys, into = closed_later(Moving(at_once=2)), keys_of(8), slots(8)
    await backend.write(keys, filled(keys))
    backend.gate.clear()
    task = asyncio.ensure_future(backend.read(keys, into))
    other = asyncio.ensure_future(backend.read(keys[:1], slots(1)))
    await asyncio.sleep(0.02)
    for _ in range(2):  # impatient callers too
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    other.cancel()  # nothing of it has begun: it ends at once
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(other, 10)
    backend.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wrong_bytes(keys[:2], into[:2]) == []
    assert all(bytes(slot) == bytes(CHUNK_BYTES) for slot in into[2:])
    assert backend.in_flight == 0
    assert await backend.read(keys, into) == [True] * 8


async def closed_while_it_writes(backend, num_chunks):
    """Return a write that waits for the gate, and a close that waits for the write."""
    backend.gate.clear()
    keys = keys_of(num_chunks)
    writing = asyncio.ensure_future(backend.write(keys, filled(keys)))
    await asyncio.sleep(0.01)
    closing = asyncio.ensure_future(backend.close())
    await asyncio.sleep(0.01)
    return writing, closing


async def test_close_releases_after_the_last_chunk_and_only_once():
    backend = Moving()
    writing, closing = await closed_while_it_writes(backend, 2)
    assert backend.released == 0
    backend.gate.set()
    await closing
    await backend.close()
    assert (backend.released, await writing) == (1, [True, True])


async def test_close_does_not_wait_for_a_client_that_hangs(caplog):
    backend, keys = Moving(close_s=0.02), keys_of(1)
    backend.gate.clear()
    hung = asyncio.ensure_future(backend.write(keys, filled(keys)))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(backend.close(), 10)
    assert backend.released == 0
    assert "a call hangs" in caplog.text
    backend.gate.set()
    await hung
    await asyncio.sleep(0.05)
    assert backend.released == 1


async def test_a_close_that_is_cancelled_releases_all_the_same():
    """The next close() does nothing: what the client holds would stay."""
    backend = Moving()
    writing, closing = await closed_while_it_writes(backend, 1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(closing, 10)
    backend.gate.set()
    assert await writing == [True]
    assert await until(lambda: backend.released)
