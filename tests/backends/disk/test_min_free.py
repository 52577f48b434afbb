"""The free space of the file system: who evicts for it, when, and how much."""

import asyncio
from types import SimpleNamespace

import pytest
from disk_parts import ON_DISK, allocated, open_disk, until, write

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


async def test_stores_at_the_same_time_evict_one_shortage_once(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    settings = {"min_free": ByteSize(MIN_FREE), "quarantine": 0, "write_threads": 4}
    backend = open_disk(tmp_path, vfs=SmallDisk(), **settings)
    assert all(await write(backend, keys_of(40)))
    space = backend._store.space
    free_bytes = 64 * ON_DISK - allocated(tmp_path)
    disk.others_bytes = free_bytes - MIN_FREE + 8 * ON_DISK
    with space._evicting:
        storing = asyncio.ensure_future(write(backend, keys_of(4, "more")))
        assert await until(lambda: space._waiting == 4)
    assert all(await storing)
    assert backend.counters()["evicted"] <= 8 + 4 + 1
    assert space.in_flight_bytes == 0
    await backend.close()
