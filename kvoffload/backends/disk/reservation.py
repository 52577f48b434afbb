"""The room of one store job: reserved for several chunks at once, handed out chunk by chunk."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable

from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.disk.space import Room, Space


class Reservation:
    """Reserves for the stores of one job as they begin. Thread-safe; never raises OSError.

    A reservation takes five system calls: two locks, a read and a write of the quota file, and the
    free space. One serves several chunks.
    """

    def __init__(self, space: Space, chunk_bytes: Iterable[int]) -> None:
        """Prepare; ``chunk_bytes``: the length of each chunk that the job will probably store."""
        self._space = space
        self._expected = Counter(chunk_bytes)
        self._rooms: defaultdict[int, list[Room]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, chunk_bytes: int, count: int) -> list[Room]:
        """Return room for up to so many chunks of this length, of one reservation.

        Another one, before these chunks are stored, would evict without counting them.
        """
        with self._lock:
            rooms = self._rooms[chunk_bytes]
            if not rooms:
                rooms += self._space.reserve(chunk_bytes, max(1, self._expected[chunk_bytes]))
                self._expected[chunk_bytes] -= len(rooms)
            # Places to overwrite come first: it costs less to give new room back.
            taken, rooms[:count] = rooms[:count], []
            return taken

    def give_back(self, chunk_bytes: int, rooms: Iterable[Room]) -> None:
        """Take back rooms that no store used, for those that follow."""
        with self._lock:
            self._rooms[chunk_bytes][:0] = rooms

    @property
    def is_used_up(self) -> bool:
        """Whether stores used all that was reserved."""
        return not any(self._rooms.values())

    def close(self) -> None:
        """Release what no store used. No store may follow."""
        for chunk_bytes, rooms in self._rooms.items():
            while rooms:
                self._space.cancel(bytes_on_disk(chunk_bytes), rooms.pop())
