"""Least recently used."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import repeat


class LRUPolicy:
    """The key used longest ago leaves first; every operation is O(1)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:
        """Put a key at the recent end."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: bytes) -> None:
        """Move an idle key to the recent end; others are ignored."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Take a key out of the order."""
        self._order.pop(key, None)

    def add_all(self, keys: Iterable[bytes]) -> None:
        """Add keys, none of which is in the order, without a Python step for each."""
        deque(map(self._order.__setitem__, keys, repeat(None)), maxlen=0)

    def remove_all(self, keys: Iterable[bytes]) -> None:
        """Take out keys, all of which are in the order."""
        deque(map(self._order.__delitem__, keys), maxlen=0)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the ``count`` least recently used keys."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(min(count, len(self._order)))]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
