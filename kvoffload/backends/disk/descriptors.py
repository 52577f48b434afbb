"""Descriptors of the files of segments: opened as they are used, a bounded number kept open."""

import contextlib
import errno
import os
import threading
import weakref
from collections import OrderedDict

from kvoffload.backends.disk.vfs import Vfs

MOST_KEPT = 64
"""So many descriptors stay open between two uses; a process may have 1,024 by default."""
_Key = tuple[str, bool]
"""Path, and whether it is open for direct I/O."""


class OpenFile:
    """An open file. It closes with the last reference to it, so a use keeps one."""

    def __init__(self, vfs: Vfs, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, vfs.close_quietly, fd).atexit = False


class Descriptors:
    """The least recently used one is closed first. Thread-safe."""

    def __init__(self, vfs: Vfs) -> None:
        """Open nothing yet."""
        self.vfs = vfs
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, OpenFile] = OrderedDict()
        self._is_closed = False

    def get(
        self, path: str, flags: int, *, direct: bool = False, to_read: bool = False
    ) -> OpenFile:
        """Return an open file, the same for all threads; raises OSError.

        ``to_read``: where the file system is read-only, it is open for that, and not kept.
        """
        key, kept = (path, direct), self._kept
        with contextlib.suppress(KeyError):  # each step is one for all threads
            opened = kept[key]
            kept.move_to_end(key)
            return opened
        try:
            opened = OpenFile(self.vfs, self.vfs.open(path, flags))  # on a dead disk it never ends
        except OSError as error:
            if not to_read or error.errno != errno.EROFS:
                raise
            return OpenFile(self.vfs, self.vfs.open(path, flags & ~(os.O_RDWR | os.O_CREAT)))
        if self._is_closed:
            return opened
        with self._lock:
            opened = kept.setdefault(key, opened)  # another thread may have been quicker
            surplus = [kept.popitem(last=False) for _ in range(len(kept) - MOST_KEPT)]
        del surplus  # closes files, without the lock
        return opened

    def drop(self, *paths: str) -> None:
        """Keep these files open no longer than a thread uses them."""
        with self._lock:
            keys = [(path, direct) for path in paths for direct in (False, True)]
            dropped = [self._kept.pop(key, None) for key in keys]
        del dropped

    def close(self) -> None:
        """Close all, those in use when their threads are done."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, OrderedDict()
        kept.clear()
