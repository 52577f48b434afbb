"""Chunks that an engine's own thread reads into the engine's memory, because it need not wait.

A file is opened by names that the kernel has in memory, and read from the page cache. Neither does
any I/O, so no read is late. What needs more, as a chunk in a slot, is for the I/O server to load.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

from kvoffload.backends.disk.chunk_file import PAGE
from kvoffload.backends.disk.paths import shard_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import check_sum, checksum

MOST_MISSES = 4
"""After so many in a row the rest of a prefix is as likely not cached: each costs some 10 µs."""
_BYTE = ctypes.c_ubyte
_FOLDER = getattr(os, "O_PATH", 0) | os.O_DIRECTORY
_FILE = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOATIME", 0)
"""An access time would be written to the device, which may hang."""


def facts_for_readers(
    vfs: Vfs, scratch: str, root: str, namespace: str, ttl_s: float | None
) -> dict[str, Any]:
    """Return what :class:`CachedFiles` must know of an open root; empty: reads might wait there.

    They might where Linux is older than 5.12, or a container forbids the call. A file system in a
    network has no reads that do not wait. ``scratch``: the path of a new file in the root.
    """
    try:
        with vfs.scratch(scratch) as fd:
            vfs.pwritev(fd, [bytes(PAGE)], 0)
            # First: the server of a file system that has no such reads might hang in the other
            # call, which keeps the GIL.
            with contextlib.suppress(BlockingIOError):
                vfs.read_cached(fd, [bytearray(PAGE)], 0)
            with contextlib.suppress(BlockingIOError):  # for the moment: there is such a call
                vfs.close_quietly(vfs.open_cached(os.fsencode(scratch), _FILE))
        facts = vfs.fstat(vfs.root_fd)
    except OSError:
        return {}
    place = {"root": os.fsencode(root), "device": facts.st_dev, "inode": facts.st_ino}
    return place | {"namespace": namespace, "ttl_s": ttl_s}


class CachedFiles:
    """The chunk files of one namespace. Thread-safe; a forked child reads none.

    Args:
        root: that a store has open.
        device: of the root.
        inode: of the root. Another folder under its name is not used.
        namespace: the digest in hex, which names a folder.
        ttl_s: seconds from its last use until a chunk expires; None: none does.
    """

    def __init__(
        self, root: bytes, device: int, inode: int, namespace: str, ttl_s: float | None
    ) -> None:
        self._root, self._identity = root, (device, inode)
        self._namespace, self._digest = namespace, bytes.fromhex(namespace)
        self._ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._vfs = Vfs()
        self._pid = os.getpid()

    def read(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[tuple[int, int]]],
        until_s: float,
    ) -> list[int]:
        """Fill memory with chunks; return the places of those that are verified in it.

        Args:
            keys: of the chunks.
            pages: address and bytes of each part of the memory of each chunk.
            until_s: when to begin no further chunk.
        """
        if self._pid != os.getpid():
            return []
        try:
            root_fd = self._vfs.open_cached(self._root, _FOLDER)
        except OSError:
            return []
        try:
            # Not by fstat(2): a file system that was mounted over the root might hang in it.
            if self._vfs.known_identity(root_fd) != self._identity:
                return []
            loaded, misses, header = list[int](), 0, memoryview(bytearray(PAGE))
            for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
                if misses == MOST_MISSES or time.monotonic() >= until_s:
                    break
                if self._read(root_fd, key, page, header):
                    loaded.append(i)
                    misses = 0
                else:
                    misses += 1
            return loaded
        except OSError:  # the kernel does not tell which folder it is
            return []
        finally:
            self._vfs.close_quietly(root_fd)

    def _read(
        self, root_fd: int, key: bytes, page: Sequence[tuple[int, int]], header: memoryview
    ) -> bool:
        """Fill the parts of a page with its chunk; False: it is not wholly cached, or not whole."""
        parts: list[Any] = [(_BYTE * size).from_address(address) for address, size in page]
        vfs, size = self._vfs, sum(map(len, parts))
        try:
            name = f"{self._namespace}/{shard_of(key)}/{key.hex()}".encode()
            fd = vfs.open_cached(name, _FILE, root_fd)
            try:
                if not self._is_fresh(fd) or not vfs.is_cached(fd, PAGE + size):
                    return False
                if vfs.read_cached(fd, [header, *parts, bytearray(1)], 0) != PAGE + size:
                    return False
            finally:
                vfs.close(fd)
        except OSError:
            return False
        return check_sum(header, size, checksum(*parts), key, self._digest) is None

    def _is_fresh(self, fd: int) -> bool:
        """Return whether a chunk has surely not expired: a late use may not be on disk yet."""
        ttl_ns = self._ttl_ns
        return ttl_ns is None or self._vfs.fstat(fd).st_atime_ns + ttl_ns > time.time_ns()
