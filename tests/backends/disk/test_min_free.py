"""The free space of the file system: who evicts for it, when, and how much."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from disk_parts import ON_DISK, allocated, chunk_bytes, open_disk, until, write

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of

MIN_FREE = 16 * ON_DISK


class SmallDisk(Vfs):
    """A file system with room for 64 chunks, of which other programs may take some."""

    others_bytes = 0

    def statvfs(self, path):
        free = 64 * ON_DISK - type(self).others_bytes - allocated(path)
        return SimpleNamespace(f_bavail=max(0, free) // 4096, f_frsize=4096)


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    monkeypatch.setattr(SmallDisk, "others_bytes", 0)
    return SmallDisk


@pytest.fixture
def no_ticks(monkeypatch):
    """Let only the test evict: the first tick comes at once, however long they are."""
    monkeypatch.setattr(disk_housekeeper.Housekeeper, "_tick", lambda housekeeper: None)


def open_small(root):
    return open_disk(root, vfs=SmallDisk(), min_free=ByteSize(MIN_FREE), quarantine=0)


async def test_writers_that_do_not_evict_store_again_while_the_evicting_one_is_idle(
    tmp_path, disk, monkeypatch
):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 0.02)
    idle, busy = open_small(tmp_path), open_small(tmp_path)
    assert all(await write(idle, keys_of(40)))
    disk.others_bytes = 16 * ON_DISK
    answers, deadline = [], time.monotonic() + 30
    while answers.count(True) < 20 and time.monotonic() < deadline:
        answers += await write(busy, keys_of(1, f"more{len(answers)}"))
        await asyncio.sleep(0.02)
    assert answers.count(True) == 20, busy.counters()
    assert idle.counters()["evicted"] > 0
    assert "evicted" not in busy.counters()


async def test_the_background_evicts_what_lacks_and_no_more(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 0.02)
    backend = open_small(tmp_path)
    for key in keys_of(40):  # one by one: what is in flight counts twice, and a tick evicts for it
        assert await write(backend, [key]) == [True]
    assert "evicted" not in backend.counters()
    disk.others_bytes = 12 * ON_DISK
    assert await until(lambda: SmallDisk().statvfs(tmp_path).f_bavail * 4096 >= MIN_FREE)
    await asyncio.sleep(0.3)
    assert 30 * ON_DISK <= chunk_bytes(tmp_path) <= 36 * ON_DISK


async def test_one_round_evicts_a_small_part_of_the_capacity_at_most(tmp_path, disk, no_ticks):
    """Some file systems free space seconds after a removal."""
    backend = open_small(tmp_path)
    assert all(await write(backend, keys_of(40)))
    disk.others_bytes = 64 * ON_DISK
    backend._store.space.keep_free(lambda: False)
    assert backend.counters()["evicted"] == (64 << 20) // ON_DISK // 64


async def test_stores_at_the_same_time_evict_one_shortage_once(tmp_path, disk, no_ticks):
    settings = {"min_free": ByteSize(MIN_FREE), "quarantine": 0, "write_threads": 4}
    backend = open_disk(tmp_path, vfs=SmallDisk(), **settings)
    assert all(await write(backend, keys_of(40)))
    space = backend._store.space
    free_bytes = 64 * ON_DISK - allocated(tmp_path)
    disk.others_bytes = free_bytes - MIN_FREE + 8 * ON_DISK
    with space._evicting:
        storing = asyncio.gather(*(write(backend, [key]) for key in keys_of(4, "more")))
        assert await until(lambda: space._waiting == 4)
    assert await storing == [[True]] * 4
    # A file that is being written counts twice: it is in flight, and allocated.
    assert 8 + 4 <= backend.counters()["evicted"] <= 8 + 4 + 3
    assert space.in_flight_bytes == 0
