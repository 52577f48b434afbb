"""Least recently used."""

from collections import OrderedDict
from collections.abc import Sequence


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
