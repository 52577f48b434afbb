"""Turns of a session at the stores that it shares: a flood of one delays its own calls."""

import asyncio

from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.layered_store import layered
from kvoffload.io.service.shared_stores import SharedStore
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
        async with self.turns.take(chunks):
            self.begun.append(name)
            await self.may_end[name].wait()


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


async def test_a_session_that_asks_for_much_leaves_the_threads_to_others():
    memory = HostStore(HostMemory(64 * CHUNK_BYTES, LRUPolicy), "n")
    store = layered({"memory": memory})
    shared, keys = SharedStore(store, memory, lambda: None), keys_of(4)
    one, two = shared.new_view(), shared.new_view()
    await one.write(keys, filled(keys))
    reads, in_calls, most = store.read_each, 0, 0

    async def counted(keys, *args):
        nonlocal in_calls, most
        in_calls += len(keys)
        most = max(most, in_calls)
        try:
            return await reads(keys, *args)
        finally:
            in_calls -= len(keys)

    store.read_each = counted
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
    await store.close()


async def test_loads_and_lookups_do_not_wait_for_stores_that_hang():
    """Writes to a disk that hangs keep their turns; what is in memory is loaded meanwhile."""
    memory = HostStore(HostMemory(64 * CHUNK_BYTES, LRUPolicy), "n")
    store = layered({"memory": memory})
    keys, view = keys_of(4), SharedStore(store, memory, lambda: None).new_view()
    await view.write(keys, filled(keys))
    may_end = asyncio.Event()

    async def hang(*args):
        await may_end.wait()
        return [False] * len(keys)

    store.write = store.contains = hang
    hung = [asyncio.create_task(view.write(keys, filled(keys))) for _ in range(MOST_CHUNKS)]
    await settle()
    assert all(await asyncio.wait_for(view.read(keys, slots(len(keys))), 10))
    hung += [asyncio.create_task(view.contains(keys)) for _ in range(MOST_CHUNKS)]
    await settle()
    assert all(await asyncio.wait_for(view.read(keys, slots(len(keys))), 10))
    may_end.set()
    await asyncio.gather(*hung)
    await view.close()
    await store.close()
