"""One chunk, one file: read and verified in the caller's memory, written straight from it.

Functions block and run on worker threads. They return an outcome with a reason, and do not raise.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvoffload.backends.disk.cache_room import CacheRoom
from kvoffload.backends.disk.vfs import Buffers, Vfs
from kvoffload.backends.header import (
    ALIGNED_BYTES,
    OTHER_KEY,
    OTHER_VERSION,
    Header,
    counted_as,
    mismatch,
    parse_header,
)
from kvoffload.backends.seals import ChecksumSeal, Seal
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)

PAGE = ALIGNED_BYTES
MOST_IN_RUN = 8
"""So many chunks are read or written by one call at most."""


class Outcome(NamedTuple):
    """The result of one file operation."""

    reason: str | None
    """None: done. Else ``missing``, ``other_version``, ``other_key``, ``io_<ERRNO>`` or
    ``corrupt_<what>``."""
    facts: os.stat_result | None = None
    """The file's facts, if it could be opened."""


_DONE = Outcome(None)


def reason_of(error: OSError) -> str:
    """Return a counter's name for an error of the operating system."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if error.errno == errno.ELOOP:
        return "corrupt_link"
    return f"io_{errno.errorcode.get(error.errno or 0, 'unknown')}"


def _failed(error: OSError, facts_of: Callable[[], os.stat_result]) -> Outcome:
    """Return the outcome of a failed call; a folder or device in place of a file is damage."""
    reason = reason_of(error)
    if not reason.startswith("io_"):
        return Outcome(reason)
    try:
        facts = facts_of()
    except OSError:
        return Outcome(reason)
    return Outcome(strangeness(facts) or reason, facts)


def strangeness(facts: os.stat_result) -> str | None:
    """Return a counter's name for a folder or device in place of a file; None for a file."""
    if stat.S_ISREG(facts.st_mode):
        return None
    return "corrupt_folder" if stat.S_ISDIR(facts.st_mode) else "corrupt_special"


class ChunkFiles:
    """Reads and writes chunk files of one namespace; thread-safe.

    ``direct`` bypasses the page cache. With ``room``, too, loads take from it what it has, and
    stores go through it while there is room.
    """

    def __init__(
        self, vfs: Vfs, namespace: bytes, *, direct: bool, room: CacheRoom | None, durable: bool
    ) -> None:
        self.vfs = vfs
        self.namespace = namespace
        """Its digest."""
        self.direct = direct
        self.room = room
        self.durable = durable
        self.seal: Seal = ChecksumSeal()
        self.expect_wait: Callable[[], None] = lambda: None
        """Called before a read that the page cache does not answer."""
        self._local = threading.local()

    def read(self, path: str, key: bytes, target: memoryview) -> Outcome:
        """Fill ``target`` with the chunk at ``path``, verified against key and namespace.

        Makes few system calls: each one releases and re-acquires the GIL. Reading one page past the
        end detects an overlong file without ``fstat``.
        """
        vfs = self.vfs
        try:
            fd = vfs.open(path, os.O_RDONLY | self._bypass(target, self.room is not None))
        except OSError as error:
            return _failed(error, lambda: vfs.lstat(path))
        try:
            header, beyond = self.pages(2)
            wanted = PAGE + target.nbytes
            moved = 0
            if self.room:
                moved = self.read_cached(fd, [header, target, beyond], wanted, 0)
                if moved < wanted and is_aligned(target):
                    with contextlib.suppress(OSError):
                        vfs.bypass_cache(fd)
            if moved < wanted:
                moved = vfs.preadv(fd, [header, target, beyond], 0)
            if 0 < moved < wanted:
                moved = continued(vfs.preadv, fd, [header, target, beyond], moved)
            if moved == wanted:
                reason = self.seal.fault(header, target, key, self.namespace)
            else:
                reason = "size"
                if parse_header(header[:moved]) == OTHER_VERSION:
                    reason = OTHER_VERSION  # whose chunks may have other lengths
            if reason is None:
                return _DONE
            facts = vfs.fstat(fd)
            if reason == "size" and facts.st_size == wanted:
                reason = "short"
            return Outcome(counted_as(reason), facts)
        except OSError as error:
            return _failed(error, lambda: vfs.fstat(fd))
        finally:
            vfs.close_quietly(fd)

    def write(
        self,
        path: str,
        key: bytes,
        chunk: memoryview,
        *,
        overwrite: bool = False,
        tenant: bytes = b"",
    ) -> Outcome:
        """Write a chunk under a temporary name; the caller renames or removes the file.

        ``overwrite``: the file exists and has the length of the new one, see :func:`can_become`.
        """
        flags = os.O_WRONLY if overwrite else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        by_cache = self.fills_cache()
        try:
            fd = self.vfs.open(path, flags | self._bypass(chunk, by_cache))
        except OSError as error:
            return Outcome(reason_of(error))
        try:
            if overwrite:
                now_ns = time.time_ns()
                self.vfs.utime(path, now_ns, now_ns)  # a write leaves the time of the last use
            (header,) = self.pages(1)
            header[:], stored = self.seal.pack(
                key, self.namespace, chunk, header_bytes=PAGE, tenant=tenant
            )
            try:
                written = continued(self.vfs.pwritev, fd, [header, stored], 0)
            finally:
                self.seal.done(stored)
            if written != PAGE + chunk.nbytes:
                return Outcome("io_short")
            if by_cache:
                # Else the kernel gathers them, and writes them all at once in the way of loads.
                with contextlib.suppress(OSError):
                    self.vfs.start_writeback(fd)
            if self.durable:
                self.vfs.fsync(fd)
            return Outcome(None, self.vfs.fstat(fd))
        except OSError as error:
            return Outcome(reason_of(error))
        finally:
            self.vfs.close_quietly(fd)

    def read_cached(self, fd: int, buffers: list[memoryview], wanted: int, offset: int) -> int:
        """Read a part of a file if the page cache has all of it; return the bytes read.

        The question for its head comes first, because a read of a file that is not cached begins to
        read ahead.
        """
        with contextlib.suppress(OSError):  # the read that follows tells of an error that lasts
            if self.vfs.is_cached(fd, wanted, offset) and (
                (moved := self.vfs.read_cached(fd, buffers, offset)) >= wanted
            ):
                return moved
        self.expect_wait()
        return 0

    def fills_cache(self) -> bool:
        """Return whether a store goes through the page cache, though it need not."""
        return self.room is not None and self.room.look()

    def _bypass(self, memory: memoryview, by_cache: bool) -> int:
        """Return the flag with which a file is opened for I/O of this memory."""
        return os.O_DIRECT if self.direct and not by_cache and is_aligned(memory) else 0

    def pages(self, count: int) -> list[memoryview]:
        """Return pages of this thread, up to ``MOST_IN_RUN``: for headers, or past a chunk."""
        pages: list[memoryview] | None = getattr(self._local, "pages", None)
        if pages is None:
            memory = memoryview(mmap.mmap(-1, MOST_IN_RUN * PAGE))
            pages = [memory[i * PAGE : (i + 1) * PAGE] for i in range(MOST_IN_RUN)]
            self._local.pages = pages
        return pages[:count]


def check(
    vfs: Vfs,
    fd: int,
    key: bytes,
    namespace: bytes,
    buffer: memoryview,
    cipher: Seal | None = None,
    slot: range | None = None,
) -> tuple[str | None, int]:
    """Read an open chunk of any length in pieces of ``buffer``; raises OSError.

    Of a chunk that is plain or under other keys than those of ``cipher``, only header and length
    are checked. ``slot``: the part of the file in which the chunk is; None: it is the whole file.

    Returns:
        Why loads miss it, if they do, and the bytes read.
    """
    facts = vfs.fstat(fd)
    if (strange := strangeness(facts)) is not None:
        return strange, 0
    start = slot.start if slot else 0
    read = vfs.preadv(fd, [buffer[:PAGE]], start)
    header = parse_header(buffer[:read])
    payload_bytes = facts.st_size - PAGE
    if slot and isinstance(header, Header):
        payload_bytes = min(header.payload_bytes, len(slot) - PAGE)
    reason = mismatch(header, key, namespace, payload_bytes)
    if reason is None and isinstance(header, Header):
        if (running := (cipher or ChecksumSeal()).begin_check(buffer[:PAGE], header)) is None:
            return OTHER_KEY, read
        end = PAGE + payload_bytes
        while piece := vfs.preadv(fd, [buffer[: end - read]], start + read) if read < end else 0:
            running.update(buffer[:piece])
            read += piece
        if read != end:
            reason = "short"
        elif not running.is_whole():
            reason = "payload"
    if reason is None:
        return None, read
    # As for loads, a file that is too short or too long has the wrong size.
    if not slot and (reason == "length" or (reason == "short" and facts.st_size < PAGE)):
        reason = "size"
    return counted_as("short" if reason == "length" else reason), read


def bytes_on_disk(chunk_bytes: int) -> int:
    """Return the bytes that a chunk takes up, its header included."""
    return PAGE + -(-chunk_bytes // PAGE) * PAGE


def can_become(facts: os.stat_result, chunk_bytes: int) -> bool:
    """Return whether a file can be overwritten with a chunk: no other name shows its bytes."""
    is_own = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
    return is_own and facts.st_size == PAGE + chunk_bytes


def is_aligned(memory: memoryview) -> bool:
    """Return whether direct I/O can use this memory: address and length are whole pages.

    The address of read-only memory is not known.
    """
    if memory.nbytes % PAGE or not memory.nbytes or memory.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE == 0


def probe_direct(vfs: Vfs, path: str) -> str | None:
    """Try direct I/O on a scratch file; return why it does not work here, or None."""
    if not hasattr(os, "O_DIRECT"):  # only Linux has it
        return "io_ENOTSUP"
    page = memoryview(mmap.mmap(-1, PAGE))
    page[:8] = b"kvoffld?"
    try:
        with vfs.scratch(path, os.O_DIRECT) as fd:
            if vfs.pwritev(fd, [page], 0) != PAGE or vfs.preadv(fd, [page], 0) != PAGE:
                return "io_short"
            return None
    except OSError as error:
        return reason_of(error)


def probe_holes(vfs: Vfs, scratch: str) -> str | None:
    """Try whether the file system frees a part of a file; return why not, or None."""
    try:
        with vfs.scratch(scratch) as fd:
            vfs.pwritev(fd, [bytes(PAGE), bytes(PAGE)], 0)
            before = vfs.fstat(fd).st_blocks
            vfs.punch(fd, 0, PAGE)
            # With larger blocks than a page, or no holes at all, it only writes zeros.
            return None if vfs.fstat(fd).st_blocks < before else "their room stays"
    except OSError as error:
        return error.strerror or str(error)


def choose_io(vfs: Vfs, root: str, scratch: str, wanted: str) -> tuple[str, str | None]:
    """Return ``auto``, ``direct`` or ``buffered``, and why there is no direct I/O.

    Raises:
        ConfigError: direct I/O was demanded and does not work.
    """
    if wanted == "buffered":
        return "buffered", None
    reason = probe_direct(vfs, scratch)
    if reason is None:
        return wanted, None
    if wanted == "direct":
        # A device that is full or fails refuses it too, and then no setting is wrong.
        error = OSError(getattr(errno, reason.removeprefix("io_"), 0), reason)
        remedy = f"does not work at this root ({reason}); use 'auto'"
        raise ConfigError("io", "direct", remedy) from error
    log.warning("disk %s: direct I/O does not work (%s), using the page cache", root, reason)
    return "buffered", reason


def continued(
    call: Callable[[int, Buffers, int], int],
    fd: int,
    buffers: list[memoryview],
    done: int,
    offset: int = 0,
) -> int:
    """Continue a short read or write at ``offset`` until it is complete; return the bytes moved.

    The descriptor ends up without direct I/O if a part was no whole page.
    """
    moved = done
    rest = [buffer.cast("B") for buffer in buffers]
    while True:
        while rest and moved >= len(rest[0]):
            moved -= len(rest.pop(0))
        if not rest:
            return done
        rest[0] = rest[0][moved:]
        if done % PAGE:
            # The rest no longer begins on a page: continue through the page cache.
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
        moved = call(fd, rest, offset + done)
        if moved <= 0:
            return done
        done += moved
