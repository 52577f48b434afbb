"""Stores that are refused or skipped, and the removals that are reported."""

import errno
import resource
import subprocess
import sys

import pytest
from disk_parts import ON_DISK, SIZE, full, open_disk, write, write_each

from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import FailingVfs, calls_on


async def test_a_store_refused_for_want_of_room_is_counted(tmp_path):
    vfs = FailingVfs(1, errno.EACCES, sticky=True, when=calls_on("chunk", "unlink", "take"))
    backend = open_disk(tmp_path, vfs=vfs, **full(2))
    assert await write(backend, keys_of(2)) == [True] * 2
    assert await write(backend, keys_of(1, "more")) == [False]
    counts = backend.counters()
    assert (counts["refused_capacity"], counts["undeletable"]) == (1, 2)
    assert backend.take_removals() == []
    assert await backend.read(keys_of(2), slots(2, SIZE)) == [True] * 2


@pytest.mark.parametrize("form", ["slots", "files"])
@pytest.mark.parametrize(
    ("limit", "most", "reason", "remedy"),
    [
        ("RLIMIT_FSIZE", 4096, "io_EFBIG", "ulimit -f"),
        ("RLIMIT_NOFILE", 4, "io_EMFILE", "ulimit -n"),
    ],
)
async def test_why_no_chunk_is_written_is_said_once(
    tmp_path, caplog, form, limit, most, reason, remedy
):
    backend, keys = open_disk(tmp_path, form=form), keys_of(8)
    kind, memory = getattr(resource, limit), filled(keys, SIZE)
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        assert not any([*await backend.write(keys, memory), *await backend.write(keys, memory)])
    finally:
        resource.setrlimit(kind, before)
    assert backend.counters()[f"write_{reason}"] == 16
    (said,) = (each.getMessage() for each in caplog.records if reason in each.getMessage())
    assert str(tmp_path) in said
    assert remedy in said
    assert await backend.write(keys, memory) == [True] * 8


async def test_why_no_chunk_is_synced_is_said_once(tmp_path, caplog):
    vfs = FailingVfs(1, errno.EIO, sticky=True, when=calls_on("shard", "fsync"))
    backend = open_disk(tmp_path, form="files", vfs=vfs, durability="fsync")
    assert not any(await write(backend, keys_of(8)))
    assert backend.counters()["fsync_failed"] == 8
    (said,) = (each.getMessage() for each in caplog.records if "sync" in each.getMessage())
    assert "device" in said


WITHOUT_MEMORY = """
import asyncio, resource, sys
from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of, slots
from kvoffload.testing.harness import wrong_bytes

async def main(root, form, spare):
    options = {"root": root, "capacity": "64MiB", "min_free": 0, "trust_parent_folders": True}
    backend = open_backend("disk", options, "n")
    if form == "files":
        backend._store.slots.suits = lambda key, chunk_bytes: False
    keys, more, into = keys_of(8), keys_of(8, "more"), slots(8)
    memory = filled(keys), filled(more)
    if spare == 0:
        assert all(await backend.write(keys, memory[0]))
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + spare, before[1]))
    if spare:
        stored = await backend.write(keys, memory[0])
    loaded = await backend.read(keys, into)
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert not wrong_bytes(keys, into, loaded)
    print(sum(map(bool, loaded)), backend.counters())
    assert all(await backend.write(more, memory[1]))
    for wanted in (keys, more):
        assert all(await backend.read(wanted, into)) and not wrong_bytes(wanted, into)
    await backend.close()

asyncio.run(main(*sys.argv[1:3], int(sys.argv[3])))
"""


def without_memory(root, form, spare_bytes):
    """Run a process that gets so many more bytes from the system; return its words and log."""
    words = [sys.executable, "-c", WITHOUT_MEMORY, str(root), form, str(spare_bytes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("form", ["slots", "files"])
def test_a_load_without_memory_is_a_miss_that_is_said_once(tmp_path, form):
    counted, said = without_memory(tmp_path, form, 0)
    assert counted == "0 {'read_io_ENOMEM': 8}\n"
    assert len(said.splitlines()) == 1
    assert "ulimit -v" in said


def test_a_namespace_is_described_once_there_are_threads_again(tmp_path):
    counted, said = without_memory(tmp_path, "slots", 1 << 20)
    assert counted == "8 {}\n"
    assert said == ""
    assert list(tmp_path.glob("*/manifest*"))


async def test_a_chunk_of_the_whole_capacity_is_stored_and_one_page_more_is_refused(tmp_path):
    backend = open_disk(tmp_path, capacity=ByteSize(ON_DISK), high_watermark=1.0)
    assert await write(backend, keys_of(1)) == [True]
    (larger,) = keys_of(1, "larger")
    assert await backend.write([larger], filled([larger], SIZE + 1)) == [False]
    assert backend.counters() == {"refused_size": 1}
    backend.check_fit(SIZE)
    with pytest.raises(ConfigError, match=r"64\.0 KiB.*68\.0 KiB"):
        backend.check_fit(SIZE + 1)


async def test_a_chunk_that_is_there_is_not_written_again(tmp_path):
    backend = open_disk(tmp_path)
    keys = keys_of(2)
    assert await write(backend, keys) == [True] * 2
    before = {path: path.stat().st_ino for path in tmp_path.glob("*/??/*")}
    assert await write(backend, keys) == [True] * 2
    assert {path: path.stat().st_ino for path in tmp_path.glob("*/??/*")} == before


async def test_only_removals_that_no_caller_asked_for_are_reported_and_each_once(tmp_path):
    backend = open_disk(tmp_path, **full(3))
    keys = keys_of(5)
    assert all(await write_each(backend, keys[:3]))
    await backend.remove(keys[2:3])
    assert backend.take_removals() == []
    assert all(await write_each(backend, keys[3:]))
    assert [(each.key, each.reason) for each in backend.take_removals()] == [(keys[0], "evicted")]
    assert backend.take_removals() == []
    assert backend.counters() == {"removed": 1, "evicted": 1, "overwritten": 1}
