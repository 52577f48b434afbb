"""The server's memory and its layers, as backends: the suite of every store, and their own."""

import asyncio
import gc
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from layers import sole_view

from kvoffload import open_backend
from kvoffload.backends.base import Usage, WriteResult
from kvoffload.backends.header import COMPACT_BYTES, checksum
from kvoffload.io.service import host_store
from kvoffload.io.service.host_memory import BLOCK, PIECE, HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.tenant_order import TenantShares
from kvoffload.testing import BackendSuite
from kvoffload.testing.backends import CHUNK_BYTES, PersistentBackendSuite, filled, keys_of, slots


def new_memory(chunks=64, size=CHUNK_BYTES, policy=LRUPolicy):
    return HostMemory(chunks * size, policy)


def damage(memory, store, key):
    (start, _), *_ = memory._find(store._number + key).runs
    memory._map[start * BLOCK + 100] ^= 1


def without_index(store):
    verbs = ("contains", "read", "write", "remove", "close")
    return SimpleNamespace(**{verb: getattr(store, verb) for verb in verbs})


class TestHostMemory(PersistentBackendSuite):
    """One memory a test: what was stored stays for the next store of the namespace."""

    test_two_backends_share_one_storage = None  # one store a namespace, shared by its engines

    @pytest.fixture(autouse=True)
    def _memory(self):
        self.memory = new_memory(1024)

    def open(self, namespace):
        return HostStore(self.memory, namespace)

    def open_small(self, namespace):
        self.memory = new_memory(16)
        return HostStore(self.memory, namespace)

    def damage(self, store, key):
        damage(self.memory, store, key)


class TestMemoryAboveDisk(BackendSuite):
    @pytest.fixture(autouse=True)
    def _memory(self):
        self.memory = new_memory(8)

    def open(self, namespace):
        root = str(self.folder / "kv")
        disk = {"root": root, "capacity": "64MiB", "min_free": 0}
        host = HostStore(self.memory, namespace)
        return sole_view(host, disk=open_backend("disk", disk, namespace))

    def open_small(self, namespace):
        return sole_view(HostStore(new_memory(16), namespace))

    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # the disk has it still: see below


async def written(store, keys, size=CHUNK_BYTES):
    assert await store.write(keys, filled(keys, size)) == [True] * len(keys)


@pytest.mark.parametrize("policy", [LRUPolicy, HandicapPolicy])
async def test_a_tenant_above_its_share_evicts_its_own_chunks_in_any_namespace(policy):
    memory = HostMemory(20 * CHUNK_BYTES, policy, tenants=TenantShares(0.5))
    one, two = HostStore(memory, "one"), HostStore(memory, "two")
    kept, unnamed = keys_of(8, "b"), keys_of(2, "unnamed")
    await one.write(kept, filled(kept), [b"b"] * 8)
    await two.write(unnamed, filled(unnamed))
    for turn in range(10):
        keys = keys_of(4, f"a{turn}")
        store = (one, two)[turn % 2]
        assert await store.write(keys, filled(keys), [b"a"] * 4) == [True] * 4
    assert await one.contains(kept) == [True] * 8
    assert await two.contains(unnamed) == [True] * 2
    await one.remove(kept)
    assert sorted(set(memory._tenants.of.values())) == [b"a"]
    assert len(memory._tenants.of) == len(memory) - 2
    await one.close()
    await two.close()


async def test_a_chunk_that_all_layers_have_is_told_apart_from_one_that_a_layer_took(tmp_path):
    disk = {"root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    layers = {"memory": HostStore(new_memory(), "n"), "disk": open_backend("disk", disk, "n")}
    store, keys = sole_view(**layers), keys_of(2)
    await written(store, keys)
    await layers["memory"].remove(keys[:1])
    new, old = await store.write(keys, filled(keys))
    assert new is True
    assert old is WriteResult.PRESENT
    await store.close()


async def test_the_memory_takes_chunks_of_all_namespaces_and_of_any_size():
    memory = new_memory(4)
    one, two = HostStore(memory, "one"), HostStore(memory, "two")
    old, new = keys_of(4), keys_of(1, "new")
    await written(one, old)
    await one.read(old[:1], slots(1))
    await written(two, new, 2 * CHUNK_BYTES + 1)
    assert [one.holds(key) for key in old] == [True, False, False, False]
    assert sorted(each.key for each in one.take_removals()) == sorted(old[1:])
    into = slots(1, 2 * CHUNK_BYTES + 1)
    assert await two.read(new, into) == [True]
    assert await one.read(new, into) == [False]
    await one.close()
    await two.close()
    assert memory.resident_bytes == 3 * CHUNK_BYTES + BLOCK


def test_the_garbage_collector_looks_at_no_chunk():
    """One look at a million chunks takes a second, in which no engine is served."""
    memory, keys = new_memory(1100, BLOCK), keys_of(1000)

    def tracked():
        gc.collect()  # it lets go of tuples of numbers
        return len(gc.get_objects())

    write = partial(memory.write, header=b"", chunk=memoryview(bytes(1)))
    number = memory.number_of("n")
    write(number + keys[0])
    before = tracked()
    for key in keys[1:]:
        write(number + key)
    assert tracked() < before + 500, "a table for each first byte, and no more"


@pytest.mark.parametrize("size", [1, BLOCK, PIECE, PIECE + 1, 5 * PIECE - BLOCK + 7])
async def test_each_run_of_a_chunk_is_copied_and_verified(size):
    small, (large,) = keys_of(10 * (size // BLOCK + 1)), keys_of(1, "large")
    memory, header = new_memory(len(small), BLOCK), memoryview(bytearray(COMPACT_BYTES))
    store, (payload,), (into,) = HostStore(memory, "n"), filled([large], size), slots(1, size)
    for key in small:  # in this order: two threads of the store take blocks in any
        memory.write(store._number + key, b"", memoryview(bytes(BLOCK)))
    await store.remove([key for i, key in enumerate(small) if i % 5])
    await written(store, [large], size)
    name, chunk = store._number + large, memory._find(store._number + large)
    assert len(chunk.runs) >= size / (4 * BLOCK)
    assert memory.read(name, header, into) == checksum(payload)
    assert into == payload
    for first, _ in chunk.runs:
        memory._map[first * BLOCK] ^= 1
        assert memory.read(name, header, into) == checksum(into) != checksum(payload)
        memory._map[first * BLOCK] ^= 1
    assert memory.read(name, header, into[: size // 2]) == checksum(payload[: size // 2])
    assert await store.read([large], [into]) == [True]
    damage(memory, store, large)
    assert await store.read([large], [into]) == [size <= 100]
    await store.close()


async def test_a_slot_that_changes_during_its_store_is_found_by_the_first_load():
    class Late(HostMemory):
        def write(self, name, header, chunk):
            chunk[-1] ^= 1
            return super().write(name, header, chunk)

    store, keys = HostStore(Late(CHUNK_BYTES, LRUPolicy), "n"), keys_of(1)
    await written(store, keys)
    assert await store.read(keys, slots(1)) == [False]
    assert store.counters()["corrupt_payload"] == 1
    await store.close()


async def test_what_queues_need_leaves_last_in_all_namespaces():
    memory = new_memory(4)
    one, two = HostStore(memory, "one"), HostStore(memory, "two")
    await written(one, keys_of(2))
    await written(two, keys_of(2))
    one.spare(keys_of(2))
    two.spare(keys_of(1, "to come"))
    await written(two, keys_of(1, "to come"))
    await written(two, keys_of(1, "more"))
    assert [one.holds(key) for key in keys_of(2)] == [True, True]
    one.spare(())
    await written(two, keys_of(3, "still more"))
    assert [one.holds(key) for key in keys_of(2)] == [False, False]
    assert two.holds(keys_of(1, "to come")[0])
    await written(two, keys_of(1, "a flood"), 4 * CHUNK_BYTES)
    assert not two.holds(keys_of(1, "to come")[0])
    for store in (one, two):
        await store.close()


async def test_a_chunk_that_is_read_is_not_overwritten_by_the_one_that_it_makes_room_for():
    memory = new_memory(1)
    store, (first,), (second,) = HostStore(memory, "n"), keys_of(1), keys_of(1, "2")
    await written(store, [first])
    chunk = memory._find(store._number + first)
    chunk.num_readers += 1
    assert await store.write([second], filled([second])) == [False]
    assert store.holds(first), "without it there would be no more room"
    assert memory._map[:CHUNK_BYTES] == filled([first])[0]
    memory._end_reading([chunk])
    await written(store, [second])
    assert not store.holds(first)
    await store.close()


async def test_a_key_with_a_chunk_of_another_length_takes_the_new_one():
    store, keys = HostStore(new_memory(), "n"), keys_of(1)
    await written(store, keys, 100)
    await written(store, keys)
    assert await store.read(keys, slots(1)) == [True]
    await store.close()


async def test_a_load_from_the_disk_is_in_memory_the_next_time(tmp_path):
    memory, keys = new_memory(2), keys_of(4)
    host, disk = (
        HostStore(memory, "n"),
        open_backend(
            "disk", {"root": str(tmp_path / "kv"), "capacity": "1MiB", "min_free": 0}, "n"
        ),
    )
    store = sole_view(host, disk=disk)
    await written(store, keys)
    assert [host.holds(key) for key in keys].count(True) == 2
    (cold,) = [key for key in keys if not host.holds(key)][:1]
    arrived = []
    assert await store.read_each([cold], slots(1), arrived.append) == [True]
    assert arrived == [0]
    assert host.holds(cold)
    # A damaged copy in memory is dropped, and the chunk comes from the disk.
    damage(memory, host, cold)
    assert await store.read([cold], slots(1)) == [True]
    assert host.counters()["corrupt_payload"] == 1
    assert await host.read([cold], slots(1)) == [True]
    await store.close()


async def test_above_a_store_without_an_index_the_memory_keeps_no_list_of_changes():
    memory, keys = new_memory(2), keys_of(40)
    host = HostStore(memory, "n")
    store = sole_view(host, asked=without_index(open_backend("memory", {}, "n")))
    for key in keys:
        await written(store, [key])
    assert await store.contains(keys) == [True] * len(keys)
    assert len(host._changes) == 0
    assert dict(host.take_changes(100)) == dict.fromkeys(keys[-2:], True), "who asks learns all"
    await store.close()


async def test_what_one_layer_does_not_know_is_unknown_of_all_together():
    host, below = HostStore(new_memory(2), "n"), open_backend("memory", {}, "n")
    store = sole_view(host, below=below)
    await written(store, keys_of(1))
    assert store.usage().chunks == 2
    assert store.usage().gauges["below_bytes"] == CHUNK_BYTES
    below.usage = lambda: Usage(None, None, None, {"up": 1})
    assert store.usage()[:3] == (None, None, None)
    assert set(store.usage().gauges) == {"memory_bytes", "memory_lent_bytes", "below_up"}
    await store.close()


async def test_while_a_namespace_is_removed_other_work_has_turns(monkeypatch):
    monkeypatch.setattr(host_store, "REMOVED_AT_ONCE", 4)
    store, keys, left = HostStore(new_memory(), "n"), keys_of(40), []
    await written(store, keys)

    async def look():
        while not left or left[-1]:
            left.append(sum(map(store.holds, keys)))
            await asyncio.sleep(0)

    removed, _ = await asyncio.gather(store.purge(["another", "n"]), look())
    assert removed == 40
    assert max(a - b for a, b in pairwise([40, *left])) == 4
    await store.close()


async def test_while_namespaces_that_have_no_chunks_are_removed_other_work_has_turns():
    """An engine may name as many as a message takes: a million."""
    memory, turns = new_memory(), []
    store = HostStore(memory, "n")

    async def look():
        while True:
            turns.append(len(memory._numbers))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    assert await store.purge([f"none {i}" for i in range(1000)]) == 0
    looking.cancel()
    assert len(turns) >= 1000
    assert set(turns) == {1}, "none of them is kept"
    await store.close()
