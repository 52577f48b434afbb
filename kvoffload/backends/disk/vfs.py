"""Every system call of the disk backend, in one place: the seam where tests put broken disks."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence

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
    """The operating system. Methods raise OSError, block, and are called from worker threads.

    After :meth:`enter` every path below the root is looked up from that folder's descriptor.
    A folder that gets the root's name later is not reached.
    """

    root_fd = -1
    """Descriptor of the root; -1: none is open."""
    _root = _below = "\0"
    """The root, and how the paths below it begin; no path begins with a NUL."""

    def enter(self, root: str, fd: int) -> None:
        """Look up paths below ``root`` from the folder open as ``fd``, which this then owns."""
        if self.root_fd < 0:
            self._root, self._below, self.root_fd = root, f"{root.rstrip('/')}/", fd
            _locked.add(fd)  # a forked child closes its copy
        else:
            # The number stays, so a thread that has just read it reaches a folder of ours.
            os.dup2(fd, self.root_fd, inheritable=False)
            self.close_quietly(fd)

    def leave(self) -> None:
        """Close the root's descriptor; from now on every path below the root fails."""
        fd, self.root_fd = self.root_fd, -1
        if fd >= 0:
            self.close_quietly(fd)

    def _at(self, path: str) -> tuple[str, int | None]:
        """A name and the descriptor of the folder from which the kernel looks it up."""
        if path.startswith(self._below):
            return path[len(self._below) :], self.root_fd
        return path, None

    def open(self, path: str, flags: int) -> int:
        """Open a file, new ones readable by the owner alone; links and pipes cause no wait."""
        name, at = self._at(path)
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=at)

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
        name, at = self._at(path)
        return os.stat(name, dir_fd=at, follow_symlinks=False)

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
        name, at = self._at(source)
        new_name, new_at = self._at(target)
        os.rename(name, new_name, src_dir_fd=at, dst_dir_fd=new_at)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        name, at = self._at(path)
        os.unlink(name, dir_fd=at)

    def unlink_quietly(self, path: str) -> None:
        """Remove a file if that is possible; whatever stays is cleaned up later."""
        with contextlib.suppress(OSError):
            self.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a folder for the owner alone."""
        name, at = self._at(path)
        os.mkdir(name, 0o700, dir_fd=at)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        name, at = self._at(path)
        os.rmdir(name, dir_fd=at)

    def listdir(self, path: str) -> list[str]:
        """Names in a folder, links not followed."""
        with self._folder(path) as fd:
            return os.listdir(fd)

    def listfacts(self, path: str) -> list[tuple[str, os.stat_result]]:
        """Names in a folder with the facts of each; those that vanish meanwhile are left out."""
        listed = []
        with self._folder(path) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    listed.append((entry.name, entry.stat(follow_symlinks=False)))
        return listed

    @contextlib.contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        name, at = (".", self.root_fd) if path == self._root else self._at(path)
        # Without O_DIRECTORY a link gives ELOOP, which tells it from a file.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=at)
        try:
            yield fd
        finally:
            os.close(fd)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Space of a file system."""
        return os.statvfs(self.root_fd if path == self._root else path)

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        """Set a file's times."""
        name, at = self._at(path)
        os.utime(name, ns=(atime_ns, mtime_ns), dir_fd=at, follow_symlinks=False)

    def flock(self, fd: int, operation: int) -> None:
        """Take or release an advisory lock, which a forked child does not inherit."""
        _locked.add(fd)
        fcntl.flock(fd, operation)
