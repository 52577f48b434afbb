"""Many damaged chunks are many counts, and few lines of log."""

import errno
import logging
import os
import time

from disk_parts import SIZE, open_disk, write

from kvoffload.backends import log_rate
from kvoffload.backends.disk.chunk_file import PAGE
from kvoffload.backends.log_rate import Throttle
from kvoffload.testing.backends import keys_of, slots
from tests.support.other_version import VERSION, resealed
from tests.support.vfs import FailingVfs

log = logging.getLogger("kvoffload.test")


def messages(caplog, text):
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]


def test_the_next_line_tells_how_many_were_left_out(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log_rate.time, "monotonic", lambda: now[0])
    throttle, another = Throttle(log), Throttle(log)
    for i in range(50):
        throttle.warning("chunk %s of 100%% is damaged", i)
        now[0] += 0.01
    another.warning("something else")
    now[0] += 1.0
    throttle.warning("chunk %s of 100%% is damaged", 50)
    now[0] += 1.0
    throttle.warning("chunk %s of 100%% is damaged", 51)
    assert [record.getMessage() for record in caplog.records] == [
        "chunk 0 of 100% is damaged",
        "something else",
        "chunk 50 of 100% is damaged (49 more like it before)",
        "chunk 51 of 100% is damaged",
    ]


async def test_many_damaged_files_are_few_lines_and_all_are_counted(tmp_path, caplog):
    backend = open_disk(tmp_path)
    keys = keys_of(150)
    await write(backend, keys)
    for path in tmp_path.glob("*/??/*"):
        os.truncate(path, 5000)
    assert await backend.read(keys, slots(150, SIZE)) == [False] * 150
    assert backend.counters()["corrupt_size"] == 150
    lines = messages(caplog, "failed verification")
    assert 1 <= len(lines) <= 10
    assert str(tmp_path) in lines[0]


async def test_a_disk_that_refuses_for_ten_minutes_is_a_line_a_minute_with_the_remedy(
    tmp_path, caplog, monkeypatch
):
    real, later_s = time.monotonic, 0.0
    monkeypatch.setattr(log_rate.time, "monotonic", lambda: real() + later_s)
    gone = FailingVfs(0, errno.EROFS, sticky=True, when=lambda call, path: call == "unlink")
    backend, keys = open_disk(tmp_path, vfs=gone, io="buffered"), keys_of(2)
    await write(backend, keys)
    gone.nth = 1
    for _ in range(300):
        later_s += 2.0
        await backend.remove(keys[:1])
    gone.heal()
    assert backend.counters()["undeletable"] == 300
    lines = messages(caplog, "cannot remove")
    assert 2 <= len(lines) <= 11
    assert str(tmp_path) in lines[0]
    assert lines[0].endswith("Read-only file system; mount it for writing")


async def test_a_device_that_fails_all_loads_for_ten_minutes_is_a_line_a_minute(
    tmp_path, caplog, monkeypatch
):
    real, later_s = time.monotonic, 0.0
    monkeypatch.setattr(log_rate.time, "monotonic", lambda: real() + later_s)
    reads = ("preadv", "read_cached")
    bad = FailingVfs(0, errno.EIO, sticky=True, when=lambda call, path: call in reads)
    backend, keys = open_disk(tmp_path, vfs=bad, io="buffered"), keys_of(1)
    await write(backend, keys)
    bad.nth = 1
    for _ in range(300):
        later_s += 2.0
        assert await backend.read(keys, slots(1, SIZE)) == [False]
    bad.heal()
    lines = messages(caplog, "cannot read")
    assert 2 <= len(lines) <= 11
    assert lines[0].endswith(": io_EIO; see whether the device is well")


async def test_each_reason_why_chunks_cannot_be_read_is_told_with_its_remedy(tmp_path, caplog):
    reads = ("preadv", "read_cached")
    bad = FailingVfs(0, errno.EIO, sticky=True, when=lambda call, path: call in reads)
    backend, keys = open_disk(tmp_path, vfs=bad, io="buffered"), keys_of(2)
    await write(backend, keys)
    (path,) = tmp_path.glob(f"*/??/{keys[1].hex()}")
    path.write_bytes(resealed(path.read_bytes(), PAGE, VERSION, 2))
    bad.nth = 1
    assert await backend.read(keys[:1], slots(1, SIZE)) == [False]
    bad.heal()
    assert await backend.read(keys[1:], slots(1, SIZE)) == [False]
    device, version = messages(caplog, "cannot read")
    assert device.endswith(": io_EIO; see whether the device is well")
    assert version.endswith(": other_version; engines of two versions use the root: upgrade all")


async def test_each_reason_why_chunks_cannot_be_removed_is_told_with_its_remedy(tmp_path, caplog):
    bad = FailingVfs(0, errno.EIO, sticky=True, when=lambda call, path: call == "unlink")
    backend, keys = open_disk(tmp_path, vfs=bad, io="buffered"), keys_of(1)
    await write(backend, keys)
    bad.nth = 1
    await backend.remove(keys)
    bad.error = errno.EROFS
    await backend.remove(keys)
    bad.heal()
    device, mount = messages(caplog, "cannot remove")
    assert "Input/output error; see whether its device" in device
    assert mount.endswith("Read-only file system; mount it for writing")
