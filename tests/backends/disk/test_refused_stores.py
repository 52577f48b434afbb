"""Stores that are refused or skipped, and the removals that are reported."""

import errno
import resource

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
