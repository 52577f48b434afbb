"""Views of a shared store: each passes the suite of backends, and what one does the rest learn."""

import asyncio
import gc
import math
import random
import threading
import tracemalloc

import pytest
from layers import shared_store

from kvoffload import registry
from kvoffload.backends.admin import Garbage
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.errors import ConfigError
from kvoffload.io import open_stores
from kvoffload.io.protocol import TierSettings
from kvoffload.io.service import shared_stores
from kvoffload.io.service.host_memory import BLOCK, HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.shared_stores import SharedStores
from kvoffload.metrics.names import CAPACITY_BYTES, RESIDENT_BYTES
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.told_return import ToldReturn
from kvoffload.registry import open_admin
from kvoffload.testing import BackendSuite
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots
from tests.support.io_rig import opening

OPEN = opening([("serve", "serve", {})])


def new_stores(chunks=4, *backends):
    return SharedStores(HostMemory(chunks * CHUNK_BYTES, LRUPolicy), backends)


async def opened(stores, wanted=OPEN):
    return (await stores.open(wanted, 0, {})).backend


def listed(view, limit=3):
    """The keys that a view's reader knows, once it has read all changes."""
    known = set()
    while changes := view.take_changes(limit):
        known |= {key for key, there in changes if there}
        known -= {key for key, there in changes if not there}
    return known


class TestView(BackendSuite):
    """A view whose store ends with it."""

    def open(self, namespace, chunks=1024):
        memory = HostStore(HostMemory(chunks * CHUNK_BYTES, LRUPolicy), "n")
        return shared_store(memory).new_view()

    def open_small(self, namespace):
        return self.open(namespace, 16)

    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # see test_stores.py


async def test_views_of_a_namespace_see_what_one_of_them_stores_and_removes():
    stores, keys = new_stores(), keys_of(6)
    one, two = await opened(stores), await opened(stores)
    await one.write(keys[:3], filled(keys[:3]))
    assert listed(one) == listed(two) == set(keys[:3])
    three = await opened(stores)
    assert listed(three) == set(keys[:3]), "a late view lists what there was"
    await two.write(keys[3:], filled(keys[3:]))
    await one.remove(keys[3:4])
    for view in (one, two, three):
        assert {key for key in keys if view.holds(key)} == {keys[0], *keys[4:]}
        assert sorted(each.key for each in view.take_removals()) == sorted(keys[1:3])
    for view in (one, two, three):
        await view.close()
    await stores.close()


async def test_an_engine_comes_and_leaves_without_a_copy_of_the_list_of_all_chunks():
    """With a million chunks a copy takes 30 ms, and so does each look of the garbage collector."""
    memory = HostMemory(100_000 * BLOCK, LRUPolicy)
    number = memory.number_of(OPEN.namespace)
    for key in keys_of(100_000):
        memory.write(number + key, b"", memoryview(bytes(1)))
    stores = SharedStores(memory, [])
    tracemalloc.start()
    try:
        first = await opened(stores)
        ((key, _),) = first.take_changes(1)
        assert tracemalloc.get_traced_memory()[1] < 400_000
        assert listed(first, 1024) == set(keys_of(100_000)) - {key}, "each is told once"
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        assert before < 400_000, "what it was told is in memory alone"
        tracemalloc.reset_peak()
        second = await opened(stores)
        second.take_changes(1)
        await second.close()
        assert tracemalloc.get_traced_memory()[1] - before < 400_000
    finally:
        tracemalloc.stop()
    await first.close()
    await stores.close()


async def test_each_engine_is_told_once_of_each_chunk_that_is_there():
    stores, keys = new_stores(64), keys_of(64)
    writer = await opened(stores)
    await writer.write(keys, filled(keys))
    await writer.close()  # the first engine of a server's start may be the one after it
    for _ in range(2):
        view, told = await opened(stores), []
        while changes := view.take_changes(5):
            told += changes
        assert sorted(told) == sorted((key, True) for key in keys)
    await stores.close()


async def test_a_chunk_in_memory_and_on_disk_is_listed_once_and_as_long_as_one_has_it(tmp_path):
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    stores, keys = new_stores(4, disk), keys_of(8)
    writer = await opened(stores)
    await writer.write(keys, filled(keys))
    assert listed(writer, 5) == set(keys)
    memory = writer._shared.memory
    for _ in range(2):
        assert sum(map(memory.holds, keys)) == 4
        view, told = await opened(stores), []
        while changes := view.take_changes(5):
            told += changes
        assert sorted(told) == sorted((key, True) for key in keys)
        assert await view.read(keys[:4], slots(4)) == [True] * 4  # those on disk replace the rest
        assert listed(writer) <= set(keys)
    await view.remove(keys[:6])
    listed(writer)
    late = await opened(stores)
    assert listed(late) == set(keys[6:])
    for each in stores._shared[OPEN.namespace].result().views[:]:
        await each.close()
    await stores.close()


@pytest.mark.parametrize("has_disk", [False, True], ids=["memory", "memory and disk"])
async def test_a_list_that_is_read_while_chunks_come_and_go_is_right_at_its_end(tmp_path, has_disk):
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    # With a disk the memory is small: chunks leave it, and come back from there.
    stores, rng = new_stores(16, disk) if has_disk else new_stores(64), random.Random(5)
    writer = await opened(stores)
    keys = keys_of(96)
    await writer.write(keys[:64], filled(keys[:64]))
    views, known = [writer], {writer: set()}
    for turn in range(60):
        if turn % 10 == 0:
            views.append(await opened(stores))
            known[views[-1]] = set()
        some = rng.sample(keys, 3)
        await (writer.remove(some) if turn % 2 else writer.write(some, filled(some)))
        await writer.read(rng.sample(keys, 3), slots(3))
        for view in views:
            for key, there in view.take_changes(rng.randrange(4)):
                (known[view].add if there else known[view].discard)(key)
    for view in views:
        while changes := view.take_changes(3):
            for key, there in changes:
                (known[view].add if there else known[view].discard)(key)
        assert view.is_complete
        assert known[view] == {key for key in keys if view.holds(key)}
        await view.close()
        assert {key for key, there in view.take_changes(99) if not there} >= known[view]
    await stores.close()


async def test_what_one_engine_could_not_load_is_there_for_the_rest():
    stores, (key,) = new_stores(), keys_of(1)
    slow, fast = await opened(stores), await opened(stores)
    await fast.write([key], filled([key]))
    slow.forget([key])
    assert listed(slow) == set()
    assert listed(fast) == {key}
    assert await fast.read([key], slots(1)) == [True]
    await fast.write([key], filled([key]))
    assert listed(slow) == {key}
    await fast.remove([key])
    assert listed(slow) == set()
    slow.forget([key])  # its load has failed because the chunk had left
    await slow._shared.memory.write(
        [key], filled([key])
    )  # as another process does that has this root
    assert listed(slow) == {key}
    await slow.close()
    await fast.close()
    await stores.close()


async def test_what_the_queues_of_all_engines_need_leaves_last():
    stores, keys = new_stores(4), keys_of(4)
    one, two = await opened(stores), await opened(stores)
    await one.write(keys, filled(keys))
    one.spare(keys[2:3])
    two.spare(keys[3:])
    await one.write(keys_of(2, "more"), filled(keys_of(2, "more")))
    assert [two.holds(key) for key in keys if listed(two) is not None] == [False, False, True, True]
    await two.close()  # its engine has died, and waits for nothing
    await one.write(keys_of(3, "still more"), filled(keys_of(3, "still more")))
    listed(one)
    assert [one.holds(key) for key in keys] == [False, False, True, False]
    await one.close()
    await stores.close()


async def test_a_store_ends_with_its_last_view_though_a_plug_in_takes_no_hint(caplog):
    class PlugIn(HostStore):
        def spare(self, keys):
            raise RuntimeError("no such thing")

    ended = []
    memory = HostStore(HostMemory(4 * CHUNK_BYTES, LRUPolicy), "n")
    plug_in = PlugIn(HostMemory(4 * CHUNK_BYTES, LRUPolicy), "n")
    shared = shared_store(plug_in, lambda: ended.append(True), below=memory)
    view = shared.new_view()
    view.spare(keys_of(1))
    assert memory._memory._spared, "the next layer has learned of it"
    await view.close()
    assert ended
    assert not memory._memory._spared
    assert "no such thing" in caplog.text
    await shared.close()


async def test_a_layer_that_fails_to_tell_what_it_has_hides_nothing_of_the_others(caplog):
    class PlugIn(MemoryBackend):
        def take_changes(self, limit):
            raise RuntimeError("no such thing")

        def take_removals(self):
            raise RuntimeError("nothing of this kind")

    memory, keys = HostStore(HostMemory(2 * CHUNK_BYTES, LRUPolicy), "n"), keys_of(4)
    shared = shared_store(memory, below=PlugIn(MemoryOptions(), "n"))
    view = shared.new_view()
    for key in keys:  # in this order: several threads carry out a write of many
        await memory.write([key], filled([key]))
    assert listed(view) == set(keys[2:])
    assert view.is_complete
    assert sorted(each.key for each in view.take_removals()) == sorted(keys[:2])
    assert "no such thing" in caplog.text
    await view.close()
    await shared.close()


async def test_the_disk_below_learns_when_the_sessions_of_an_engine_return(tmp_path):
    on_disk = CHUNK_BYTES + 2 * 4096
    room = {"capacity": 8 * on_disk, "high_watermark": 1.0, "min_free": 0}
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), **room}, "")
    stores, keys = new_stores(2, disk), keys_of(6)
    one, two = await opened(stores), await opened(stores)
    await one.write(keys, filled(keys))
    one.expect([ToldReturn(b"a", keys[:2], math.inf, 0)], 1.0)
    new = keys_of(4, "new")
    await two.write(new, filled(new))
    listed(one)
    assert [one.holds(key) for key in keys] == [False] * 2 + [True] * 4
    for view in (one, two):
        await view.close()
    await stores.close()


async def test_the_disk_below_learns_whose_chunks_they_are(tmp_path):
    root = {"root": str(tmp_path / "kv"), "min_free": 0}
    stores, keys = new_stores(8, TierSettings("disk", "disk", root, "")), keys_of(3)
    view = await opened(stores)
    assert await view.write(keys, filled(keys), [b"a" * 16, b"b" * 16, b""]) == [True] * 3
    await view.close()
    await stores.close()
    erased = await open_admin("disk", root).erase(b"a" * 16, Garbage())
    assert (erased.figures["removed"], erased.figures["unknown"]) == (1, 1)


async def test_the_memory_keeps_a_namespace_that_no_engine_uses(tmp_path):
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    stores, keys = new_stores(8, disk), keys_of(2)
    view = await opened(stores)
    await view.write(keys, filled(keys))
    await view.close()
    again = await asyncio.gather(*(opened(stores) for _ in range(3)))
    assert all(listed(view) == set(keys) for view in again)
    into = slots(2)
    assert await again[0].read(keys, into) == [True, True]
    await again[0].purge([OPEN.namespace])
    assert not any(view.holds(key) for view in again for key in keys if listed(view) == set())
    for view in again:
        await view.close()
    await stores.close()


@pytest.mark.parametrize(
    ("backend", "settings"),
    [("disk", {"min_free": 0}), ("folder", {"capacity": "64MiB"})],
    ids=["with an index", "without one"],
)
async def test_the_memory_serves_while_a_backend_cannot_be_opened(
    tmp_path, monkeypatch, backend, settings
):
    monkeypatch.setattr(open_stores, "TRY_AGAIN_S", 0.01)
    root, keys = tmp_path / "kv", keys_of(2)
    root.write_text("no folder")
    options = {"root": str(root), **settings}
    stores = new_stores(1, TierSettings(backend, backend, options, "b."))
    one, two = await asyncio.gather(*(opened(stores) for _ in range(2)))
    assert await one.write(keys[:1], filled(keys[:1])) == [True]
    assert await two.contains(keys) == [True, False]
    root.unlink()
    root.mkdir(0o700)
    while backend not in one._shared.layers:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    for key in keys:  # the memory has room for one of them
        assert await one.write([key], filled([key])) == [True]
    assert await two.read(keys, slots(2)) == [True, True]
    for view in (one, two):
        await view.close()
    await stores.close()


async def test_a_backend_that_opens_late_is_told_what_it_has_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(open_stores, "TRY_AGAIN_S", 0.01)
    root, keys, new = tmp_path / "kv", keys_of(3), keys_of(16, "new")
    room = {"capacity": 8 * (CHUNK_BYTES + 2 * 4096), "high_watermark": 1.0, "min_free": 0}
    root.write_text("no folder")
    stores = new_stores(1, TierSettings("disk", "disk", {"root": str(root), **room}, "b."))
    view = await opened(stores)
    view.spare(keys)
    await view.describe(OPEN.facts)
    root.unlink()
    root.mkdir(0o700)
    await asyncio.wait(view._shared.opening.values())
    for key in (*keys, *new):
        assert await view.write([key], filled([key])) == [True]
    disk = view._shared.layers["disk"].backend
    assert all(map(disk.holds, keys))
    assert not all(map(disk.holds, new))
    await view.close()
    await stores.close()
    survey = await open_admin("disk", {"root": str(root)}).survey()
    assert [each.facts for each in survey.held] == [OPEN.facts]


async def test_what_a_backend_has_that_is_not_open_yet_is_not_said_to_be_removed(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(open_stores, "TRY_AGAIN_S", 0.01)
    root, keys = tmp_path / "kv", keys_of(2)
    disk = TierSettings("disk", "disk", {"root": str(root), "min_free": 0}, "b.")
    stores = new_stores(1, disk)
    view = await opened(stores)
    assert await view.write(keys, filled(keys)) == [True, True]
    await view.close()
    await stores.close()
    root.rename(tmp_path / "away")
    root.write_text("no folder")
    stores = new_stores(1, disk)
    view = await opened(stores)
    with pytest.raises(OSError, match="disk cannot be opened yet"):
        await view.purge([OPEN.namespace])
    root.unlink()
    (tmp_path / "away").rename(root)
    await asyncio.wait(view._shared.opening.values())
    assert "the tier disk is open, at try " in caplog.text
    assert await view.purge([OPEN.namespace]) == 2
    assert await view.contains(keys) == [False, False]
    await view.close()
    await stores.close()


async def test_a_session_that_ends_while_its_store_opens_leaves_nothing_open():
    stores = new_stores()
    for pause in (0, 1):
        opening_it = asyncio.ensure_future(opened(stores))
        await asyncio.sleep(0) if pause else None
        opening_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening_it
    await asyncio.sleep(0.01)
    assert not stores._shared
    await stores.close()


async def test_a_backend_that_has_opened_as_its_last_session_ends_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_stores, "PATIENT_S", 0.0)
    open_backend, made, is_open = registry.open_backend, [], threading.Event()

    def opens(*args, **where):
        made.append(open_backend(*args, **where))
        is_open.set()
        return made[0]

    monkeypatch.setattr(registry, "open_backend", opens)
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    stores = new_stores(4, disk)
    view = await opened(stores)
    assert is_open.wait(60)  # the loop has no turn meanwhile, and learns of it after this
    assert not view._shared.opening["disk"].done()
    await stores._close(OPEN.namespace, view._shared)  # as once the last session has ended
    await view.close()
    await stores.close()
    assert made[0].is_closed


async def test_a_store_that_cannot_be_made_of_its_backends_leaves_none_open(tmp_path):
    before = threading.enumerate()
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    stores = new_stores(4, disk, TierSettings("other", "no such type", {}, "backends[1]."))
    with pytest.raises(ConfigError, match="no such type"):
        await opened(stores)
    assert not stores._shared
    assert not stores._opening, "a server would keep the name of each such namespace"
    new = [each for each in threading.enumerate() if each not in before]
    for thread in new:
        thread.join(60)
    assert not any(thread.is_alive() for thread in new)
    await stores.close()


async def test_a_namespace_is_removed_once_its_store_is_closed(tmp_path):
    """A disk writes what it knows as it closes: a folder of each namespace would stay."""
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    stores, keys = new_stores(4, disk), keys_of(2)
    new = await opened(stores, opening([("serve", "serve", {})], namespace="1" * 64))
    evictor = new._shared.layers["disk"].backend._store.root.evictor
    while not evictor.held:  # noqa: ASYNC110 - only that one removes a segment at once
        await asyncio.sleep(0.01)
    for _ in range(10):
        old = await opened(stores)
        await old.write(keys, filled(keys))
        await old.close()
        await new.purge([OPEN.namespace])
        assert len([each for each in (tmp_path / "kv").iterdir() if len(each.name) == 64]) == 1
    await new.close()
    await stores.close()


async def test_a_backend_has_its_figures_as_long_as_it_is_a_setting(tmp_path):
    disk = TierSettings("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0}, "")
    stores, keys = new_stores(4, disk), keys_of(2)
    view = await opened(stores)
    assert await view.write(keys, filled(keys)) == [True, True]

    def told():
        samples = ((metric, *labels, value) for metric, labels, value in stores.samples())
        return {sample for sample in samples if sample[0] in (RESIDENT_BYTES, CAPACITY_BYTES)}

    before = told()
    assert {name for _, name, _ in before} == {"memory", "disk"}
    await view.close()
    await stores.close()
    assert told() == before
    view, more = await opened(stores), keys_of(1, "more")
    assert await view.write(more, filled(more)) == [True]
    disk_bytes = view.usage().gauges["disk_bytes"]
    await view.close()
    await stores.close()
    assert (RESIDENT_BYTES, "disk", disk_bytes) in told() - before, "as it was at the end"
    stores.backends = ()
    assert {name for _, name, _ in told()} == {"memory"}
