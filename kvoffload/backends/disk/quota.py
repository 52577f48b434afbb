"""The quota: the bytes allocated under a root, one figure shared by every process that uses it.

A writer reserves under a file lock before it writes, so the capacity holds for any number of
writers. A process that removes a file releases its bytes afterwards. A process killed in between
leaves the figure too high, never too low; a scan by the evicting process corrects it. So that the
scan sees what moves, a process tells what it has in flight before the figure or a file changes.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable

from kvoffload.backends.disk.locks import LOCK_WAIT_S, is_at, lock_patiently
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import SEAL_BYTES, sealed

# magic, version, resident bytes, changes; then a seal, because a write may be torn
_RECORD = struct.Struct("<8sQqQ")
_MAGIC = b"KVOLEDGR"
_VERSION = 1
_MOST = 1 << 62
"""A sealed record with more bytes or changes than this is damaged."""


def recorded_bytes(vfs: Vfs, path: str) -> int | None:
    """Return the figure of a quota file without opening the quota; None if it is damaged.

    Raises:
        OSError: the file is missing or unreadable, or a stopped process has its lock.
    """
    with vfs.file(path, os.O_RDONLY) as fd:
        if not lock_patiently(LOCK_WAIT_S, vfs.flock, fd, fcntl.LOCK_SH | fcntl.LOCK_NB):
            raise BlockingIOError(errno.EAGAIN, "locked by another process", path)
        record = _read(vfs, fd)
        return None if record is None else record[0]


class Quota:
    """The shared figure. Thread-safe; methods do short file operations and never raise OSError."""

    def __init__(self, vfs: Vfs, path: str, *, fresh: bool) -> None:
        """Open the quota file; ``fresh``: the root is new and holds nothing yet."""
        self._vfs = vfs
        self._path = path
        self._lock = threading.Lock()
        self._fd = vfs.open(path, os.O_RDWR | os.O_CREAT)
        self._owed = 0
        """What the file does not count yet; negative for released bytes."""
        self._closed = False
        self._failed = threading.local()
        self._recorded_bytes = 0
        """The figure as this process read it last."""
        self.changes = 0
        """Number of changes by all processes; a reservation counts as one a chunk. It tells a
        scan that it was disturbed, and by how many files at most."""
        if fresh:
            self.mend(0)
        else:
            self.refresh()

    @property
    def resident_bytes(self) -> int:
        """The figure as this process read it last, less what it could not release since."""
        return max(0, self._recorded_bytes + self._owed)

    @property
    def failure(self) -> OSError | None:
        """Why the last change by this thread was not made: the device refused; None: it did not."""
        return getattr(self._failed, "error", None)

    def is_gone(self) -> bool:
        """Return whether the file was removed: other processes would count in another file."""
        return not self._closed and not is_at(self._vfs, self._fd, self._path)

    def reserve(self, allocated_bytes: int, limit_bytes: int, chunks: int = 1) -> bool:
        """Count bytes about to be written, unless they would exceed the limit.

        ``chunks``: how many files will appear; a scan that they disturb needs their number.
        """

        def add(resident: int | None) -> int | None:
            if resident is None:
                return None
            total = max(0, resident + self._owed) + allocated_bytes
            return total if total <= limit_bytes else None

        with self._lock:
            return self._update(add, chunks)

    def release(self, allocated_bytes: int) -> None:
        """Count bytes that are no longer allocated; a negative number counts more bytes."""
        with self._lock:
            self._owed -= allocated_bytes
            self._update(self._without_owed)

    def _without_owed(self, resident: int | None) -> int | None:
        return None if resident is None else max(0, resident + self._owed)

    def refresh(self) -> int | None:
        """Read the figure; None if there is none yet or it cannot be read."""
        figures: list[int | None] = [None]
        with self._lock:
            self._update(figures.append)  # its answer None changes nothing
        return figures[-1]

    def correct(
        self,
        resident_bytes: int,
        if_changes: int | None = None,
        if_quiet: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Set the figure to the result of a scan, unless it changed since ``if_changes``.

        ``if_quiet`` is asked under the lock, while no other process can change the figure.
        """

        def replace(resident: int | None) -> int | None:
            changed = if_changes is not None and (self.changes != if_changes or not if_quiet())
            return None if changed else resident_bytes

        with self._lock:
            return self._update(replace)

    def mend(self, resident_bytes: int) -> bool:
        """Set the figure to the result of a scan if the file has none that can be read.

        A call that failed to read it is no proof: the figure counts what the scan did not see.
        """
        with self._lock:
            return self._update(lambda resident: resident_bytes if resident is None else None)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._update(self._without_owed)
                self._closed = True
                self._vfs.close_quietly(self._fd)

    def _update(self, change: Callable[[int | None], int | None], steps: int = 1) -> bool:
        """Replace the figure by ``change(figure)`` unless that is None; return whether it was."""
        self._failed.error = None
        if self._closed:
            return False
        try:
            how = fcntl.LOCK_EX | fcntl.LOCK_NB
            if not lock_patiently(LOCK_WAIT_S, self._vfs.flock, self._fd, how):
                return False
            try:
                record = _read(self._vfs, self._fd)
                if record is not None:
                    self._recorded_bytes, self.changes = record
                total = change(None if record is None else record[0])
                return total is not None and self._write(total, steps)
            finally:
                with contextlib.suppress(OSError):
                    self._vfs.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            self._failed.error = error
            return False

    def _write(self, resident: int, steps: int) -> bool:
        changes = (self.changes + steps) % _MOST  # a larger number could not be read again
        data = sealed(_RECORD.pack(_MAGIC, _VERSION, resident, changes))
        if self._vfs.pwritev(self._fd, [data], 0) != len(data):
            return False
        self._recorded_bytes, self._owed, self.changes = resident, 0, changes
        return True


def _read(vfs: Vfs, fd: int) -> tuple[int, int] | None:
    """Return resident bytes and changes; None if the record is damaged."""
    data = bytearray(_RECORD.size + SEAL_BYTES)
    if vfs.preadv(fd, [data], 0) != len(data) or data != sealed(bytes(data[: _RECORD.size])):
        return None
    magic, version, resident, changes = _RECORD.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    if not (0 <= resident < _MOST and changes < _MOST):
        return None  # its successor would not fit the record
    return int(resident), int(changes)
