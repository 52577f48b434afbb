"""Chunks that an engine's own thread reads into the engine's memory, because it need not wait.

The I/O server tells in which files they are, and where in these: a chunk is a file, or has a slot
of one. A file is opened by names that the kernel has in memory, and read from the page cache.
Neither does any I/O, so no read is late. What needs more is for the I/O server to load.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from kvoffload.backends.disk.chunk_file import MOST_IN_RUN, PAGE
from kvoffload.backends.disk.index import Name
from kvoffload.backends.disk.paths import SLOTS, shard_of
from kvoffload.backends.disk.slot_places import Places
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import check_sum, checksum

MOST_MISSES = 4
"""After so many in a row the rest of a prefix is as likely not cached: each costs some 10 µs."""
_MOST_BYTES = 512 << 10
"""Slots are hashed after they are read: more would leave the processor's cache between."""
_MOST_BUFFERS = 1024
"""One call takes no more."""
_BYTE = ctypes.c_ubyte
_FOLDER = getattr(os, "O_PATH", 0) | os.O_DIRECTORY
_FILE = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOATIME", 0)
"""An access time would be written to the device, which may hang."""


class Run(NamedTuple):
    """Chunks that follow one another in a file."""

    first: int
    """The first one's place among those asked for."""
    chunks: int
    name: str
    """Of the file, below the root."""
    offset: int
    slot_bytes: int
    """From one to the next; 0: the file is one chunk."""


def runs_in(segments: Places, root: str, namespace: str, names: Sequence[Name]) -> Iterator[Run]:
    """Yield where chunks of the own namespace are, by their names; an empty one is left out."""
    for run in segments.runs(names, len(names)):
        if not (name := names[run.start]):
            continue
        try:
            segment, slot = segments.find(name)
        except FileNotFoundError:
            key = name[2:]
            yield Run(run.start, 1, f"{namespace}/{shard_of(key)}/{key.hex()}", 0, 0)
        else:
            file, slot_bytes = segment.stem.removeprefix(f"{root}/") + SLOTS, segment.slot_bytes
            yield Run(run.start, len(run), file, slot * slot_bytes, slot_bytes)


def _pieces(runs: Iterable[Run], pages: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Run]:
    """Yield runs in parts that one call reads."""
    for first, count, name, offset, slot_bytes in runs:
        of_bytes, of_parts = _MOST_BYTES // (slot_bytes or 1), len(pages[first]) + 2
        most = max(1, min(MOST_IN_RUN, of_bytes, _MOST_BUFFERS // of_parts))
        for i in range(0, count, most):
            part = min(most, count - i)
            yield Run(first + i, part, name, offset + i * slot_bytes, slot_bytes)


def facts_for_readers(vfs: Vfs, scratch: str, root: str, namespace: str) -> dict[str, Any]:
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
    return place | {"namespace": namespace}


class CachedFiles:
    """The files with the chunks of one namespace. Thread-safe; a forked child reads none.

    Args:
        root: that a store has open.
        device: of the root.
        inode: of the root. Another folder under its name is not used.
        namespace: its digest in hex.
    """

    def __init__(self, root: bytes, device: int, inode: int, namespace: str) -> None:
        self._root, self._identity = root, (device, inode)
        self._digest = bytes.fromhex(namespace)
        self._vfs = Vfs()
        self._pid = os.getpid()

    def read(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[tuple[int, int]]],
        runs: Iterable[Run],
        until_s: float,
    ) -> list[int]:
        """Fill memory with chunks; return the places of those that are verified in it.

        Args:
            keys: of the chunks.
            pages: address and bytes of each part of the memory of each chunk.
            runs: where the chunks were a moment ago; see :func:`runs_in`.
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
            loaded, misses, headers = list[int](), 0, memoryview(bytearray(MOST_IN_RUN * PAGE))
            for name, pieces in groupby(_pieces(runs, pages), itemgetter(2)):
                with self._opened(name, root_fd) as fd:
                    for piece in pieces:
                        if misses == MOST_MISSES or time.monotonic() >= until_s:
                            return loaded
                        found = self._read(fd, piece, keys, pages, headers)
                        loaded += found
                        misses = 0 if found else misses + 1
            return loaded
        except OSError:  # the kernel does not tell which folder it is
            return []
        finally:
            self._vfs.close_quietly(root_fd)

    @contextlib.contextmanager
    def _opened(self, name: str, root_fd: int) -> Iterator[int | None]:
        """Open a file for a while; None: it is gone, or the kernel has not its name in memory."""
        try:
            fd = self._vfs.open_cached(name.encode(), _FILE, root_fd)
        except OSError:
            yield None
            return
        try:
            yield fd
        finally:
            self._vfs.close_quietly(fd)

    def _read(
        self,
        fd: int | None,
        piece: Run,
        keys: Sequence[bytes],
        pages: Sequence[Sequence[tuple[int, int]]],
        headers: memoryview,
    ) -> list[int]:
        """Fill pages with chunks; return those that are wholly cached, and whole."""
        first, count, _, offset, slot_bytes = piece
        chunks, buffers = list[tuple[memoryview, list[Any], int]](), list[Any]()
        for i, page in enumerate(pages[first : first + count]):
            parts: list[Any] = [(_BYTE * size).from_address(at) for at, size in page]
            header, size = headers[i * PAGE : (i + 1) * PAGE], sum(map(len, parts))
            rest = slot_bytes - PAGE - size if slot_bytes else 1  # a file ends with its chunk
            if not 0 <= rest < PAGE:
                return []  # the slot is for chunks of another length
            chunks.append((header, parts, size))
            buffers += header, *parts
            if rest:
                buffers.append(bytearray(rest))
        try:
            if fd is None or not self._vfs.is_cached(fd, PAGE + chunks[0][2], offset):
                return []
            moved = self._vfs.read_cached(fd, buffers, offset)
        except OSError:
            return []
        loaded = []
        for i, (header, parts, size) in enumerate(chunks, first):
            if (moved >= PAGE + size if slot_bytes else moved == PAGE + size) and (
                check_sum(header, size, checksum(*parts), keys[i], self._digest) is None
            ):
                loaded.append(i)
            moved -= slot_bytes
        return loaded
