"""Every system call of the disk backend, in one place: the seam where tests inject faults."""

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence

from kvoffload.backends.disk import file_calls

Buffers = Sequence[bytes | bytearray | memoryview]

_PIECE_BYTES = 16 << 20


class Vfs:
    """The operating system. Methods raise OSError, block, and run on worker threads.

    After :meth:`enter` the kernel resolves every path below the root from the root's descriptor.
    A folder that later takes the root's name is not reached.
    """

    fstat = staticmethod(os.fstat)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    set_length = staticmethod(os.ftruncate)
    fsync = staticmethod(os.fsync)
    is_cached = staticmethod(file_calls.is_cached)
    open_cached = staticmethod(file_calls.open_cached)
    known_identity = staticmethod(file_calls.known_identity)
    punch = staticmethod(file_calls.punch)
    bypass_cache = staticmethod(file_calls.bypass)
    start_writeback = staticmethod(file_calls.start_writeback)
    known_bytes = staticmethod(file_calls.known_bytes)

    def __init__(self) -> None:
        self.root_fd = -1
        """Descriptor of the root; -1: none is open."""
        self._root = self._below = "\0"
        """The root, and the prefix of all paths below it; no path begins with a NUL."""
        self._locked: set[int] = set()
        """Descriptors that carry, or may soon carry, a lock."""
        self._is_left = False
        """Whether this is a forked child, where a number may be that of another file."""
        self.on_fork: Callable[[], None] = lambda: None
        """Called in a forked child."""
        _instances.add(self)

    def leave_in_child(self) -> None:
        """Close every lock in a forked child: a lock lasts until each copy of it is closed.

        An open copy would keep the folder of a dead parent occupied, and its right to evict.
        """
        for fd in self._locked:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._locked.clear()
        self.root_fd = -1
        self._is_left = True
        self.on_fork()

    def enter(self, root: str, fd: int) -> None:
        """Resolve paths below ``root`` from its open descriptor ``fd``, and own the descriptor."""
        if self.root_fd < 0:
            self._root, self._below, self.root_fd = root, f"{root.rstrip('/')}/", fd
            self._locked.add(fd)  # a forked child closes its copy
        else:
            # The number stays the same, so a thread that has just read it reaches a valid folder.
            os.dup2(fd, self.root_fd, inheritable=False)
            self.close_quietly(fd)

    def leave(self) -> None:
        fd, self.root_fd = self.root_fd, -1
        if fd >= 0:
            self.close_quietly(fd)

    def _at(self, path: str) -> tuple[str, int | None]:
        """Return a name and the descriptor of the folder from which the kernel resolves it."""
        if path.startswith(self._below):
            return path[len(self._below) :], self.root_fd
        return path, None

    def open(self, path: str, flags: int) -> int:
        """Open a file, new ones readable by the owner alone; links and pipes cause no wait."""
        name, at = self._at(path)
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, 0o600, dir_fd=at)

    @contextlib.contextmanager
    def file(self, path: str, flags: int) -> Iterator[int]:
        """Open a file as :meth:`open` does, for a while."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close_quietly(fd)

    @contextlib.contextmanager
    def scratch(self, path: str, flags: int = 0) -> Iterator[int]:
        """Make a file for a while."""
        with self.file(path, os.O_RDWR | os.O_CREAT | flags) as fd:
            try:
                yield fd
            finally:
                self.unlink_quietly(path)

    @staticmethod
    def read_cached(fd: int, buffers: Buffers, offset: int) -> int:
        """Read what the page cache has; BlockingIOError: nothing at this place."""
        return os.preadv(fd, buffers, offset, os.RWF_NOWAIT)

    def close(self, fd: int) -> None:
        if self._is_left:
            return
        if fd in self._locked:
            # A child forked at this moment has a copy: release the lock, not only the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            self._locked.discard(fd)
        os.close(fd)

    def close_quietly(self, fd: int) -> None:
        """Close a descriptor and ignore errors: it is closed anyway, and loads verify bytes."""
        with contextlib.suppress(OSError):
            self.close(fd)

    def lstat(self, path: str) -> os.stat_result:
        name, at = self._at(path)
        return os.stat(name, dir_fd=at, follow_symlinks=False)

    def read_file(self, path: str, most_bytes: int) -> bytearray:
        """Return the content of a file; raise OSError (EFBIG) for a larger file."""
        with self.file(path, os.O_RDONLY) as fd:
            size = self.fstat(fd).st_size
            if size > most_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            data, done = bytearray(size), 0
            while done < size and (moved := self.preadv(fd, [memoryview(data)[done:]], done)) > 0:
                done += moved
        return data if done == size else data[:done]

    def replace_file(self, path: str, temporary: str, data: bytes) -> None:
        """Replace a file as a whole by way of ``temporary``; an OSError leaves the old file."""
        fd = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                self._fill(fd, data)
            except BaseException:
                self.close_quietly(fd)
                raise
            self.close(fd)  # some mounts tell only now that they are full
            self.rename(temporary, path)
        except OSError:
            self.unlink_quietly(temporary)
            raise

    def _fill(self, fd: int, data: bytes) -> None:
        rest, done = memoryview(data), 0
        while done < len(data):
            moved = self.pwritev(fd, [rest[done : done + _PIECE_BYTES]], done)
            if moved <= 0:
                raise OSError(errno.EIO, "short write")
            done += moved

    def sync(self, path: str) -> None:
        """Make a file, or the names in a folder, durable."""
        with self.file(path, os.O_RDONLY) as fd:
            self.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        name, at = self._at(source)
        new_name, new_at = self._at(target)
        os.rename(name, new_name, src_dir_fd=at, dst_dir_fd=new_at)

    def unlink(self, path: str) -> None:
        name, at = self._at(path)
        os.unlink(name, dir_fd=at)

    def unlink_quietly(self, path: str) -> None:
        """Remove a file if possible; a later clean-up removes the rest."""
        with contextlib.suppress(OSError):
            self.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a folder for the owner alone."""
        name, at = self._at(path)
        os.mkdir(name, 0o700, dir_fd=at)

    def make_folder(self, path: str, *, durable: bool = False) -> None:
        """Make a folder unless it exists; ``durable``: the folder survives a power loss."""
        try:
            self.mkdir(path)
        except FileExistsError:
            return
        if durable:
            try:
                self.sync(os.path.dirname(path))
            except OSError:
                # A process that finds the folder takes it for durable: do not leave it.
                with contextlib.suppress(OSError):
                    self.rmdir(path)
                raise

    def rmdir(self, path: str) -> None:
        name, at = self._at(path)
        os.rmdir(name, dir_fd=at)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, links not followed."""
        with self._folder(path) as fd:
            return os.listdir(fd)

    def listfacts(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names in a folder with their facts; skip those removed meanwhile."""
        with self._folder(path) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)

    @contextlib.contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        name, at = (".", self.root_fd) if path == self._root else self._at(path)
        # Without O_DIRECTORY a link fails with ELOOP, a file with ENOTDIR.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=at)
        try:
            yield fd
        finally:
            os.close(fd)

    def allocated_below(self, path: str) -> int:
        """Return the bytes allocated to the files below a folder, links not followed."""
        name, at = self._at(path)
        total = 0
        for _, _, files, fd in os.fwalk(name, dir_fd=at):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(file, dir_fd=fd, follow_symlinks=False).st_blocks * 512
        return total

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it, links not followed."""
        name, at = self._at(path)
        shutil.rmtree(name, dir_fd=at)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(self.root_fd if path == self._root else path)

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        name, at = self._at(path)
        os.utime(name, ns=(atime_ns, mtime_ns), dir_fd=at, follow_symlinks=False)

    @staticmethod
    def lock_part(fd: int, kind: int, offset: int, length: int) -> None:
        """Take or release a lock of a part of a file: one of the open file, not of the process."""
        if not hasattr(fcntl, "F_OFD_SETLK"):  # only Linux has it
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        part = struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, length, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, part)

    def flock(self, fd: int, operation: int) -> None:
        """Take or release an advisory lock; a forked child does not inherit it."""
        self._locked.add(fd)
        fcntl.flock(fd, operation)


_instances: "weakref.WeakSet[Vfs]" = weakref.WeakSet()
"""The interpreter offers no other way to tell a forked child of its descriptors."""


def _leave_all_in_child() -> None:
    for vfs in list(_instances):
        vfs.leave_in_child()


os.register_at_fork(after_in_child=_leave_all_in_child)
