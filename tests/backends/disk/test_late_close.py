"""Stores that are closed while a call hangs, or while housekeeping is busy with a large root."""

import asyncio
import itertools
import os
from contextlib import asynccontextmanager

import pytest
from disk_parts import ON_DISK, SIZE, let_calls_hang_after, open_disk, stored, until, write

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.paths import SNAPSHOT, WRITERS
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of, slots
from tests.support.vfs import StuckVfs, kind_of

pytestmark = pytest.mark.usefixtures("as_files")

LIMITS = {"capacity": ByteSize(8 * ON_DISK), "min_free": ByteSize(0)}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 0.02)


def descriptors(root):
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and str(root) in os.readlink(link) for link in links)


@asynccontextmanager
async def closed_while_stuck(tmp_path, call, kind):
    """Yield a hung file system and the closed store above it; then all of the store is gone."""
    await open_disk(tmp_path, **LIMITS).close()
    before = descriptors(tmp_path)
    is_on = False
    vfs = StuckVfs(lambda name, path: is_on and name == call and kind in (None, kind_of(path)))
    options = DiskOptions(root=str(tmp_path), stall_s=60.0, io="direct", **LIMITS)
    old = DiskBackend(options, "old", vfs=vfs)
    assert old.wait_ready(60)
    assert await write(old, keys_of(2)) == [True] * 2
    let_calls_hang_after(old, 0.1)
    is_on = True
    hung = asyncio.ensure_future(old.read(keys_of(1), slots(1, SIZE)))
    assert await until(lambda: vfs.stuck)
    await asyncio.wait_for(old.close(), 20)
    yield vfs, old
    vfs.release()
    await hung
    assert await until(lambda: descriptors(tmp_path) == before), "the store is never closed"
    assert os.listdir(tmp_path / WRITERS) == []


async def stores_beyond_the_capacity(backend):
    for i in range(100):
        if all(await write(backend, keys_of(4, f"{i}"))) and i > 8:
            return True
        await asyncio.sleep(0.02)
    return False


async def test_another_store_evicts_once_the_busy_housekeeping_of_a_closed_one_ends(tmp_path):
    async with closed_while_stuck(tmp_path, "listdir", "writers") as (vfs, _):
        vfs.release()
        new = open_disk(tmp_path, "new", **LIMITS)
        assert await stores_beyond_the_capacity(new), new.counters()
        assert new.counters()["evicted"] > 8
        await new.close()


async def test_another_store_evicts_while_a_read_of_a_closed_one_hangs(tmp_path):
    async with closed_while_stuck(tmp_path, "preadv", "chunk") as (_, old):
        assert not old._housekeeper._thread.is_alive()
        new = open_disk(tmp_path, "new", **LIMITS)
        assert await stores_beyond_the_capacity(new), new.counters()
        await new.close()


def without_housekeeping(backend):
    """Return a store whose own thread scans nothing any more, beside the test's scanner."""
    backend._housekeeper.stop()
    backend._housekeeper.wait()
    return backend


async def test_a_store_closed_while_it_loads_its_snapshot_stops_and_keeps_the_snapshot(tmp_path):
    await stored(tmp_path, keys_of(40))
    (path,) = tmp_path.glob(f"*/{SNAPSHOT}")
    before = path.read_bytes()
    backend = without_housekeeping(open_disk(tmp_path))
    for name, _ in backend._store.index.sizes():
        backend._store.index.drop(name)
    looks = itertools.count()
    scanner = Scanner(backend._store, lambda: next(looks) >= 10)
    scanner.load_snapshot()
    assert len(backend._store.index) == 10
    scanner.save_snapshot()
    assert path.read_bytes() == before


async def test_a_scan_of_a_store_that_is_closed_stops_among_its_chunks(tmp_path):
    backend = without_housekeeping(open_disk(tmp_path))
    assert all(await write(backend, keys_of(40)))
    (folder,) = {path.parent.parent for path in tmp_path.glob("*/??/*")}
    for path in folder.glob("??/*"):
        path.unlink()
    looks = itertools.count()
    # It looks once a shard of 256, and after them; then for each of the chunks.
    scanner = Scanner(backend._store, lambda: next(looks) > 256 + 10)
    assert not scanner.scan(full=True)
    assert 0 < scanner.vanished <= 10


async def test_a_repair_at_the_end_does_not_take_the_right_to_evict_again(tmp_path, monkeypatch):
    """A thread that repairs the root has found the lock's file gone as housekeeping ends."""
    store = open_disk(tmp_path, **LIMITS)
    assert store.wait_ready(20)
    root, housekeeper = store._store.root, store._housekeeper
    # The test repairs: housekeeping would wait for itself.
    monkeypatch.setattr(root, "maintain", lambda: None)
    await asyncio.sleep(0.2)
    monkeypatch.setattr(root, "_is_damaged", lambda: True)

    def is_gone():
        housekeeper.stop()
        housekeeper.wait()
        return True

    monkeypatch.setattr(root.evictor, "is_gone", is_gone)
    root.repair()
    assert not root.evictor.held, "no housekeeping uses it, and no other store can have it"
