"""The conformance suite of backends, for every store below host memory.

A backend's whole test class::

    class TestMine(BackendSuite):
        def open(self, namespace):
            return open_backend("mine", {"root": str(self.folder)}, namespace)

Payloads are a function of the key, so any wrong byte is found without a copy of what was written.
Tests are plain functions that run their own event loop: no plug-in of pytest is needed.
"""

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvoffload.backends.base import Backend, LocalIndex, Observable, ReadsEach
from kvoffload.testing.harness import (
    CHUNK_BYTES,
    LONG_S,
    filled,
    keys_of,
    on_a_loop,
    payload_of,
    settled,
    slots,
    wrong_bytes,
)
from kvoffload.testing.hazards import HazardSuite
from kvoffload.testing.indexes import IndexSuite

__all__ = [
    "CHUNK_BYTES",
    "BackendSuite",
    "PersistentBackendSuite",
    "filled",
    "keys_of",
    "payload_of",
    "slots",
]


async def _reads_all(backend: Backend, keys: Sequence[bytes]) -> None:
    """Check that each chunk is read, with the bytes of its key."""
    into = slots(len(keys))
    assert await backend.read(keys, into) == [True] * len(keys)
    assert wrong_bytes(keys, into) == []


class BackendSuite(IndexSuite, HazardSuite):
    """Tests to inherit; define :meth:`open`.

    Two more methods extend the suite: :meth:`damage` and :meth:`open_small`. A test that lacks its
    method is skipped, and names the unproven property. A store in ordinary memory has no damage:
    ``test_a_damaged_chunk_is_a_miss_and_can_come_back = None`` leaves that test out.
    """

    @on_a_loop
    async def test_a_chunk_reported_is_there(self) -> None:
        """Each chunk read is reported once, when its bytes are whole; no other is."""
        backend, keys, into = await self.opened(), keys_of(9), slots(9)
        if not isinstance(backend, ReadsEach):
            return
        stored, there = keys[::2], []
        await backend.write(stored, filled(stored))

        def arrived(i: int) -> None:
            there.append((i, wrong_bytes(keys[i : i + 1], into[i : i + 1])))

        answers = await backend.read_each(keys, into, arrived)
        assert answers == [key in stored for key in keys]
        assert sorted(there) == [(i, []) for i in range(0, 9, 2)]

    @on_a_loop
    async def test_answers_come_in_the_order_asked(self) -> None:
        """Present and absent keys mixed, in both directions."""
        backend, keys = await self.opened(), keys_of(8)
        stored = keys[::2]
        assert await backend.write(stored, filled(stored)) == [True] * 4
        expected = [key in stored for key in keys]
        for order in (1, -1):
            asked, answers, into = keys[::order], expected[::order], slots(8)
            assert await backend.contains(asked) == answers
            assert await backend.read(asked, into) == answers
            assert wrong_bytes(asked, into, answers) == []

    @on_a_loop
    async def test_an_empty_batch_is_no_error(self) -> None:
        backend = await self.opened()
        assert await backend.contains([]) == []
        assert await backend.read([], []) == []
        assert await backend.write([], []) == []
        await backend.remove([])

    @on_a_loop
    async def test_lengths_that_differ_are_misuse(self) -> None:
        """Two keys with one buffer are a bug of the caller, not a miss."""
        backend, keys = await self.opened(), keys_of(2)
        with pytest.raises(ValueError):  # noqa: PT011 - the text is the backend's own
            await backend.read(keys, slots(1))
        with pytest.raises(ValueError):  # noqa: PT011
            await backend.write(keys, filled(keys[:1]))

    @on_a_loop
    async def test_a_chunk_of_another_length_is_a_miss(self) -> None:
        backend, keys = await self.opened(), keys_of(1)
        await backend.write(keys, filled(keys))
        assert await backend.read(keys, slots(1, CHUNK_BYTES // 2)) == [False]
        assert await backend.read(keys, slots(1, CHUNK_BYTES * 2)) == [False]

    @on_a_loop
    async def test_odd_sizes_and_unaligned_or_read_only_memory_work(self) -> None:
        backend = await self.opened()
        for size in (1, 511, 4095, 4096, 4097, 70_001):
            keys = keys_of(1, f"odd{size}")
            memory = memoryview(b"-" + payload_of(keys[0], size))[1:]
            assert await backend.write(keys, [memory]) == [True]
            into = memoryview(bytearray(size + 3))[3:]
            assert await backend.read(keys, [into]) == [True]
            assert wrong_bytes(keys, [into]) == []

    @on_a_loop
    async def test_the_callers_memory_is_free_again_after_a_write(self) -> None:
        backend, keys = await self.opened(), keys_of(3)
        memory = filled(keys)
        await backend.write(keys, memory)
        for slot in memory:
            slot[:] = bytes(CHUNK_BYTES)
        await _reads_all(backend, keys)

    @on_a_loop
    async def test_writing_again_changes_nothing(self) -> None:
        """Equal keys mean equal bytes: a second store is harmless."""
        backend, keys = await self.opened(), keys_of(2)
        for _ in range(3):
            assert await backend.write(keys, filled(keys)) == [True, True]
        assert await backend.read(keys, slots(2)) == [True, True]

    @on_a_loop
    async def test_the_same_key_twice_in_one_batch(self) -> None:
        backend, (key,) = await self.opened(), keys_of(1)
        assert await backend.write([key, key], filled([key, key])) == [True, True]
        await _reads_all(backend, [key, key])

    @on_a_loop
    async def test_removed_keys_are_gone_and_can_come_back(self) -> None:
        """Unknown keys are ignored."""
        backend, keys = await self.opened(), keys_of(4)
        await backend.write(keys, filled(keys))
        await backend.remove([keys[0], *keys_of(1, "never stored"), keys[2]])
        assert await backend.contains(keys) == [False, True, False, True]
        assert await backend.read(keys, slots(4)) == [False, True, False, True]
        assert await backend.write(keys[:1], filled(keys[:1])) == [True]
        assert await backend.read(keys[:1], slots(1)) == [True]

    @on_a_loop
    async def test_keys_of_any_bytes(self) -> None:
        """A key is data: short ones, zero bytes, slashes and dots work."""
        backend = await self.opened()
        keys = [b"\0", b"..", b"/etc/passwd", b"\xff" * 64, b"a" * 100, b"%s{0}\r\n", b"a"]
        assert await backend.write(keys, filled(keys)) == [True] * len(keys)
        await _reads_all(backend, keys)

    @on_a_loop
    async def test_many_batches_at_once(self) -> None:
        backend, keys = await self.opened(), keys_of(32)

        async def turn(i: int) -> None:
            mine = keys[i * 4 : i * 4 + 8]
            await backend.write(mine, filled(mine))
            into = slots(len(mine))
            good = await backend.read(mine, into)
            assert wrong_bytes(mine, into, good) == []
            await backend.remove(mine[:2])

        await asyncio.gather(*(turn(i) for i in range(8)))

    @on_a_loop
    async def test_a_cancelled_call_leaves_the_memory_alone(self) -> None:
        """No call writes into the caller's slots after its cancellation."""
        backend, keys = await self.opened(), keys_of(16)
        await backend.write(keys, filled(keys))
        for pause in (0, 0, 0.0005, 0.002):
            into = slots(16)
            task = asyncio.ensure_future(backend.read(keys, into))
            await asyncio.sleep(pause)
            task.cancel()
            await settled(task)
            for slot in into:
                slot[:] = b"\xaa" * CHUNK_BYTES
            await asyncio.sleep(0.005)
            assert all(bytes(slot) == b"\xaa" * CHUNK_BYTES for slot in into)
        assert await backend.read(keys[:1], slots(1)) == [True]

    @on_a_loop
    async def test_a_cancelled_write_is_whole_or_absent(self) -> None:
        """The caller reuses the slot at once; a reader sees the right bytes or none."""
        backend = await self.opened()
        for turn, pause in enumerate((0, 0, 0.0005, 0.002)):
            keys = keys_of(12, f"cancel{turn}")
            memory = filled(keys)
            task = asyncio.ensure_future(backend.write(keys, memory))
            await asyncio.sleep(pause)
            task.cancel()
            await settled(task)
            for slot in memory:
                slot[:] = bytes(CHUNK_BYTES)
            into = slots(12)
            good = await backend.read(keys, into)
            assert wrong_bytes(keys, into, good) == []

    @on_a_loop
    async def test_after_close_every_answer_is_false(self) -> None:
        backend, keys = await self.opened(), keys_of(2)
        await backend.write(keys, filled(keys))
        await backend.close()
        await backend.close()
        assert await backend.contains(keys) == [False, False]
        assert await backend.read(keys, slots(2)) == [False, False]
        assert await backend.write(keys, filled(keys)) == [False, False]
        await backend.remove(keys)

    @on_a_loop
    async def test_usage_stays_within_the_capacity(self) -> None:
        """Where usage is reported, it is never above the capacity and never negative."""
        backend = await self.opened()
        if not isinstance(backend, Observable):
            pytest.skip("reports no usage")
        for turn in range(4):
            keys = keys_of(32, f"turn{turn}")
            await backend.write(keys, filled(keys))
            usage = backend.usage()
            resident_bytes, capacity_bytes, *_ = usage
            assert resident_bytes is None or resident_bytes >= 0
            if resident_bytes is not None and capacity_bytes is not None:
                assert resident_bytes <= capacity_bytes
        assert all(count >= 0 for count in backend.counters().values())

    @on_a_loop
    async def test_optional_protocols_are_whole(self) -> None:
        """An engine calls no method of a protocol that is incomplete."""
        backend = await self.opened()
        for protocol in (LocalIndex, Observable):
            names = [name for name in vars(protocol) if not name.startswith("_")]
            own = [name for name in names if name != "close" and hasattr(backend, name)]
            remedy = f"{protocol.__name__} is incomplete beside {own}: inherit it"
            assert not own or isinstance(backend, protocol), remedy

    @on_a_loop
    async def test_no_attribute_hides_a_method(self) -> None:
        """A value in place of a method that a base class calls makes every chunk a miss."""
        backend = await self.opened()
        hidden = [name for name in vars(backend) if callable(getattr(type(backend), name, None))]
        assert not hidden, f"attributes hide methods of the class: rename {hidden}"
        values = [
            name
            for name in dir(type(backend))
            if not callable(value := inspect.getattr_static(type(backend), name))
            and not isinstance(value, property | staticmethod | classmethod)
            and any(callable(vars(base).get(name)) for base in type(backend).__mro__)
        ]
        assert not values, f"values hide methods of a base class: rename {values}"

    @on_a_loop
    async def test_the_loop_is_not_blocked(self) -> None:
        """Other coroutines get their turns while a large batch moves."""
        backend, keys = await self.opened(), keys_of(48)
        turns = 0

        async def heartbeat() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beat = asyncio.ensure_future(heartbeat())
        await backend.write(keys, filled(keys))
        await backend.read(keys, slots(48))
        beat.cancel()
        await settled(beat)
        assert turns > 4

    def test_it_works_on_one_thread_with_a_suspicious_loop(self) -> None:
        """One executor thread and asyncio's debug mode find deadlocks and blocking calls."""

        async def whole() -> None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            backend, keys = await self.opened(), keys_of(8)
            assert await backend.write(keys, filled(keys)) == [True] * 8
            assert await backend.read(keys, slots(8)) == [True] * 8
            await backend.close()

        asyncio.run(asyncio.wait_for(whole(), LONG_S), debug=True)


class PersistentBackendSuite(BackendSuite):
    """For stores that outlive the process: :meth:`open` twice opens the same storage."""

    @on_a_loop
    async def test_chunks_outlive_the_backend(self) -> None:
        backend, keys = await self.opened(), keys_of(6)
        await backend.write(keys, filled(keys))
        await backend.close()
        again = await self.opened()
        assert await again.contains(keys) == [True] * 6
        await _reads_all(again, keys)

    @on_a_loop
    async def test_a_new_reader_gets_the_chunks_of_earlier_processes(self) -> None:
        """Where changes are listed, all stored chunks are listed before ``is_complete``."""
        one, keys = await self.opened(), keys_of(6)
        if not isinstance(one, LocalIndex):
            pytest.skip("has no index")
        two = await self.opened("two")
        await one.write(keys, filled(keys))
        await two.write(keys_of(3, "two"), filled(keys_of(3, "two")))
        await one.close()
        again = self.open("suite")
        self._opened.append(again)
        assert isinstance(again, LocalIndex)
        copy: set[bytes] = set()
        while not again.is_complete:
            await asyncio.sleep(0)
            took = again.take_changes(4)
            assert len(took) <= 4
            copy |= {key for key, present in took if present}
        assert copy == set(keys)

    @on_a_loop
    async def test_namespaces_do_not_see_each_other(self) -> None:
        one, two, (key,) = await self.opened("one"), await self.opened("two"), keys_of(1)
        await one.write([key], filled([key]))
        assert await two.contains([key]) == [False]
        assert await two.read([key], slots(1)) == [False]
        other = slots(1)
        other[0][:] = b"\x55" * CHUNK_BYTES
        await two.write([key], other)
        await _reads_all(one, [key])
        await two.remove([key])
        await _reads_all(one, [key])

    @on_a_loop
    async def test_a_new_namespace_learns_of_the_others_and_a_used_one_of_itself(self) -> None:
        """Where a store describes its namespaces, a cold start can be explained by their facts."""
        one, two, keys = await self.opened("one"), await self.opened("two"), keys_of(5)
        if not isinstance(one, Observable) or not isinstance(two, Observable):
            pytest.skip("describes no namespaces")
        if getattr(type(one), "described", None) is Observable.described:
            pytest.skip("describes no namespaces")
        await one.describe({"model": "m"})
        await one.write(keys, filled(keys))
        found = {each.namespace: each for each in await two.described()}
        assert found["one"].facts == {"model": "m"}
        assert found["one"].chunks > 0
        assert "two" not in found or not found["two"].chunks
        own = {each.namespace: each.chunks for each in await one.described()}
        assert own["one"] > 0
        await one.close()
        assert not list(await one.described())

    @on_a_loop
    async def test_two_backends_share_one_storage(self) -> None:
        one, two, keys = await self.opened(), await self.opened(), keys_of(4)
        await one.write(keys, filled(keys))
        await _reads_all(two, keys)
        await two.remove(keys[:2])
        assert await one.read(keys, slots(4)) == [False, False, True, True]
