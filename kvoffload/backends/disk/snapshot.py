"""The saved index of one namespace: lets a restarted process answer before its first scan.

A snapshot is a hint. A missing, damaged or old one costs time or a miss. A scan reads the folders
in any case, and each load verifies its chunk.

Layout: magic (8), checksum of the rest (16), then MessagePack: an array of (key, allocated bytes),
the least recently used first.
"""

import msgspec

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import MAX_KEY_BYTES, checksum

MAGIC = b"KVOSNAP2"
MAX_BYTES = 1 << 30
_HEAD_BYTES = len(MAGIC) + 16


def save(vfs: Vfs, path: str, temporary: str, sizes: list[tuple[bytes, int]]) -> None:
    """Write a snapshot as a whole, or raise OSError and leave the old one."""
    body = msgspec.msgpack.encode(sizes)
    vfs.replace_file(path, temporary, MAGIC + checksum(body) + body)


def load(vfs: Vfs, path: str) -> list[tuple[bytes, int]]:
    """Read a snapshot; return an empty list if it is missing or damaged."""
    try:
        data = memoryview(vfs.read_file(path, MAX_BYTES))
        head, body = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
        if head != MAGIC + checksum(body):
            return []
        sizes = msgspec.msgpack.decode(body, type=list[tuple[bytes, int]])
    except (OSError, msgspec.MsgspecError):
        return []
    return [each for each in sizes if 0 < len(each[0]) <= MAX_KEY_BYTES and each[1] >= 0]
