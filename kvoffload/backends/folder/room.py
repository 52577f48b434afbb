"""How much one process may store before the evictor has answered.

The evictor counts what all processes say they stored, and sets each of them a limit. So the
capacity holds although no two hosts share a lock or a counter.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Set

from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.folder import clock

_OUT_OF_SPACE = ("io_ENOSPC", "io_EDQUOT")
_MOST_NEW = 1 << 16
"""Files that a listing can skip; it counts later ones twice, which costs hits until the next."""


class Room:
    """Bytes that this process has stored, and those it may store. Thread-safe; does no I/O.

    Args:
        wake: called when the evictor should hear of this process soon; returns at once.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._resident_bytes: int | None = None
        self._counted_bytes = self._half_bytes = 0
        self._new: set[tuple[str, bytes]] = set()
        self._writing: Counter[tuple[str, bytes]] = Counter()
        """Bytes of the chunks that are being written: a listing may not see their files."""
        self.stored_bytes = 0
        """Since the start: of chunks, and of those being written."""
        self.limit_bytes = 0
        """What ``stored_bytes`` may become, while this process's record is young."""
        self._until_s = 0.0
        self.largest_bytes = 0
        """Of one file."""
        self.out_of_space = 0
        """How many stores the mount refused because it, or a quota of it, is full."""

    def reserve(self, chunk_bytes: int, file: tuple[str, bytes]) -> bool:
        """Count a chunk that is about to be written; return False if there is no room.

        ``file``: its namespace's folder, and its key.
        """
        size = bytes_on_disk(chunk_bytes)
        with self._lock:
            self.largest_bytes = max(self.largest_bytes, size)
            has_room = self.stored_bytes + size <= self.limit_bytes and self.is_known
            if has_room:
                self.stored_bytes += size
                self._writing[file] += size
                if len(self._new) < _MOST_NEW:
                    self._new.add(file)
            is_short = not has_room or self.stored_bytes > self._half_bytes
        if is_short:
            self._wake()
        return has_room

    def fitting(self, sizes: Iterable[int]) -> int:
        """Return how many files of these sizes there is room for, in their order."""
        fitting = 0
        with self._lock:
            left = max(0, self.limit_bytes - self.stored_bytes) if self.is_known else 0
            for size in sizes:
                # The evictor makes room by it, also where no file of this size was begun yet.
                self.largest_bytes = max(self.largest_bytes, size)
                left -= size
                if left < 0:
                    break
                fitting += 1
        if not fitting:
            self._wake()
        return fitting

    @property
    def is_known(self) -> bool:
        """Whether this process's record is so young that the evictor counts with it."""
        return clock.now_s() < self._until_s

    def written(self, chunk_bytes: int, file: tuple[str, bytes]) -> None:
        """Note that the file of a chunk has its name."""
        with self._lock:
            self._end(chunk_bytes, file)

    def _end(self, chunk_bytes: int, file: tuple[str, bytes]) -> None:
        self._writing[file] -= bytes_on_disk(chunk_bytes)
        if self._writing[file] <= 0:
            del self._writing[file]

    def release(self, chunk_bytes: int, reason: str, file: tuple[str, bytes]) -> None:
        """Count a chunk no more that was not written, for this reason."""
        with self._lock:
            self._end(chunk_bytes, file)
            self._new.discard(file)  # a file of this name is another host's
            self.stored_bytes = max(0, self.stored_bytes - bytes_on_disk(chunk_bytes))
            self.out_of_space += reason in _OUT_OF_SPACE
        if reason in _OUT_OF_SPACE:
            self._wake()

    def told(self, began_s: float, valid_s: float) -> None:
        """Take in that this process's record was written, by calls that began at this moment.

        The evictor reserves what the limit leaves while the record is younger than ``valid_s``.
        Afterwards other processes get it: a process that was stopped waits for a limit of now.
        """
        with self._lock:
            if clock.now_s() > self._until_s:
                self.limit_bytes = 0
            self._until_s = began_s + valid_s

    def listed(self) -> tuple[int, Set[tuple[str, bytes]]]:
        """Return the bytes written before a listing, and what is not in them: it grows."""
        with self._lock:
            self._new = set(self._writing)
            return max(0, self.stored_bytes - self._writing.total()), self._new

    def limit(self, limit_bytes: int, counted_bytes: int, resident_bytes: int | None) -> None:
        """Take in the limit, and what the evictor has counted: of this process, and of all.

        In one step: else a store that waits could count with the new limit and the old files.
        """
        with self._lock:
            self._counted_bytes, self.limit_bytes = counted_bytes, limit_bytes
            self._resident_bytes = resident_bytes
            self._half_bytes = (limit_bytes + counted_bytes) // 2

    def give_up(self) -> None:
        """Store no more until there is a limit again: other processes need what is reserved."""
        with self._lock:
            self.limit_bytes = 0

    def restart(self) -> None:
        """Begin to count again: the evictor has forgotten this process."""
        with self._lock:
            self.stored_bytes = self.limit_bytes = self._counted_bytes = self._half_bytes = 0
            self._resident_bytes = None

    @property
    def used_bytes(self) -> int | None:
        """Bytes under the root: those that the evictor counted, and this process's other ones.

        None until they are counted, once.
        """
        with self._lock:
            if self._resident_bytes is None:
                return None
            return self._resident_bytes + max(0, self.stored_bytes - self._counted_bytes)
