"""Whose the files are, by the tags of tenants in their headers. Only shares of tenants need it."""

import os
import time
from array import array
from collections.abc import Callable, Generator

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import Shard
from kvoffload.backends.header import ALIGNED_BYTES, Header, parse_header

Tag = int
"""The first half of a tag in a header; 0: the file has none, or it is not read yet."""

_TAG_BYTES = 8


class Tags:
    """The tags of a root's files: each header is read once. Used by one thread.

    A key stays its tenant's, as the salt is part of the hash: the names tell of later files, too.

    Args:
        vfs: makes the system calls.
    """

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._known: dict[tuple[str, str], tuple[array[int], array[int]]] = {}
        """By folder and shard: hashes of the keys, and their tags. 16 bytes a file."""
        self.reading_s = 0.0
        """Time that reading has taken."""

    def of(
        self, folder: str, shard: Shard, may_read: Callable[[], bool]
    ) -> Generator[bool, None, tuple[dict[bytes, Tag], int]]:
        """Return the tags of a shard's chunks by key, and how many were not read.

        Yields after each header that it reads; asks ``may_read`` before.
        """
        place, tags, unread = (folder, shard.name), dict[bytes, Tag](), 0
        known = dict(zip(*self._known.get(place, ((), ())), strict=True))
        for key, _ in shard.chunks:
            tag = known.get(hash(key))
            if tag is None and may_read():
                began_s = time.monotonic()
                tag = self._read(f"{shard.path}/{key.hex()}")
                self.reading_s += time.monotonic() - began_s
                yield True
            elif tag is None:
                unread += 1
            if tag is not None:
                tags[key] = tag
        self._known[place] = array("q", map(hash, tags)), array("Q", tags.values())
        return tags, unread

    def keep(self, places: set[tuple[str, str]]) -> None:
        """Forget the files of all other shards: they are gone."""
        self._known = {place: self._known[place] for place in places if place in self._known}

    def _read(self, path: str) -> Tag | None:
        """Return the tag in a header; None: it cannot be read now."""
        vfs, header = self._vfs, memoryview(bytearray(ALIGNED_BYTES))
        try:
            with vfs.file(path, os.O_RDONLY) as fd:
                found = parse_header(header[: vfs.preadv(fd, [header], 0)])
        except OSError:
            return None
        return int.from_bytes(found.tenant[:_TAG_BYTES]) if isinstance(found, Header) else 0
