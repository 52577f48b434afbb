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

from kvoffload.backends.format import ALIGNED_BYTES, check_chunk, pack_header
from kvoffload.backends.vfs import Buffers, Vfs

PAGE = ALIGNED_BYTES


class Outcome(NamedTuple):
    """What became of one file operation."""

    reason: str | None
    """None: done. Otherwise ``missing``, ``io_<ERRNO>`` or ``corrupt_<what>``."""
    facts: os.stat_result | None = None
    """The file's facts, where it could be opened."""


def reason_of(error: OSError) -> str:
    """A counter's name for an error of the operating system."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if error.errno == errno.ELOOP:
        return "corrupt_link"
    return f"io_{errno.errorcode.get(error.errno or 0, 'unknown')}"


class ChunkFiles:
    """Reads and writes chunk files; thread-safe. ``direct`` bypasses the page cache."""

    def __init__(self, vfs: Vfs, *, direct: bool, durable: bool) -> None:
        self.vfs = vfs
        self.direct = direct
        self.durable = durable
        self._local = threading.local()

    def read(self, path: str, key: bytes, namespace: bytes, target: memoryview) -> Outcome:
        """Fill ``target`` with the chunk at ``path``, if it is exactly the one wanted."""
        try:
            fd = self.vfs.open(path, self._flags(os.O_RDONLY | os.O_NONBLOCK, target))
        except OSError as error:
            return Outcome(reason_of(error))
        facts = None
        try:
            facts = self.vfs.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                return Outcome("corrupt_link", facts)
            if facts.st_size != PAGE + target.nbytes:
                return Outcome("corrupt_size", facts)
            header = self._header_page()
            if _transfer(self.vfs.preadv, fd, header, target) != PAGE + target.nbytes:
                return Outcome("corrupt_short", facts)
            reason = check_chunk(header, target, key, namespace)
            return Outcome(reason and f"corrupt_{reason}", facts)
        except OSError as error:
            return Outcome(reason_of(error), facts)
        finally:
            self.vfs.close_quietly(fd)

    def write(self, path: str, key: bytes, namespace: bytes, chunk: memoryview) -> Outcome:
        """Write a chunk under a temporary name; the caller gives it its own, or removes it."""
        try:
            fd = self.vfs.open(path, self._flags(os.O_WRONLY | os.O_CREAT | os.O_EXCL, chunk))
        except OSError as error:
            return Outcome(reason_of(error))
        try:
            header = self._header_page()
            header[:] = pack_header(key, namespace, chunk, header_bytes=PAGE)
            if _transfer(self.vfs.pwritev, fd, header, chunk) != PAGE + chunk.nbytes:
                return Outcome("io_short")
            if self.durable:
                self.vfs.fsync(fd)
            return Outcome(None, self.vfs.fstat(fd))
        except OSError as error:
            return Outcome(reason_of(error))
        finally:
            self.vfs.close_quietly(fd)

    def _flags(self, flags: int, memory: memoryview) -> int:
        return flags | os.O_DIRECT if self.direct and is_aligned(memory) else flags

    def _header_page(self) -> memoryview:
        page: memoryview | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = memoryview(mmap.mmap(-1, PAGE))
        return page


def is_aligned(memory: memoryview) -> bool:
    """Whether direct I/O can use this memory: address and length are whole pages."""
    if memory.nbytes % PAGE or not memory.nbytes:
        return False
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def probe_direct(vfs: Vfs, path: str) -> str | None:
    """Try direct I/O on a scratch file; say why it does not work here, or None if it does."""
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


def _transfer(
    call: Callable[[int, Buffers, int], int], fd: int, header: memoryview, body: memoryview
) -> int:
    """Move header and body in one call, going on after short ones; return the bytes moved."""
    body = body.cast("B")
    total = len(header) + len(body)
    done = 0
    while done < total:
        buffers = [header[done:], body] if done < PAGE else [body[done - PAGE :]]
        moved = call(fd, buffers, done)
        if moved <= 0:
            break
        done += moved
        if done < total and done % PAGE:
            # The rest no longer begins on a page: go on through the page cache.
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return done
