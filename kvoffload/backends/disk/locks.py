"""Locks of a root: each writer has a folder for temporary files, and a lock file in it.

The lock tells running writers from dead ones. Unlike a process number it works across containers,
and the kernel releases it with the process.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from kvoffload.backends.disk.chunk_file import continued
from kvoffload.backends.disk.paths import OWNER, WRITERS
from kvoffload.backends.disk.vfs import Vfs

_LOCK = "lock"
_NEW = "new-"
_UNCOUNTED = "small-"
"""Prefix of temporary files that the quota does not count."""
_NEW_S = 60
"""Longer than any process takes from making its folder to locking it."""
LOCK_WAIT_S, _PAUSE_S = 0.1, 0.001
_RECORD = struct.Struct("<8sQ")
_NO_WRITER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""It has ended, or the name is not a folder."""
_KNOWS_SLOTS = b"slots\n"
"""In the lock file of each writer that counts chunks in slots, with its bytes in flight; 0.1 leaves
the file empty."""


def open_locked(vfs: Vfs, path: str, flags: int, kind: int) -> int:
    """Open a file and lock it; raises OSError, as BlockingIOError if another process has it."""
    fd = vfs.open(path, flags)
    try:
        vfs.flock(fd, kind | fcntl.LOCK_NB)
    except BaseException:
        vfs.close_quietly(fd)
        raise
    return fd


def lock_patiently(wait_s: float, lock: Callable[..., None], *args: Any) -> bool:
    """Take a lock; return False after a while: a stopped process may hold it for ever.

    ``lock`` raises BlockingIOError while another process has it.
    """
    for _ in range(int(wait_s / _PAUSE_S)):
        try:
            lock(*args)
            return True
        except BlockingIOError:
            time.sleep(_PAUSE_S)
    return False


def is_at(vfs: Vfs, fd: int, path: str) -> bool:
    """Return whether an open file still has this name; True if that cannot be determined."""
    try:
        there, own = vfs.lstat(path), vfs.fstat(fd)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


class WriterLock:
    """This process's folder under ``.writers``."""

    def __init__(self, vfs: Vfs, root: str) -> None:
        self._vfs = vfs
        self._numbers = itertools.count()
        self._telling = threading.Lock()
        self._told_bytes = 0
        self.token = secrets.token_hex(8)
        self.folder = f"{root}/{WRITERS}/{self.token}"
        # Made and locked under a name that clean_up() ignores: it is never visible unlocked.
        new = f"{root}/{WRITERS}/{_NEW}{self.token}"
        vfs.mkdir(new)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove_quietly, vfs, new)
            fd = open_locked(vfs, f"{new}/{_LOCK}", os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            self._fd: int | None = fd
            undo.callback(vfs.close_quietly, fd)
            self.tell_in_flight(0)
            vfs.rename(new, self.folder)
            undo.pop_all()

    def is_gone(self) -> bool:
        fd = self._fd
        return fd is not None and not is_at(self._vfs, fd, f"{self.folder}/{_LOCK}")

    def tell_in_flight(self, allocated_bytes: int) -> None:
        """Tell other processes how many bytes of chunks this one moves; raises OSError.

        Never less, but up to twice as many: else each chunk that is done would cost a write.
        """
        with self._telling:  # a thread of a store that was closed may come late
            if self._fd is None or self._told_bytes // 2 < allocated_bytes <= self._told_bytes:
                return
            self._told_bytes = 0  # a write that is torn tells any number
            record = memoryview(_RECORD.pack(_KNOWS_SLOTS, allocated_bytes))
            if continued(self._vfs.pwritev, self._fd, [record], 0) != len(record):
                raise OSError(errno.EIO, os.strerror(errno.EIO), self.folder)
            self._told_bytes = allocated_bytes

    def temporary(self, *, counted: bool = True) -> str:
        """Return a new path for a file; ``counted``: the quota counts its bytes."""
        return f"{self.folder}/{'' if counted else _UNCOUNTED}{next(self._numbers)}"

    def close(self) -> None:
        _remove_quietly(self._vfs, self.folder)
        with self._telling:
            if self._fd is not None:
                self._vfs.close_quietly(self._fd)
                self._fd = None


class EvictorLock:
    """The right to evict under a root, held by one process until it ends."""

    def __init__(self, vfs: Vfs, root: str) -> None:
        self._vfs = vfs
        self._path = f"{root}/{OWNER}"
        self._fd: int | None = None
        self._moving = threading.Lock()
        self._has_ended = False

    @property
    def held(self) -> bool:
        return self._fd is not None

    def take(self) -> bool:
        """Take the lock if it is free; return whether this process has it."""
        with self._moving, contextlib.suppress(OSError):
            if self._fd is None and not self._has_ended:
                flags = os.O_RDWR | os.O_CREAT
                self._fd = open_locked(self._vfs, self._path, flags, fcntl.LOCK_EX)
        return self._fd is not None

    def is_gone(self) -> bool:
        return self._fd is not None and not is_at(self._vfs, self._fd, self._path)

    def close(self) -> None:
        with self._moving:
            if self._fd is not None:
                self._vfs.close_quietly(self._fd)
                self._fd = None

    def end(self) -> None:
        """Close the lock for good, though another thread may be about to take it again."""
        self._has_ended = True
        self.close()


def clean_up(vfs: Vfs, root: str, own: str) -> tuple[int, int]:
    """Remove the folders of dead writers; return the number of other live ones and bytes freed."""
    alive = freed = 0
    for folder in _folders(vfs, root, own):
        try:
            freed += clean_folder(vfs, folder)
        except BlockingIOError:
            alive += 1
        except OSError:
            continue  # undeletable: try again next time
    return alive, freed


def clean_folder(vfs: Vfs, folder: str) -> int:
    """Remove a dead writer's folder; return the counted bytes freed; BlockingIOError: it lives."""
    if _is_new(folder):
        # A process is making it, or left it half made or half removed: only its age tells.
        return _remove_quietly(vfs, folder) if is_older(vfs, folder, _NEW_S) else 0
    try:
        fd = _open_lock(vfs, folder, os.O_RDWR, fcntl.LOCK_EX)
    except FileNotFoundError:
        return _remove_quietly(vfs, folder)  # without its lock: its writer died removing it
    try:
        return _remove_folder(vfs, folder)
    except FileNotFoundError:
        return _remove_quietly(vfs, folder)  # another process removes it, too
    finally:
        vfs.close_quietly(fd)


def count_alive(vfs: Vfs, root: str, own: str = "") -> int:
    """Return how many writers but the own one are alive under a root; changes nothing."""
    return sum(is_locked(vfs, folder) is True for folder in _folders(vfs, root, own))


def has_older(vfs: Vfs, root: str) -> bool:
    """Return whether a writer is alive whose version does not know of slots."""
    for folder in _folders(vfs, root):
        with contextlib.suppress(OSError):
            if not vfs.lstat(f"{folder}/{_LOCK}").st_size and is_locked(vfs, folder):
                return True
    return False


def is_dead(vfs: Vfs, folder: str) -> bool:
    """Return whether :func:`clean_up` would remove a writer's folder."""
    is_new = _is_new(folder)
    return is_older(vfs, folder, _NEW_S) if is_new else is_locked(vfs, folder) is False


def is_locked(vfs: Vfs, folder: str, name: str = _LOCK) -> bool | None:
    """Return whether a process holds a lock, by default a writer's; None: unknown."""
    try:
        vfs.close_quietly(_open_lock(vfs, folder, os.O_RDONLY, fcntl.LOCK_SH, name))
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _open_lock(vfs: Vfs, folder: str, flags: int, kind: int, name: str = _LOCK) -> int:
    """Open and lock a lock file; raises OSError, also for a link as the folder."""
    if not stat.S_ISDIR(vfs.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    return open_locked(vfs, f"{folder}/{name}", flags, kind)


def bytes_in_flight(vfs: Vfs, root: str, own: str) -> int:
    """Return the bytes of chunks that other writers have reserved, or are removing.

    A writer of 0.1, and a dead one that evicted, told nothing: their files tell.

    Raises:
        OSError: a writer cannot be asked, and may move any number.
    """
    total = 0
    for folder in _folders(vfs, root, own):
        try:
            files = vfs.listfacts(folder)
            there = sum(facts.st_blocks * 512 for name, facts in files if name.isdigit())
            record = vfs.read_file(f"{folder}/{_LOCK}", _RECORD.size)
        except OSError as error:
            if error.errno not in _NO_WRITER:
                raise
            continue
        told = _RECORD.unpack(record)[1] if len(record) == _RECORD.size else 0
        total += max(told, there)
    return total


def _folders(vfs: Vfs, root: str, own: str = "") -> list[str]:
    """Return the folders of all writers but this one."""
    writers = f"{root}/{WRITERS}"
    return [f"{writers}/{token}" for token in vfs.listdir(writers) if token != own]


def _is_new(folder: str) -> bool:
    return os.path.basename(folder).startswith(_NEW)


def is_older(vfs: Vfs, path: str, seconds: float) -> bool:
    """Return whether a file's last change is longer ago; False if that cannot be determined."""
    try:
        return time.time() - vfs.lstat(path).st_mtime > seconds
    except OSError:
        return False


def _remove_quietly(vfs: Vfs, folder: str) -> int:
    """Remove a folder; the next process that opens the root removes what cannot be removed."""
    with contextlib.suppress(OSError):
        return _remove_folder(vfs, folder)
    return 0


def _remove_folder(vfs: Vfs, folder: str) -> int:
    freed = 0
    # The lock goes last: while it is there, another process can finish an interrupted removal.
    for name in sorted(vfs.listdir(folder), key=lambda name: name == _LOCK):
        path = f"{folder}/{name}"
        allocated = vfs.lstat(path).st_blocks * 512
        vfs.unlink(path)
        freed += allocated if name.isdigit() else 0
    vfs.rmdir(folder)
    return freed
