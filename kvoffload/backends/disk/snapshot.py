"""The index of one namespace as it was: a hint that lets a restarted process answer at once.

Nothing depends on it. A snapshot that is missing, damaged or old costs time or a miss: the folders
are looked at in any case, and every read verifies what it finds.

Layout, little-endian: magic (8), checksum of the rest (16), then for each length of key a section
of key length (u16), number of records (u32) and the records: key, allocated bytes (u64). Records
are in order of recency, the least recently used first.
"""

import errno
import os
import struct
from collections.abc import Iterable
from itertools import groupby

from kvoffload.backends.disk.chunk_file import PAGE
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import MAX_KEY_BYTES, checksum

MAGIC = b"KVOSNAP1"
MAX_BYTES = 1 << 30
_PIECE_BYTES = 16 << 20
_SECTION = struct.Struct("<HI")
_HEAD_BYTES = len(MAGIC) + 16


def save(vfs: Vfs, path: str, temporary: str, sizes: Iterable[tuple[bytes, int]]) -> None:
    """Write a snapshot whole, or raise OSError and leave the old one."""
    parts: list[bytes] = []
    for length, group in groupby(sizes, key=lambda record: len(record[0])):
        pack = struct.Struct(f"<{length}sQ").pack
        records = [pack(key, allocated) for key, allocated in group]
        parts += [_SECTION.pack(length, len(records)), *records]
    body = b"".join(parts)
    data = memoryview(MAGIC + checksum(body) + body)
    fd = vfs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _write_all(vfs, fd, data)
    except OSError:
        vfs.unlink_quietly(temporary)
        raise
    finally:
        vfs.close_quietly(fd)
    try:
        vfs.rename(temporary, path)
    except OSError:
        vfs.unlink_quietly(temporary)
        raise


def load(vfs: Vfs, path: str) -> list[tuple[bytes, int]]:
    """Read a snapshot; empty if there is none that is whole."""
    try:
        data = _content(vfs, path)
    except OSError:
        return []
    body = memoryview(data)[_HEAD_BYTES:]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : _HEAD_BYTES] != checksum(body):
        return []
    sizes: list[tuple[bytes, int]] = []
    at = 0
    try:
        while at < len(body):
            length, count = _SECTION.unpack_from(body, at)
            record = struct.Struct(f"<{length}sQ")
            at += _SECTION.size
            sizes += record.iter_unpack(body[at : at + count * record.size])
            at += count * record.size
    except struct.error:
        return []
    return [(key, allocated) for key, allocated in sizes if 0 < len(key) <= MAX_KEY_BYTES]


def _write_all(vfs: Vfs, fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        moved = vfs.pwritev(fd, [data[done : done + _PIECE_BYTES]], done)
        if moved <= 0:
            raise OSError(errno.EIO, "short write")
        done += moved


def _content(vfs: Vfs, path: str) -> bytes:
    fd = vfs.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        size = vfs.fstat(fd).st_size
        if not _HEAD_BYTES <= size <= MAX_BYTES:
            return bytes(PAGE)
        data = bytearray(size)
        done = 0
        while done < size and (moved := vfs.preadv(fd, [memoryview(data)[done:]], done)) > 0:
            done += moved
        return bytes(data)
    finally:
        vfs.close_quietly(fd)
