"""The records in a root, and the server's clock. Each file is replaced as a whole, by a rename.

A record's age is the difference of two files' times, both of which the server wrote. No clock of a
host counts.
"""

import contextlib
import errno
import itertools
import os
from typing import TypeVar

import msgspec

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder import clock
from kvoffload.backends.folder.places import HOSTS, LEASE, NEW, STORE, record_of

VERSION = 1
_MOST_BYTES = 1 << 20
_TRIES = 3


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record; those of other versions are not read."""

    version: int = VERSION


T = TypeVar("T", bound=Record)


class StoreRecord(Record, frozen=True, kw_only=True):
    """Marks a root."""

    store: str
    """A random name: two roots under one path are told apart by it."""


class HostRecord(Record, frozen=True, kw_only=True):
    """What one process has stored."""

    host: str
    pid: int
    stored_bytes: int
    limit_bytes: int
    """What it may store until it is told more, by the lease that it has read."""
    largest_bytes: int
    out_of_space: int
    is_closed: bool = False


class LeaseRecord(Record, frozen=True, kw_only=True):
    """Who evicts, what it has counted, and what each process may store until it is told more."""

    holder: str
    """The token of a process; empty: it has closed, and any may take its place."""
    host: str
    capacity_bytes: int
    resident_bytes: int | None
    """Bytes of files under the root; None until they are counted for the first time."""
    unsure_bytes: int = 0
    """What processes may have stored before they died, until the next scan."""
    newcomer_bytes: int
    """What a process may store that is not counted yet."""
    counted: dict[str, int]
    """By token: the stored bytes of each process that are in ``resident_bytes``."""
    limits: dict[str, int]
    """By token: up to which of its stored bytes each process may store."""


class Records:
    """Reads and writes the records of a root; methods raise OSError.

    Args:
        vfs: makes the system calls.
        root: where.
        token: of this process.
    """

    def __init__(self, vfs: Vfs, root: str, token: str) -> None:
        self._vfs = vfs
        self._root = root
        self.token = token
        self._numbers = itertools.count()
        self._offset_s: float | None = None

    def store(self) -> StoreRecord | None:
        """Return the mark of the root; None: it is none, or its mark cannot be read."""
        return self._read(STORE, StoreRecord)[0]

    def mark(self, store: StoreRecord) -> None:
        self._write(STORE, store)

    def host(self, record: HostRecord) -> None:
        """Write this process's own record, and set the clock by it."""
        name = record_of(self.token)
        self._write(name, record)
        self._set_clock(f"{self._root}/{name}")

    def set_clock(self) -> None:
        """Set the clock by a file that is removed again, for a process that has no record."""
        path = f"{self._root}/{NEW}{self.token}-clock"
        self._vfs.close(self._vfs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            self._set_clock(path)
        finally:
            self._vfs.unlink_quietly(path)

    def _set_clock(self, path: str) -> None:
        self._offset_s = self._vfs.lstat(path).st_mtime_ns / 1e9 - clock.now_s()

    def hosts(self) -> dict[str, tuple[HostRecord, float]]:
        """Return the records of all processes by token, with their ages in seconds."""
        found = {}
        for file in self._vfs.listdir(f"{self._root}/{HOSTS}"):
            token, dot, rest = file.partition(".json")
            if dot and not rest:
                with contextlib.suppress(OSError):  # one bad record keeps no other from counting
                    record, age_s = self._read(f"{HOSTS}/{file}", HostRecord)
                    if record is not None and age_s is not None:
                        found[token] = record, age_s
        return found

    def remove_host(self, token: str) -> None:
        self._vfs.unlink_quietly(f"{self._root}/{record_of(token)}")

    def lease(self) -> tuple[LeaseRecord | None, float | None]:
        """Return the lease and its age in seconds; no age: there is none. No lease: not readable.

        Raises:
            OSError: it cannot be read; IsADirectoryError: a folder has its name.
        """
        return self._read(LEASE, LeaseRecord)

    def write_lease(self, lease: LeaseRecord) -> None:
        self._write(LEASE, lease)

    def age_s(self, mtime_ns: int) -> float:
        """Return how old a file's time is by the server's clock; 0 before a record was written."""
        if self._offset_s is None:
            return 0.0
        return clock.now_s() + self._offset_s - mtime_ns / 1e9

    def _read(self, name: str, kind: type[T]) -> tuple[T | None, float | None]:
        """Return a record and its age; no age: there is none. No record: it is not readable."""
        try:
            content, mtime_ns = self._content(f"{self._root}/{name}")
        except FileNotFoundError:
            return None, None
        age_s = self.age_s(mtime_ns)
        try:
            record = msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, RecursionError):
            return None, age_s
        return (record if record.version == VERSION else None), age_s

    def _content(self, path: str, tries: int = _TRIES) -> tuple[bytearray, int]:
        """Return the bytes and the time of a file, which another process may replace meanwhile.

        On some mounts the name then leads to a file that is gone, and it is read again.
        """
        vfs, fd = self._vfs, -1
        try:
            fd = vfs.open(path, os.O_RDONLY)
            facts = vfs.fstat(fd)
            content = bytearray(min(facts.st_size, _MOST_BYTES))
            del content[vfs.preadv(fd, [content], 0) :]
            return content, facts.st_mtime_ns
        except OSError as error:
            is_replaced = error.errno == errno.ESTALE or (error.errno == errno.ENOENT and fd >= 0)
            if not is_replaced or tries == 1:
                raise
        finally:
            if fd >= 0:
                vfs.close_quietly(fd)
        return self._content(path, tries - 1)

    def _write(self, name: str, record: Record) -> None:
        path = f"{self._root}/{name}"
        temporary = f"{self._root}/{NEW}{self.token}-{next(self._numbers)}"
        self._vfs.replace_file(path, temporary, msgspec.json.encode(record) + b"\n")


def is_out_of_space(error: OSError) -> bool:
    """Return whether a mount, or a quota of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
