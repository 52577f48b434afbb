"""One chunk, one file: read and verified in the caller's memory, written straight from it.

Functions here block and run on worker threads. They report by value: an outcome with a reason.
"""

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvoffload.backends.disk.vfs import Buffers, Vfs
from kvoffload.backends.header import ALIGNED_BYTES, check_chunk, pack_header

PAGE = ALIGNED_BYTES


class Outcome(NamedTuple):
    """What became of one file operation."""

    reason: str | None
    """None: done. Otherwise ``missing``, ``io_<ERRNO>`` or ``corrupt_<what>``."""
    facts: os.stat_result | None = None
    """The file's facts, where it could be opened."""


_DONE = Outcome(None)


def reason_of(error: OSError) -> str:
    """A counter's name for an error of the operating system."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if error.errno == errno.ELOOP:
        return "corrupt_link"
    return f"io_{errno.errorcode.get(error.errno or 0, 'unknown')}"


def strangeness(facts: os.stat_result) -> str | None:
    """A counter's name for what is no file but lies where one belongs; None for a file."""
    if stat.S_ISREG(facts.st_mode):
        return None
    return "corrupt_folder" if stat.S_ISDIR(facts.st_mode) else "corrupt_special"


class ChunkFiles:
    """Reads and writes chunk files; thread-safe. ``direct`` bypasses the page cache."""

    def __init__(self, vfs: Vfs, *, direct: bool, durable: bool) -> None:
        self.vfs = vfs
        self.direct = direct
        self.durable = durable
        self._local = threading.local()

    def read(self, path: str, key: bytes, namespace: bytes, target: memoryview) -> Outcome:
        """Fill ``target`` with the chunk at ``path``, if it is exactly the one wanted.

        As few calls as possible, because each gives the interpreter away and has to wait for it
        again: the page behind the chunk's end tells a file that is too long, no ``fstat``.
        """
        vfs = self.vfs
        try:
            fd = vfs.open(path, self._flags(os.O_RDONLY | os.O_NONBLOCK, target))
        except OSError as error:
            return self._unopenable(path, error)
        try:
            header, beyond = self._pages()
            wanted = PAGE + target.nbytes
            moved = vfs.preadv(fd, [header, target, beyond], 0)
            if 0 < moved < wanted:
                moved = _go_on(vfs.preadv, fd, [header, target, beyond], moved)
            reason = check_chunk(header, target, key, namespace) if moved == wanted else "size"
            if reason is None:
                return _DONE
            return self._damaged(fd, reason, wanted)
        except OSError as error:
            return self._unreadable(fd, error)
        finally:
            vfs.close_quietly(fd)

    def _unopenable(self, path: str, error: OSError) -> Outcome:
        """Tell a file that cannot be opened from what no direct I/O, or nobody, can open."""
        reason = reason_of(error)
        if not reason.startswith("io_"):
            return Outcome(reason)
        try:
            facts = self.vfs.lstat(path)
        except OSError:
            return Outcome(reason)
        return Outcome(strangeness(facts) or reason, facts)

    def _damaged(self, fd: int, reason: str, wanted: int) -> Outcome:
        """Say what is wrong with a file that could be read but is not the chunk wanted."""
        facts = self.vfs.fstat(fd)
        if reason == "size" and facts.st_size == wanted:
            reason = "short"
        return Outcome(f"corrupt_{reason}", facts)

    def _unreadable(self, fd: int, error: OSError) -> Outcome:
        """Tell a file that gives an error from something that is no file."""
        try:
            facts = self.vfs.fstat(fd)
        except OSError:
            return Outcome(reason_of(error))
        return Outcome(strangeness(facts) or reason_of(error), facts)

    def write(self, path: str, key: bytes, namespace: bytes, chunk: memoryview) -> Outcome:
        """Write a chunk under a temporary name; the caller gives it its own, or removes it."""
        try:
            fd = self.vfs.open(path, self._flags(os.O_WRONLY | os.O_CREAT | os.O_EXCL, chunk))
        except OSError as error:
            return Outcome(reason_of(error))
        try:
            header, _ = self._pages()
            header[:] = pack_header(key, namespace, chunk, header_bytes=PAGE)
            if _go_on(self.vfs.pwritev, fd, [header, chunk], 0) != PAGE + chunk.nbytes:
                return Outcome("io_short")
            if self.durable:
                self.vfs.fsync(fd)
            return Outcome(None, self.vfs.fstat(fd))
        except OSError as error:
            return Outcome(reason_of(error))
        finally:
            self.vfs.close_quietly(fd)

    def sync(self, path: str) -> None:
        """Make a file durable that is there already; raises OSError."""
        fd = self.vfs.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self.vfs.fsync(fd)
        finally:
            self.vfs.close_quietly(fd)

    def _flags(self, flags: int, memory: memoryview) -> int:
        return flags | os.O_DIRECT if self.direct and is_aligned(memory) else flags

    def _pages(self) -> tuple[memoryview, memoryview]:
        """Two pages of this thread's own: for a header, and for what should not be there."""
        pages: tuple[memoryview, memoryview] | None = getattr(self._local, "pages", None)
        if pages is None:
            both = memoryview(mmap.mmap(-1, 2 * PAGE))
            pages = self._local.pages = both[:PAGE], both[PAGE:]
        return pages


def is_aligned(memory: memoryview) -> bool:
    """Whether direct I/O can use this memory: address and length are whole pages."""
    if memory.nbytes % PAGE or not memory.nbytes:
        return False
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def probe_direct(vfs: Vfs, path: str) -> str | None:
    """Try direct I/O on a scratch file; say why it does not work here, or None if it does."""
    if not hasattr(os, "O_DIRECT"):  # only Linux has it
        return "io_ENOTSUP"
    page = memoryview(mmap.mmap(-1, PAGE))
    page[:8] = b"kvoffld?"
    try:
        fd = vfs.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        return reason_of(error)
    try:
        if vfs.pwritev(fd, [page], 0) != PAGE or vfs.preadv(fd, [page], 0) != PAGE:
            return "io_short"
        return None
    except OSError as error:
        return reason_of(error)
    finally:
        vfs.close_quietly(fd)
        vfs.unlink_quietly(path)


def _go_on(
    call: Callable[[int, Buffers, int], int], fd: int, buffers: list[memoryview], done: int
) -> int:
    """Read or write the rest of what was begun, as often as it takes; return the bytes moved."""
    rest = [buffer.cast("B") for buffer in buffers]
    skip = done
    while rest:
        while rest and skip >= len(rest[0]):
            skip -= len(rest.pop(0))
        if not rest:
            break
        rest[0] = rest[0][skip:]
        if done % PAGE:
            # The rest no longer begins on a page: go on through the page cache.
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
        skip = call(fd, rest, done)
        if skip <= 0:
            break
        done += skip
    return done
