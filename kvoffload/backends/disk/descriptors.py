"""Descriptors of the files of segments: opened as they are used, a bounded number kept open."""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator

from kvoffload.backends.disk.vfs import Vfs

MOST_IDLE = 64
"""So many descriptors stay open that no thread uses; a process may have 1,024 by default."""
_Key = tuple[str, bool]
"""Path, and whether it is open for direct I/O."""


class _Open:
    """One descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.is_dropped = False
        """Whether the last user closes it."""


class Descriptors:
    """The least recently used one closes first. Thread-safe."""

    def __init__(self, vfs: Vfs) -> None:
        """Open nothing yet."""
        self.vfs = vfs
        self._lock = threading.Lock()
        self._open: OrderedDict[_Key, _Open] = OrderedDict()
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _close_all, vfs, self._open)
        self._finalizer.atexit = False

    @contextlib.contextmanager
    def use(self, path: str, flags: int, *, direct: bool = False) -> Iterator[int]:
        """Lend a descriptor of a file, the same for all threads; raises OSError."""
        key = path, direct
        opened = self._take(key, None)
        if opened is None:  # without the lock: on a dead disk it never ends
            opened = self._take(key, self.vfs.open(path, flags))
        assert opened is not None
        try:
            yield opened.fd
        finally:
            with self._lock:
                opened.users -= 1
                surplus = self._surplus()
                if opened.is_dropped and not opened.users:
                    surplus.append(opened.fd)
            self._close(surplus)

    def _take(self, key: _Key, new_fd: int | None) -> _Open | None:
        """Return what is open, or else what has just been opened, with one more user."""
        surplus = []
        with self._lock:
            opened = self._open.get(key)
            if opened is None and new_fd is not None:
                opened = _Open(new_fd)
                opened.is_dropped = self._is_closed
                if not self._is_closed:
                    self._open[key] = opened
            elif new_fd is not None:
                surplus.append(new_fd)  # another thread was quicker
            if opened is not None:
                opened.users += 1
                if not opened.is_dropped:
                    self._open.move_to_end(key)
        self._close(surplus)
        return opened

    def _surplus(self) -> list[int]:
        """Take out the least recently used ones that no thread uses."""
        surplus = []
        if len(self._open) > MOST_IDLE:
            for key, each in list(self._open.items())[:-MOST_IDLE]:
                if not each.users:
                    surplus.append(self._open.pop(key).fd)
        return surplus

    def _close(self, fds: list[int]) -> None:
        for fd in fds:
            self.vfs.close_quietly(fd)

    def drop(self, *paths: str) -> None:
        """Close all descriptors of these files once no thread uses them."""
        with self._lock:
            dropped = [self._open.pop(key) for key in list(self._open) if key[0] in paths]
            for each in dropped:
                each.is_dropped = True
            idle = [each.fd for each in dropped if not each.users]
        self._close(idle)

    def close(self) -> None:
        """Close all, those in use when their threads are done."""
        with self._lock:
            self._is_closed = True
            paths = {path for path, _ in self._open}
        self.drop(*paths)
        self._finalizer.detach()  # it holds the store, by the file system

    def disown(self) -> None:
        """Leave all open: in a forked child, their numbers may be those of other files."""
        self._finalizer.detach()
        self._open.clear()


def _close_all(vfs: Vfs, opened: OrderedDict[_Key, _Open]) -> None:
    for each in opened.values():
        vfs.close_quietly(each.fd)
