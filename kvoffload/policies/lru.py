"""Least recently used."""

from collections import deque
from collections.abc import Sequence
from itertools import repeat

from kvoffload.policies.ordered_queue import OrderedQueue


class LRUPolicy:
    """The key used longest ago leaves first; every operation is O(1), amortised."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        self._queue = OrderedQueue(self.capacity)
        self._table = self._queue.keys

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the recent end."""
        self._table.update(zip(keys, repeat(0)))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Move keys of the order to the recent end."""
        table = self._table
        if not table.keys().isdisjoint(keys):
            for key in filter(table.__contains__, keys):
                del table[key]
                table[key] = 0

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order."""
        deque(map(self._table.pop, keys), maxlen=0)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the least recently used keys."""
        return self._queue.pop(count)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table
