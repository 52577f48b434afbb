"""Least recently used."""

from collections.abc import Sequence

from kvoffload.policies.ordered_queue import OrderedQueue


class LRUPolicy:
    """The key used longest ago leaves first; every operation is O(1), amortised."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        self._queue = OrderedQueue(self.capacity)

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the recent end."""
        self._queue.put(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Move keys of the order to the recent end."""
        order, stamp = self._queue.keys, self._queue.stamp
        if order.keys().isdisjoint(keys):
            return
        for key in keys:
            if key in order:
                del order[key]
                order[key] = stamp

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order."""
        self._queue.discard(keys)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the least recently used keys."""
        return self._queue.pop(count)

    def __len__(self) -> int:
        return len(self._queue.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._queue.keys
