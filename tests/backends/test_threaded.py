"""Three blocking functions as a backend: batches, cancellation, threads that hang."""

import asyncio
import re
import threading
import time

import pytest
from disk_parts import closed_later, until

from kvoffload.backends.base import ReadResult, reason_of
from kvoffload.backends.encryption import CipherSeal
from kvoffload.backends.header import parse_header
from kvoffload.backends.seals import ChecksumSeal
from kvoffload.backends.threaded import InlineBackend, ThreadedBackend, ThreadPoolBackend
from kvoffload.testing import BackendSuite
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots, wrong_bytes
from tests.support.guide import follow


def test_the_backend_of_the_guide_passes_the_suite_as_printed(tmp_path, python):
    assert follow("write-a-backend.md", tmp_path, python) >= 26


class Functions:
    """The shortest ones. They wait while ``gate`` is closed."""

    def __init__(self, **threads):
        super().__init__(**threads)
        self.chunks = {}
        self.gate = threading.Event()
        self.gate.set()
        self.released = 0

    def load(self, key, into):
        self.gate.wait()
        if len(self.chunks.get(key, b"")) != len(into):
            return False
        into[:] = self.chunks[key]
        return True

    def store(self, key, chunk):
        self.gate.wait()
        self.chunks[key] = bytes(chunk)
        return True

    def has(self, key):
        return key in self.chunks

    def delete(self, key):
        self.chunks.pop(key, None)

    def release(self):
        self.released += 1


@pytest.mark.parametrize("name", ["get", "put", "has", "delete", "load", "store", "release"])
def test_a_coroutine_is_no_function_of_a_chunk(name):
    """The coroutine that a call returns would count as a stored chunk, and never run."""

    async def function(self, key, *memory):
        return True

    with pytest.raises(TypeError, match=rf"Wrong\.{name} is a coroutine.*AsyncBackend"):
        type("Wrong", (ThreadedBackend,), {name: function})


@pytest.mark.parametrize("name", ["get", "put"])
def test_a_coroutine_of_the_plug_ins_own_is_none_of_the_functions(name):
    """A store with a format of its own has neither function: it may use the names."""

    async def function(self, url):
        return url

    type("Own", (ThreadPoolBackend,), {name: function})


class Dictionary(Functions, ThreadPoolBackend):
    """On threads."""


class OnTheLoop(Functions, InlineBackend):
    """On the event loop."""


class Moving(ThreadedBackend):
    """Moves bytes, and looks at none."""

    def __init__(self, namespace="suite", **threads):
        super().__init__(namespace, **threads)
        self.stored = {}

    def get(self, key, header, into):
        if key not in self.stored:
            return False
        value = self.stored[key]
        for part, start in ((header, 0), (into, len(header))):
            found = value[start : start + len(part)]
            part[: len(found)] = found
        return True

    def put(self, key, header, chunk):
        self.stored[key] = b"".join([header, chunk])
        return True

    def has(self, key):
        return key in self.stored

    def delete(self, key):
        self.stored.pop(key, None)


NATURAL = """closed counts pool pools threads runner read write load store fill each frames digest
    namespace lock failures release close shut_down counting header key chunks stall_s"""


class Natural(Moving):
    """Uses each private name that comes to an author's mind, as a value or as a method."""

    def __init__(self, namespace="suite"):
        super().__init__(namespace)
        for name in NATURAL.split():
            setattr(self, f"_{name}", None)

    def _name(self, key):
        return key

    def get(self, key, header, into):
        return super().get(self._name(key), header, into)

    def put(self, key, header, chunk):
        return super().put(self._name(key), header, chunk)


SEAL = CipherSeal([b"0123456789abcdef" * 4])


class Suite(BackendSuite):
    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # no medium that could damage it


class TestThreads(Suite):
    def open(self, namespace):
        return Dictionary()


class TestOneThread(Suite):
    def open(self, namespace):
        return Dictionary(threads=1, store_threads=0)


class TestMoving(BackendSuite):
    new = Moving

    def open(self, namespace):
        return self.new()

    def damage(self, backend, key):
        value = backend.stored[key]
        backend.stored[key] = value[:-1] + bytes([value[-1] ^ 1])


class TestEncrypted(TestMoving):
    def open(self, namespace):
        backend = self.new(namespace)
        backend.encrypt_with(SEAL)
        return backend


class TestNatural(TestMoving):
    new = Natural


class TestOnTheLoop(Suite):
    def open(self, namespace):
        return OnTheLoop()


@pytest.mark.parametrize("base", [Dictionary, OnTheLoop])
async def test_what_a_function_raises_is_a_miss_of_that_chunk_alone(base, caplog):
    class Raising(base):
        def load(self, key, into):
            if key == keys[1]:
                raise OSError("bad sector")
            return super().load(key, into)

    backend, keys, into = closed_later(Raising()), keys_of(3), slots(3)
    assert await backend.write(keys, filled(keys)) == [True] * 3
    assert await backend.read(keys, into) == [True, False, True]
    assert wrong_bytes(keys, into, [True, False, True]) == []
    assert backend.counters()["read_failed"] == 1
    assert "bad sector" in caplog.text


async def test_a_cancelled_read_ends_after_its_functions():
    backend, keys = closed_later(Dictionary(threads=2)), keys_of(8)
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


class Interruptible(Dictionary):
    """Ends a call that waits when it is told so; counts the threads inside."""

    def __init__(self, at_once=None, **threads):
        super().__init__(**threads)
        self.ended, self.inside, self.most = {}, set(), 0
        self.limit = at_once

    def at_once(self):
        return self.limit

    def interrupt(self, thread):
        self.ended[thread].set()

    def load(self, key, into):
        me = threading.get_ident()
        self.ended[me] = threading.Event()
        self.inside.add(me)
        self.most = max(self.most, len(self.inside))
        while not self.gate.wait(0.01):
            if self.ended[me].is_set():
                break
        self.inside.discard(me)
        return False


async def test_a_cancelled_call_interrupts_its_own_threads_and_no_others():
    backend, keys = closed_later(Interruptible(threads=2)), keys_of(3)
    backend.gate.clear()
    staying = asyncio.ensure_future(backend.read(keys[:1], slots(1)))
    assert await until(lambda: backend.inside)
    (stays,) = backend.inside
    leaving = asyncio.ensure_future(backend.read(keys, slots(3)))
    assert await until(lambda: len(backend.inside) == 2)
    leaving.cancel()
    await asyncio.wait([leaving], timeout=60)
    assert leaving.cancelled()
    assert backend.inside == {stays}
    assert not backend.ended[stays].is_set()
    backend.gate.set()
    assert await staying == [False]


async def test_a_backend_may_limit_the_threads_of_one_call():
    for limit, most in ((2, 2), (None, 4), (9, 4)):
        backend = Interruptible(limit, threads=4)
        backend.gate.clear()
        call = asyncio.ensure_future(backend.read(keys_of(8), slots(8)))
        assert await until(lambda b=backend, most=most: len(b.inside) == most)
        await asyncio.sleep(0.05)
        backend.gate.set()
        assert await call == [False] * 8
        assert backend.most == most
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
    assert await until(lambda: backend.released)


async def test_a_store_that_hangs_counts_as_one_on_the_threads_of_loads(caplog):
    backend, keys = closed_later(Dictionary(threads=1, store_threads=0, stall_s=0.05)), keys_of(3)
    backend.gate.clear()
    hung = asyncio.ensure_future(backend.write(keys, filled(keys)))
    try:
        assert await until(backend.counters)
    finally:
        backend.gate.set()
    assert backend.counters() == {"write_stalled": 2}
    assert "hung in a write" in caplog.text
    assert await hung == [True, False, False]


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


@pytest.mark.parametrize("turns", range(1, 6))
async def test_a_close_that_is_cancelled_anywhere_releases_all_the_same(turns):
    """The next close() does nothing: threads, descriptors and locks would stay."""

    class Slow(Dictionary):
        async def closing(self):
            for _ in range(3):
                await asyncio.sleep(0)

    backend, keys = Slow(), keys_of(4)
    backend.gate.clear()
    writing = asyncio.ensure_future(backend.write(keys, filled(keys)))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(backend.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(2):  # impatient callers too
        closing.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(closing, 10)
    backend.gate.set()
    await writing
    assert await until(lambda: backend.released)
    assert backend.released == 1


async def test_a_read_says_why_by_value():
    class Knowing(Dictionary):
        def load(self, key, into):
            return ReadResult.CORRUPT if key == keys[1] else super().load(key, into)

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


def private_names(backend):
    """Return the names that a subclass would take away from a base class of its backend."""
    names = {name for name in {*vars(backend), *dir(backend)} if re.match(r"_[a-z]", name)}
    return {name for name in names if not re.match("_abc_|_is_.*protocol", name)}


def flipped(value):
    return value[:300] + bytes([value[300] ^ 1]) + value[301:]


class TestVerified:
    """What a base class does with the bytes that functions, or coroutines, only move."""

    new = Moving

    async def test_no_private_name_of_a_base_class_can_meet_one_of_a_subclass(self):
        assert private_names(closed_later(self.new())) == set()

    async def test_a_header_tells_the_tenant_to_those_who_know_it(self):
        keys = keys_of(2)
        for backend, seal in ((self.new(), ChecksumSeal()), (self.new(), SEAL)):
            backend.encrypt_with(seal)
            assert await backend.write(keys, filled(keys), [b"a" * 16, b""]) == [True] * 2
            one, none = (parse_header(backend.stored[key]) for key in keys)
            assert (seal.is_of(one, b"a" * 16), seal.is_of(one, b"b" * 16)) == (True, False)
            assert seal.is_of(none, b"a" * 16) is None
            assert await backend.read(keys, slots(2)) == [True] * 2
            await backend.close()

    @pytest.mark.parametrize(
        ("change", "reason", "result"),
        [
            (flipped, "corrupt_payload", ReadResult.CORRUPT),
            (lambda value: value[:-1], "corrupt_payload", ReadResult.CORRUPT),
            (lambda value: value[:100], "corrupt_header", ReadResult.CORRUPT),
            (lambda value: b"", "corrupt_magic", ReadResult.CORRUPT),
            (lambda value: b"x" + value, "corrupt_magic", ReadResult.CORRUPT),
        ],
    )
    async def test_whatever_lies_under_a_key_is_verified_by_the_base_class(
        self, change, reason, result
    ):
        backend, keys = closed_later(self.new()), keys_of(2)
        assert await backend.write(keys, filled(keys)) == [True] * 2
        backend.stored[keys[0]] = change(backend.stored[keys[0]])
        into, arrived = slots(2), []
        answers = await backend.read_each(keys, into, arrived.append)
        assert (answers[0], answers[1]) == (result, True)
        assert arrived == [1]
        assert backend.counters() == {reason: 1}

    async def test_a_chunk_of_another_key_namespace_or_length_is_a_miss(self):
        backend, other, keys = closed_later(self.new()), closed_later(self.new("other")), keys_of(4)
        await backend.write(keys[:3], filled(keys[:3]))
        await other.write(keys[1:2], filled(keys[1:2]))
        backend.stored[keys[0]] = backend.stored[keys[2]]
        backend.stored[keys[1]] = other.stored[keys[1]]
        answers = await backend.read(keys, slots(4))
        assert [answer.value for answer in answers] == ["corrupt", "corrupt", "hit", "missing"]
        answers = await backend.read(keys[2:3], slots(1, CHUNK_BYTES // 2))
        assert [answer.value for answer in answers] == ["missing"]
        counts = {"corrupt_key": 1, "corrupt_namespace": 1, "read_missing": 1, "read_length": 1}
        assert backend.counters() == counts


async def test_a_function_that_answers_true_without_a_byte_is_a_miss():
    class Boasting(Moving):
        def get(self, key, header, into):
            return True

    backend, keys = closed_later(Boasting()), keys_of(2)
    await backend.write(keys, filled(keys))
    memory = filled(keys)  # the right bytes were in the slot before
    assert await backend.read(keys, memory) == [False, False]
    assert backend.counters() == {"corrupt_magic": 2}


async def test_an_author_gets_the_memory_of_the_caller_and_no_copy():
    seen = []

    class Looking(Moving):
        def get(self, key, header, into):
            seen.append(into)
            return super().get(key, header, into)

        def put(self, key, header, chunk):
            seen.append(chunk)
            return super().put(key, header, chunk)

    backend, (key,) = closed_later(Looking()), keys_of(1)
    memory = filled([key])[0]
    assert await backend.write([key], [memory]) == [True]
    assert await backend.read([key], [memory]) == [True]
    memory[:] = b"\x77" * CHUNK_BYTES
    assert [bytes(view[:2]) for view in seen] == [b"\x77\x77"] * 2
