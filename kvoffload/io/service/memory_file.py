"""The memory of a server as a file, which its next server can go on with.

Behind the blocks are a label and a table. The record of a chunk's first block has the chunk's
header (key, namespace, length, checksum) and its runs. The header is written once the bytes are
there, and is gone before they change. So a server that is killed leaves a record of a whole chunk,
or none. Each first read verifies the bytes as well.
"""

import fcntl
import logging
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvoffload.backends.header import COMPACT_BYTES, MAGIC, Header, parse_header
from kvoffload.io.lent_memory import portions

log = logging.getLogger(__name__)
_F_SEAL_FUTURE_WRITE = 0x10
"""Python 3.11 does not name it; Linux has it since 5.1."""
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_LABEL = struct.Struct("<16sQQQ")
"""What it is, bytes of all blocks, number of blocks, number of servers that had it so far."""
_WHAT = b"kvoffload serve1"
_LABEL_BYTES = 4096
_FACTS = struct.Struct("<QII")
"""Time of the last use, marks, number of runs."""
_USED_AT, _MARKS_AT = COMPACT_BYTES, COMPACT_BYTES + 8
_LENT, _GONE = 1, 2
_RUN = struct.Struct("<II")
_RECORD_BYTES = 512
_MOST_RUNS = (_RECORD_BYTES - COMPACT_BYTES - _FACTS.size) // _RUN.size
_LOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of a 64-bit system."""


class Record(NamedTuple):
    """A chunk as an earlier server has left it, unverified."""

    raw: bytes
    """Its header."""
    header: Header
    runs: Sequence[tuple[int, int]]
    used: int
    """When it was used last, as a number that grows."""
    is_lent: bool
    """Whether an engine may still copy it from here."""
    is_gone: bool
    """Whether it has left, and only its blocks are in use."""


class MemoryFile:
    """A mapped memory file with its table. Not thread-safe.

    Args:
        capacity_bytes: of all blocks, whole pages.
        num_blocks: the number of blocks.
        fd: the file of an earlier server, closed with this one; -1: a new one.

    Raises:
        OSError: the system refuses, or the file is none of this form, size, user and version.
    """

    def __init__(self, capacity_bytes: int, num_blocks: int, fd: int = -1) -> None:
        self._num_blocks = num_blocks
        self._label = capacity_bytes
        self._table = capacity_bytes + _LABEL_BYTES
        size = self._table + num_blocks * _RECORD_BYTES
        how = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fd = fd if fd >= 0 else os.memfd_create("kvoffload-serve", how)
        close = weakref.finalize(self, os.close, self.fd)
        self._generation = self._now = 0
        """How many servers have had the file; its number of uses of chunks."""
        try:
            if fd < 0:
                os.ftruncate(self.fd, size)
                os.fchmod(self.fd, 0o400)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            self._open(size, is_new=fd < 0)
        except BaseException:
            close()
            raise

    def _open(self, size: int, *, is_new: bool) -> None:
        _check(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        """The whole file."""
        what = _WHAT, self._label, self._num_blocks
        *found, self._generation = _LABEL.unpack_from(self.map, self._label)
        if not is_new and tuple(found) != what:
            raise OSError("its label is another one")
        self._own_fd = self.opened_to_read()
        weakref.finalize(self, os.close, self._own_fd)
        fcntl.flock(self._own_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one server at a time
        self._generation += 1
        _LABEL.pack_into(self.map, self._label, *what, self._generation)

    @property
    def is_adopted(self) -> bool:
        """Whether an earlier server has made it."""
        return self._generation > 1

    # ---- other processes ----

    def seal(self) -> None:
        """Let no other process write it, the next server neither; raises OSError.

        The mappings that there are can write.
        """
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def opened_to_read(self) -> int:
        """Return a descriptor, and mappings of it can never write; its taker closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def opened_for_engine(self) -> int:
        """Return one that tells servers after this one for how long the file is mapped."""
        fd = self.opened_to_read()
        # The kernel ends the lock when nothing is open or mapped any more through this descriptor.
        lock = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, self._generation, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        return fd

    def is_mapped_from_before(self) -> bool:
        """Whether an engine maps the file that an earlier server has passed to it."""
        wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, self._generation, 0)
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, wanted)
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    # ---- the table ----

    def records(self) -> Iterator[Record]:
        """Yield what the table has; what is no record stays unread."""
        for start, length in portions(self.fd, self._table):
            for at in range(start, start + length, _RECORD_BYTES):
                if self.map[at : at + len(MAGIC)] == MAGIC and (record := self._record(at)):
                    yield record

    def _record(self, at: int) -> Record | None:
        raw = self.map[at : at + COMPACT_BYTES]
        used, marks, num_runs = _FACTS.unpack_from(self.map, at + COMPACT_BYTES)
        header, runs_at = parse_header(raw), at + COMPACT_BYTES + _FACTS.size
        if not isinstance(header, Header) or not 0 < num_runs <= _MOST_RUNS:
            return None
        runs = list(_RUN.iter_unpack(self.map[runs_at : runs_at + num_runs * _RUN.size]))
        if self._at(runs[0][0]) != at or any(sum(run) > self._num_blocks for run in runs):
            return None
        self._now = max(self._now, used)
        return Record(raw, header, runs, used, bool(marks & _LENT), bool(marks & _GONE))

    def note(self, header: bytes, runs: Sequence[tuple[int, int]]) -> None:
        """Enter a chunk whose bytes are there; one in very many runs ends with this server."""
        if len(runs) > _MOST_RUNS:
            return
        at = self._at(runs[0][0])
        self._now += 1
        facts = _FACTS.pack(self._now, 0, len(runs)) + b"".join(_RUN.pack(*run) for run in runs)
        self.map[at + COMPACT_BYTES : at + COMPACT_BYTES + len(facts)] = facts
        self.map[at : at + COMPACT_BYTES] = header

    def clear(self, first: int) -> None:
        """Take the chunk of this first block out; its bytes may change from now on."""
        at = self._at(first)
        self.map[at : at + len(MAGIC)] = bytes(len(MAGIC))

    def use(self, firsts: Sequence[int]) -> None:
        """Enter a use of chunks, in this order."""
        for first in firsts:
            self._now += 1
            struct.pack_into("<Q", self.map, self._at(first) + _USED_AT, self._now)

    def mark(self, first: int, *, is_lent: bool, is_gone: bool = False) -> None:
        """Enter a chunk's marks: the loan before an engine knows of it, and its end after it."""
        marks = _LENT * is_lent | _GONE * is_gone
        struct.pack_into("<I", self.map, self._at(first) + _MARKS_AT, marks)

    def _at(self, first: int) -> int:
        return self._table + first * _RECORD_BYTES


def _check(fd: int, size: int) -> None:
    facts = os.fstat(fd)
    if facts.st_size != size or not stat.S_ISREG(facts.st_mode):
        raise OSError(f"it has {facts.st_size} bytes, not {size}")
    if facts.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {facts.st_uid}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
        raise OSError("it may shrink")


def private_memory(size: int) -> mmap.mmap:
    """Return memory of this process alone; raises OSError where the system has not that much."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def file_of(size: int, blocks: int, fd: int) -> MemoryFile:
    """Return the memory of an earlier server, or a new one if there is none that fits."""
    if fd >= 0:
        try:
            return MemoryFile(size, blocks, fd)
        except (OSError, ValueError) as error:
            log.warning("the memory of the server before cannot be adopted: %s", error)
    return _new_file(size, blocks)


def _new_file(size: int, blocks: int) -> MemoryFile:
    # The system refuses private memory that it does not have. That of a file it never refuses.
    private_memory(size).close()
    return MemoryFile(size, blocks)


def sealed_file(size: int, blocks: int) -> MemoryFile | None:
    """Return memory for this server that no other process can write; None: there is none."""
    try:
        file = _new_file(size, blocks)
        file.seal()
    except OSError as error:
        text = "chunks are copied to all engines: no memory can be kept from their writes: %s"
        log.warning(text, error)
        return None
    return file
