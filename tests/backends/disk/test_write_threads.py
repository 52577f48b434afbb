"""How many chunks are written at once."""

import asyncio

import pytest
from disk_parts import open_disk, until

from kvoffload.testing.backends import filled, keys_of
from tests.support.vfs import StuckVfs, calls_on


def open_stuck(root, **settings):
    """Open a tier whose writes of chunks hang from now on."""
    vfs = StuckVfs(calls_on("temporary", "pwritev"))
    vfs.release()  # while it is opened
    backend = open_disk(root, vfs=vfs, io="buffered", **settings)
    vfs.hold()
    vfs.stuck = 0
    return backend, vfs


@pytest.mark.parametrize(
    ("chunk_bytes", "settings", "writers"),
    [
        (1 << 20, {}, 4),
        ((1 << 20) + 4096, {}, 2),
        (1 << 20, {"write_threads": 3}, 3),
        ((1 << 20) + 4096, {"write_threads": 3}, 3),
    ],
)
async def test_so_many_chunks_are_written_at_once(tmp_path, chunk_bytes, settings, writers):
    backend, vfs = open_stuck(tmp_path, stall_s=60.0, **settings)
    keys = keys_of(6)
    storing = asyncio.ensure_future(backend.write(keys, filled(keys, chunk_bytes)))
    assert await until(lambda: vfs.stuck == writers)
    await asyncio.sleep(0.2)
    assert vfs.stuck == writers
    vfs.release()
    assert await storing == [True] * 6


async def test_two_large_writes_that_hang_are_a_dead_device(tmp_path):
    backend, vfs = open_stuck(tmp_path, stall_s=0.2)
    keys = keys_of(6)
    storing = asyncio.ensure_future(backend.write(keys, filled(keys, 2 << 20)))
    assert await until(lambda: backend.counters().get("write_stalled") == 2)
    vfs.release()
    assert sum(await storing) == 4
