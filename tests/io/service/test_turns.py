"""Turns of a session at the stores that it shares: a flood of one delays its own calls."""

import asyncio

import pytest
from disk_parts import until
from layers import shared_store

from kvoffload.backends.blocking_pool import undisturbed
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.io.open_stores import OpenStore
from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.turns import CHUNKS_PER_CALL, MOST_CHUNKS, Turns
from kvoffload.policies.lru import LRUPolicy
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots


async def settle():
    """Let all tasks go on until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


class Calls:
    """Calls that have turns, each until it may end."""

    def __init__(self, most):
        self.turns, self.begun, self.may_end = Turns(most), [], {}

    def begin(self, name, chunks):
        self.may_end[name] = asyncio.Event()
        return asyncio.create_task(self._call(name, chunks))

    async def _call(self, name, chunks):
        async def work():
            self.begun.append(name)
            await self.may_end[name].wait()

        await self.turns.call("read", "memory", chunks, work)


async def test_calls_have_turns_in_order_and_a_cancelled_one_lets_the_next_pass():
    calls, each = Calls(2 * (10 + CHUNKS_PER_CALL)), 10
    tasks = [calls.begin(name, each) for name in "abcde"]
    await settle()
    assert calls.begun == ["a", "b"]
    tasks[2].cancel()  # it waits for room
    tasks[3].cancel()  # it waits for its place
    await settle()
    assert calls.begun == ["a", "b"]
    calls.may_end["b"].set()
    await settle()
    assert calls.begun == ["a", "b", "e"]
    tasks[0].cancel()  # it has a turn
    tasks.append(calls.begin("f", each))
    await settle()
    assert calls.begun == ["a", "b", "e", "f"]


async def test_a_call_of_more_chunks_than_a_turn_has_is_alone():
    calls = Calls(20)
    calls.begin("small", 1)
    calls.begin("large", 1000)
    calls.begin("next", 1)
    await settle()
    assert calls.begun == ["small"], "a small one does not pass a large one"
    calls.may_end["small"].set()
    await settle()
    assert calls.begun == ["small", "large"]
    calls.may_end["large"].set()
    await settle()
    assert calls.begun == ["small", "large", "next"]


async def test_a_call_that_fails_at_once_or_is_a_future_ends_its_turn():
    """A plug-in's method may be an ordinary function that checks, and returns what to await."""

    def fails():
        raise OSError("not now")

    def is_ready():
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(7)
        return ready

    turns = Turns(1)
    for _ in range(2):
        with pytest.raises(OSError, match="not now"):
            await in_time(turns.call("read", "disk", 1, fails))
        assert await in_time(turns.call("read", "disk", 1, is_ready)) == 7


async def test_a_session_that_asks_for_much_leaves_the_threads_to_others():
    memory = HostStore(HostMemory(64 * CHUNK_BYTES, LRUPolicy), "n")
    shared, keys = shared_store(memory), keys_of(4)
    one, two = shared.new_view(), shared.new_view()
    await one.write(keys, filled(keys))
    reads, in_calls, most = memory.read_each, 0, 0

    async def counted(keys, *args):
        nonlocal in_calls, most
        in_calls += len(keys)
        most = max(most, in_calls)
        try:
            return await reads(keys, *args)
        finally:
            in_calls -= len(keys)

    memory.read_each = counted
    ended = []

    async def load(view):
        assert all(await view.read(keys, slots(len(keys))))
        ended.append(view)

    flood = [asyncio.create_task(load(one)) for _ in range(500)]
    await asyncio.sleep(0)  # all of these come first
    await asyncio.gather(load(two), *flood)
    assert most <= MOST_CHUNKS + len(keys)
    assert ended.index(two) <= 2 * MOST_CHUNKS // len(keys), "the flood came first"
    for view in (one, two):
        await view.close()
    await shared.close()


class Below(MemoryBackend):
    """A store below the memory, whose calls wait while it hangs."""

    def __init__(self):
        super().__init__(MemoryOptions(), "n")
        self.may_end, self.calls = asyncio.Event(), []
        self.may_end.set()

    async def _call(self, name, keys):
        self.calls.append(name)
        # As a system call, which no cancellation ends.
        await undisturbed(asyncio.ensure_future(self.may_end.wait()))

    async def contains(self, keys):
        await self._call("contains", keys)
        return await super().contains(keys)

    async def read(self, keys, into):
        await self._call("read", keys)
        return await super().read(keys, into)

    async def write(self, keys, chunks):
        await self._call("write", keys)
        return await super().write(keys, chunks)


class Rig:
    """Views of a store in three layers: the memory, and two stores below it."""

    def __init__(self):
        self.host = HostStore(HostMemory(64 * CHUNK_BYTES, LRUPolicy), "n")
        self.near, self.far = Below(), Below()
        self.shared = shared_store(self.host, near=self.near, far=self.far)

    async def close(self, hung):
        self.near.may_end.set()
        self.far.may_end.set()
        await asyncio.gather(*hung, return_exceptions=True)
        for view in list(self.shared.views):
            await view.close()
        await self.shared.close()


async def in_time(call):
    return await asyncio.wait_for(call, 10)


async def test_loads_of_the_memory_and_of_other_stores_do_not_wait_for_a_store_that_hangs():
    """More calls than a session has turns for hang in one store."""
    rig, hung = Rig(), []
    view = rig.shared.new_view()
    there, near, far = keys_of(4, "there"), keys_of(4, "near"), keys_of(4, "far")
    await view.write(there, filled(there))
    await rig.near.write(near, filled(near))
    await rig.far.write(far, filled(far))
    rig.near.may_end.clear()
    for _ in range(MOST_CHUNKS):
        hung.append(asyncio.create_task(view.read(near, slots(4))))
        hung.append(asyncio.create_task(view.write(near, filled(near))))
    await settle()
    assert all(await in_time(view.read(there, slots(4))))
    arrived = []
    hung.append(asyncio.create_task(view.read_each(far, slots(4), arrived.append)))
    assert await until(lambda: len(arrived) == 4)
    await rig.close(hung)


async def test_a_question_that_hangs_in_a_store_tells_what_the_memory_has():
    rig, keys, asked = Rig(), keys_of(2), []
    await rig.host.write(keys[:1], filled(keys[:1]))
    view = rig.shared.new_view(0.01)
    rig.near.contains = lambda keys: asked.append(keys) or asyncio.Event().wait()
    assert await in_time(view.contains(keys)) == [True, False]
    assert asked == [keys[1:]]
    await rig.close([])


async def test_a_question_waits_for_no_thread_that_a_system_call_holds():
    """A pool of threads ends no call before its thread does, whatever is cancelled."""
    rig, keys, thread = Rig(), keys_of(2), asyncio.Event()
    await rig.host.write(keys[:1], filled(keys[:1]))
    view = rig.shared.new_view(0.01)

    async def hang(keys):
        await undisturbed(asyncio.ensure_future(thread.wait()))
        return [True] * len(keys)

    rig.near.contains = hang
    question = asyncio.create_task(view.contains(keys))
    try:
        assert await until(question.done)
        assert question.result() == [True, False]
        closing = asyncio.create_task(view.close())
        await settle()
        assert not closing.done(), "its store would be closed below the call"
    finally:
        thread.set()
    await in_time(closing)
    await rig.close([])


async def test_no_store_writes_into_the_slot_of_a_chunk_that_has_arrived():
    """The engine copies it from there by then, while the rest of a load fails."""
    rig, keys, into = Rig(), keys_of(2), slots(2)
    view, arrived = rig.shared.new_view(), []

    async def read_one(keys, into, arrived):
        into[0][:] = filled(keys)[0]
        arrived(0)
        raise OSError("the second is not readable")

    async def read_garbage(keys, into):
        for slot in into:
            slot[:] = b"\xee" * len(slot)
        return [False] * len(keys)

    near = type("Near", (Below,), {"read_each": staticmethod(read_one)})()
    layers = {"memory": rig.host, "near": near, "far": rig.far}
    rig.shared._take([OpenStore(*layer) for layer in layers.items()])
    for below in (near, rig.far):
        await below.write(keys, filled(keys))
    rig.far.read = read_garbage
    answers = await in_time(view.read_each(keys, into, arrived.append))
    assert (arrived, list(map(bool, answers))) == ([0], [True, False])
    assert bytes(into[0]) == filled(keys)[0]
    await rig.close([])


async def test_the_memory_has_a_chunk_whose_store_below_hangs():
    rig, hung = Rig(), []
    view, keys = rig.shared.new_view(), keys_of(MOST_CHUNKS)
    rig.near.may_end.clear()
    for key in keys[:48]:
        hung.append(asyncio.create_task(view.write([key] * 3, filled([key] * 3))))
    assert await until(lambda: sum(map(rig.host.holds, keys)) == 48)
    assert rig.near.calls.count("write") < 48, "each of them had a turn"
    await rig.close(hung)


async def test_a_call_that_is_cancelled_ends_its_turn_though_it_hangs():
    """So the store itself can refuse the next one, which else would wait for its deadline."""
    rig, keys = Rig(), keys_of(4)
    view = rig.shared.new_view()
    await rig.near.write(keys, filled(keys))
    rig.near.may_end.clear()
    rig.near.calls.clear()
    hung = [asyncio.create_task(view.read(keys, slots(4))) for _ in range(MOST_CHUNKS)]
    await settle()
    begun = len(rig.near.calls)
    assert begun < MOST_CHUNKS
    hung[0].cancel()
    await settle()
    assert len(rig.near.calls) == begun + 1
    assert not hung[0].done(), "the slots may still be written"
    await rig.close(hung)


async def test_a_view_is_closed_once_its_calls_have_ended():
    """Else what it still stores would come after a removal of all that the namespace has."""
    rig, keys = Rig(), keys_of(4)
    view, other = rig.shared.new_view(), rig.shared.new_view()
    rig.near.may_end.clear()
    begun = asyncio.create_task(view.write(keys, filled(keys)))
    waiting = [asyncio.create_task(view.read(keys, slots(4))) for _ in range(MOST_CHUNKS)]
    await settle()
    closing = asyncio.create_task(view.close())
    await settle()
    assert not closing.done()
    calls = len(rig.near.calls)
    rig.near.may_end.set()
    await in_time(closing)
    assert all(map(rig.near.holds, keys))
    assert all(await in_time(begun))
    assert any(not any(answers) for answers in await asyncio.gather(*waiting)), "none was too late"
    assert len(rig.near.calls) == calls
    assert all(await in_time(other.read(keys, slots(4))))
    await rig.close([])
