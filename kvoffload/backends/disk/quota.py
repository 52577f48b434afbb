"""How many bytes are allocated under a root: one figure, shared by every process that uses it.

Whoever is about to write reserves first, under a file lock, so the capacity holds whatever the
number of writers. Whoever removes a file gives its bytes back after the removal. A process killed
in between leaves the figure too high, never too low; a scan by the evicting process corrects it.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable

import xxhash

from kvoffload.backends.disk.locks import is_at
from kvoffload.backends.disk.vfs import Vfs

# magic, version, resident bytes, changes; then a checksum, because a write may be torn
_RECORD = struct.Struct("<8sQqQ")
_SEAL = struct.Struct("<Q")
_MAGIC = b"KVOLEDGR"
_VERSION = 1
_MOST = 1 << 62
"""No root has so many bytes or changes: a sealed record that says so is damaged."""
_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.001


def recorded_bytes(vfs: Vfs, path: str) -> int | None:
    """The figure of a ledger that is looked at from outside; None if the record is damaged.

    Raises:
        OSError: there is no such file, it cannot be read, or a stopped process has its lock.
    """
    fd = vfs.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not _lock(vfs, fd, fcntl.LOCK_SH):
            raise BlockingIOError(errno.EAGAIN, "locked by another process", path)
        record = _read(vfs, fd)
        return None if record is None else record[0]
    finally:
        vfs.close_quietly(fd)


class Quota:
    """The shared figure. Thread-safe; methods do short file operations and never raise OSError."""

    def __init__(self, vfs: Vfs, path: str, *, fresh: bool) -> None:
        """Open the ledger file; ``fresh`` says that nothing can be stored under the root yet."""
        self._vfs = vfs
        self._path = path
        self._lock = threading.Lock()
        self._fd = vfs.open(path, os.O_RDWR | os.O_CREAT)
        self._owed = 0
        self._closed = False
        self.resident_bytes = 0
        """The figure as of this process's last look."""
        self.changes = 0
        """How often anyone changed it, as of the last look; tells a scan that it was disturbed."""
        if self.refresh() is None and fresh:
            self.settle(0)

    def is_gone(self) -> bool:
        """Whether somebody removed the file: others would count in another one."""
        with self._lock:
            return not self._closed and not is_at(self._vfs, self._fd, self._path)

    def reopen(self, *, fresh: bool) -> None:
        """Open the file anew, made if need be; raises OSError and keeps the old one."""
        with self._lock:
            fd = self._vfs.open(self._path, os.O_RDWR | os.O_CREAT)
            self._vfs.close_quietly(self._fd)
            self._fd = fd
        if self.refresh() is None and fresh:
            self.settle(0)

    def reserve(self, allocated_bytes: int, limit_bytes: int) -> bool:
        """Count bytes about to be written, unless they would pass the limit."""
        with self._lock:
            return self._change(allocated_bytes, limit_bytes)

    def give_back(self, allocated_bytes: int) -> None:
        """Count bytes that are no longer allocated (negative: that turned out to be more)."""
        with self._lock:
            self._owed -= allocated_bytes
            self._change(0, None)

    def refresh(self) -> int | None:
        """Look at the figure; None if there is none yet or it cannot be read."""
        with self._lock:
            if not self._locked():
                return None
            try:
                return self._load()
            except OSError:
                return None
            finally:
                self._unlocked()

    def settle(
        self,
        resident_bytes: int,
        if_changes: int | None = None,
        if_quiet: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Set the figure to what a scan found, if nobody changed it since ``if_changes``.

        ``if_quiet`` has the last word, asked when no one else can change the figure.
        """
        with self._lock:
            if not self._locked():
                return False
            try:
                self._load()
                if if_changes is not None and (self.changes != if_changes or not if_quiet()):
                    return False
                self._owed = 0
                return self._store(resident_bytes)
            except OSError:
                return False
            finally:
                self._unlocked()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if not self._closed:
                self._change(0, None)
                self._closed = True
                self._vfs.close_quietly(self._fd)

    def _change(self, added: int, limit: int | None) -> bool:
        if self._closed or not self._locked():
            return False
        try:
            resident = self._load()
            if resident is None:
                return False
            total = max(0, resident + self._owed) + added
            if limit is not None and total > limit:
                return False
            if not self._store(total):
                return False
            self._owed = 0
            return True
        except OSError:
            return False
        finally:
            self._unlocked()

    def _load(self) -> int | None:
        record = _read(self._vfs, self._fd)
        if record is None:
            return None
        self.resident_bytes, self.changes = record
        return self.resident_bytes

    def _store(self, resident: int) -> bool:
        changes = (self.changes + 1) % _MOST  # what is written must be readable
        record = _RECORD.pack(_MAGIC, _VERSION, resident, changes)
        data = record + _SEAL.pack(_seal_of(record))
        if self._vfs.pwritev(self._fd, [data], 0) != len(data):
            return False
        self.resident_bytes, self.changes = resident, changes
        return True

    def _locked(self) -> bool:
        try:
            return _lock(self._vfs, self._fd, fcntl.LOCK_EX)
        except OSError:
            return False

    def _unlocked(self) -> None:
        with contextlib.suppress(OSError):
            self._vfs.flock(self._fd, fcntl.LOCK_UN)


def _read(vfs: Vfs, fd: int) -> tuple[int, int] | None:
    """Resident bytes and changes; None if the record is damaged."""
    data = bytearray(_RECORD.size + _SEAL.size)
    if vfs.preadv(fd, [data], 0) != len(data):
        return None
    magic, version, resident, changes = _RECORD.unpack_from(data)
    (seal,) = _SEAL.unpack_from(data, _RECORD.size)
    if (magic, version, seal) != (_MAGIC, _VERSION, _seal_of(data[: _RECORD.size])):
        return None
    if not (0 <= resident < _MOST and changes < _MOST):
        return None  # its successor would not fit the record
    return int(resident), int(changes)


def _lock(vfs: Vfs, fd: int, kind: int) -> bool:
    """Take a lock; False if that takes long: a stopped process may have it for ever."""
    for _ in range(_LOCK_TRIES):
        try:
            vfs.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    return False


def _seal_of(record: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(record)
