"""Every system call of the disk backend, in one place: the seam where tests put broken disks."""

import contextlib
import fcntl
import os
from collections.abc import Sequence

Buffers = Sequence[bytes | bytearray | memoryview]

_locked: set[int] = set()
"""Descriptors of this process that carry, or may soon carry, a lock."""


def _let_go() -> None:
    """Close them in a forked child: a lock lasts as long as any process has its descriptor open.

    Otherwise the child would keep the folder of a dead parent occupied, and its ownership.
    """
    for fd in _locked:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


class Vfs:
    """The operating system. Methods raise OSError, block, and are called from worker threads."""

    def open(self, path: str, flags: int) -> int:
        """Open a file, new ones readable by the owner alone, links not followed."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        if fd in _locked:
            # A child forked at this moment has a copy: the lock must go, not this descriptor only.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            _locked.discard(fd)
        os.close(fd)

    def close_quietly(self, fd: int) -> None:
        """Close a descriptor; it is gone whatever this answers, and reads verify every byte."""
        with contextlib.suppress(OSError):
            self.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Facts of an open file."""
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        """Facts of a name, links not followed."""
        return os.lstat(path)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read into several buffers; may be short."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write from several buffers; may be short."""
        return os.pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Make a file or folder durable."""
        os.fsync(fd)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd)
        finally:
            self.close_quietly(fd)

    def rename(self, source: str, target: str) -> None:
        """Give a file its final name, replacing what had it."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def unlink_quietly(self, path: str) -> None:
        """Remove a file if that is possible; whatever stays is cleaned up later."""
        with contextlib.suppress(OSError):
            self.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a folder for the owner alone."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        """Names in a folder."""
        return os.listdir(path)

    def listfacts(self, path: str) -> list[tuple[str, os.stat_result]]:
        """Names in a folder with the facts of each; those that vanish meanwhile are left out."""
        listed = []
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    listed.append((entry.name, entry.stat(follow_symlinks=False)))
        return listed

    def statvfs(self, path: str) -> os.statvfs_result:
        """Space of a file system."""
        return os.statvfs(path)

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        """Set a file's times."""
        os.utime(path, ns=(atime_ns, mtime_ns), follow_symlinks=False)

    def flock(self, fd: int, operation: int) -> None:
        """Take or release an advisory lock, which a forked child does not inherit."""
        _locked.add(fd)
        fcntl.flock(fd, operation)
