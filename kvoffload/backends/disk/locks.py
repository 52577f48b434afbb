"""Who is alive: each process has a folder for its temporary files and a lock inside that says so.

A lock rather than a process number: it holds across containers, and the kernel drops it with the
process however it ends.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
import time

from kvoffload.backends.disk.paths import OWNER, WRITERS
from kvoffload.backends.disk.vfs import Vfs

_LOCK = "lock"
_UNBORN = "new-"
_UNBOOKED = "small-"
"""Before the number of a temporary file that the ledger does not count."""
_BIRTH_S = 60
"""Longer than any process takes from making its folder to locking it."""


class WriterLock:
    """This process's folder under ``.writers``."""

    def __init__(self, vfs: Vfs, root: str) -> None:
        self._vfs = vfs
        self._root = f"{root}/{WRITERS}"
        self._numbers = itertools.count()
        self._settle()

    def _settle(self) -> None:
        self.token = secrets.token_hex(8)
        folder = f"{self._root}/{self.token}"
        # Made and locked under a name that clean_up() ignores, so that it is never seen unlocked.
        unborn = f"{self._root}/{_UNBORN}{self.token}"
        self._vfs.mkdir(unborn)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove_quietly, self._vfs, unborn)
            self._fd = self._vfs.open(f"{unborn}/{_LOCK}", os.O_RDWR | os.O_CREAT)
            undo.callback(self._vfs.close_quietly, self._fd)
            self._vfs.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._vfs.rename(unborn, folder)
            undo.pop_all()
        self.folder = folder

    def is_gone(self) -> bool:
        """Whether somebody removed the folder."""
        return not is_at(self._vfs, self._fd, f"{self.folder}/{_LOCK}")

    def move(self) -> None:
        """Take a new folder in place of one that is gone; raises OSError if there can be none."""
        old = self._fd
        self._settle()
        self._vfs.close_quietly(old)

    def temporary(self, *, booked: bool = True) -> str:
        """A path no one else uses; ``booked``: for bytes that the ledger counts."""
        return f"{self.folder}/{'' if booked else _UNBOOKED}{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder and let go of the lock."""
        _remove_quietly(self._vfs, self.folder)
        self._vfs.close_quietly(self._fd)


class EvictorLock:
    """The right to evict under a root, held by one process until it ends."""

    def __init__(self, vfs: Vfs, root: str) -> None:
        self._vfs = vfs
        self._path = f"{root}/{OWNER}"
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process evicts."""
        return self._fd is not None

    def take(self) -> bool:
        """Become the owner if there is none; say whether this process is it now."""
        if self._fd is not None:
            return True
        fd = None
        try:
            fd = self._vfs.open(self._path, os.O_RDWR | os.O_CREAT)
            self._vfs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if fd is not None:
                self._vfs.close_quietly(fd)
            return False
        self._fd = fd
        return True

    def is_gone(self) -> bool:
        """Whether it is held by a lock on a file that somebody removed."""
        return self._fd is not None and not is_at(self._vfs, self._fd, self._path)

    def close(self) -> None:
        """Let someone else take it."""
        if self._fd is not None:
            self._vfs.close_quietly(self._fd)
            self._fd = None


def is_at(vfs: Vfs, fd: int, path: str) -> bool:
    """Whether an open file still has this name; True where that cannot be seen."""
    try:
        there, own = vfs.lstat(path), vfs.fstat(fd)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def clean_up(vfs: Vfs, root: str, own: str) -> tuple[int, int]:
    """Remove what dead writers left behind.

    Returns:
        The number of other writers alive, and the bytes freed.
    """
    alive = freed = 0
    for name in vfs.listdir(f"{root}/{WRITERS}"):
        if name == own:
            continue
        try:
            freed += clean_folder(vfs, f"{root}/{WRITERS}/{name}")
        except BlockingIOError:
            alive += 1
        except OSError:
            continue  # undeletable: try again next time
    return alive, freed


def clean_folder(vfs: Vfs, folder: str) -> int:
    """Remove the folder of a writer if that is dead; return the bytes freed of those booked.

    Raises:
        BlockingIOError: the writer lives.
        OSError: the folder cannot be removed.
    """
    if os.path.basename(folder).startswith(_UNBORN):
        return _remove_old(vfs, folder)
    fd = None
    try:
        fd = _open_lock(vfs, folder, os.O_RDWR)
        vfs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _remove_folder(vfs, folder)
    except FileNotFoundError:
        return _remove_quietly(vfs, folder)  # without its lock: half removed by the dead
    finally:
        if fd is not None:
            vfs.close_quietly(fd)


def count_alive(vfs: Vfs, root: str) -> int:
    """How many writers live under a root; changes nothing."""
    alive = 0
    for name in vfs.listdir(f"{root}/{WRITERS}"):
        try:
            fd = _open_lock(vfs, f"{root}/{WRITERS}/{name}", os.O_RDONLY)
        except OSError:
            continue
        try:
            vfs.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            alive += 1
        finally:
            vfs.close_quietly(fd)
    return alive


def is_dead(vfs: Vfs, folder: str) -> bool:
    """Whether a writer's folder is a leftover that :func:`clean_up` would remove."""
    if os.path.basename(folder).startswith(_UNBORN):
        return _is_old(vfs, folder)
    try:
        fd = _open_lock(vfs, folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        vfs.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        vfs.close_quietly(fd)


def _open_lock(vfs: Vfs, folder: str, flags: int) -> int:
    """Open the lock of a writer; raises OSError, also for a link in place of the folder."""
    if not stat.S_ISDIR(vfs.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    return vfs.open(f"{folder}/{_LOCK}", flags)


def temporary_bytes(vfs: Vfs, root: str, own: str) -> int:
    """Bytes that temporary files of other writers take up at this moment."""
    total = 0
    for token in vfs.listdir(f"{root}/{WRITERS}"):
        if token == own:
            continue
        try:
            for name in filter(str.isdigit, vfs.listdir(f"{root}/{WRITERS}/{token}")):
                total += vfs.lstat(f"{root}/{WRITERS}/{token}/{name}").st_blocks * 512
        except OSError:
            continue
    return total


def _remove_old(vfs: Vfs, folder: str) -> int:
    # Being made at this moment, or left half made or half removed: only age tells.
    return _remove_quietly(vfs, folder) if _is_old(vfs, folder) else 0


def _is_old(vfs: Vfs, folder: str) -> bool:
    try:
        return time.time() - vfs.lstat(folder).st_mtime > _BIRTH_S
    except OSError:
        return False


def _remove_quietly(vfs: Vfs, folder: str) -> int:
    """Remove a folder; whatever stays is for the next process that opens the root."""
    with contextlib.suppress(OSError):
        return _remove_folder(vfs, folder)
    return 0


def _remove_folder(vfs: Vfs, folder: str) -> int:
    freed = 0
    # The lock goes last: as long as it is there, whoever is interrupted can be followed up.
    for name in sorted(vfs.listdir(folder), key=lambda name: name == _LOCK):
        path = f"{folder}/{name}"
        allocated = vfs.lstat(path).st_blocks * 512
        vfs.unlink(path)
        freed += allocated if name.isdigit() else 0
    vfs.rmdir(folder)
    return freed
