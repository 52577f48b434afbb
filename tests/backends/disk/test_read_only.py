"""A file system that has gone read-only: segments are read, and the cause is named."""

import errno
import os

from disk_parts import SIZE, full, open_disk, write

from kvoffload.backends.admin import Check
from kvoffload.backends.disk import admin
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.testing import payload_of
from kvoffload.testing.backends import keys_of, slots


class ReadOnlyVfs(Vfs):
    """A file system that has gone read-only, as after an error of its device."""

    is_read_only = False

    def open(self, path, flags):
        if self.is_read_only and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return super().open(path, flags)

    def punch(self, fd, offset, length):
        if self.is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        Vfs.punch(fd, offset, length)

    def pwritev(self, fd, buffers, offset):
        if self.is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return Vfs.pwritev(fd, buffers, offset)


async def test_a_read_only_file_system_serves_segments_that_are_not_open(tmp_path):
    keys, vfs = keys_of(4), ReadOnlyVfs()
    backend = open_disk(tmp_path, form="segments", vfs=vfs, io="buffered")
    assert await write(backend, keys) == [True] * 4
    vfs.is_read_only = True
    backend._store.segments._files.drop(*map(str, tmp_path.glob("*/segments/*")))
    into = slots(4, SIZE)
    assert await backend.read(keys, into) == [True] * 4
    assert bytes(into[3]) == payload_of(keys[3], SIZE)
    seen = ReadOnlyVfs()
    seen.is_read_only = True
    inspector = DiskInspector(str(tmp_path), seen)
    assert {chunk.key for chunk in inspector.chunks()} == {*keys}
    assert not inspector.unreadable
    assert admin.verify(inspector, Check()).is_sound
    inspector.close()
    vfs.is_read_only = False


async def test_a_store_that_can_evict_nothing_of_a_read_only_disk_says_so(tmp_path, caplog):
    vfs = ReadOnlyVfs()
    backend = open_disk(tmp_path, form="segments", vfs=vfs, io="buffered", **full(4))
    assert await write(backend, keys_of(4)) == [True] * 4
    vfs.is_read_only = True
    assert await write(backend, keys_of(1, "more")) == [False]
    counted = backend.counters()
    assert counted["undeletable"] >= 1
    assert counted["write_io_EROFS"] >= 1
    assert await write(backend, keys_of(1, "later")) == [False]
    assert backend.counters()["refused_full"] >= 1
    root = tmp_path.resolve()
    assert f"disk {root}: writing paused, io_EROFS; mount it for writing" in caplog.text
    vfs.is_read_only = False


async def test_a_store_with_room_on_a_read_only_disk_is_not_said_to_lack_capacity(tmp_path, caplog):
    vfs = ReadOnlyVfs()
    backend = open_disk(tmp_path, form="segments", vfs=vfs, io="buffered")
    assert await write(backend, keys_of(4)) == [True] * 4
    vfs.is_read_only = True
    assert await write(backend, keys_of(1, "more")) == [False]
    assert await write(backend, keys_of(1, "later")) == [False]
    counted = backend.counters()
    assert counted["write_io_EROFS"] == counted["refused_full"] == 1
    assert "refused_capacity" not in counted
    assert f"disk {tmp_path.resolve()}: writing paused, io_EROFS; mount it" in caplog.text
    vfs.is_read_only = False
