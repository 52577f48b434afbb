"""Priorities over any policy: chunks of a lower priority leave first, however they were used."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

from kvoffload.policies.base import Policy

SHARE_ABOVE = 0.5
"""Of host memory: the most that chunks of priorities above 0 take. They never age, so without
a limit one client could occupy all of it."""
FURTHEST = 8
"""A priority further from 0 counts as this one: each priority has an order of its own."""


class PriorityPolicy:
    """A policy between orders of lesser and of greater priorities; a policy itself.

    Chunks of priority 0 are in the wrapped policy. Within any other priority the least recently
    used chunk leaves first. While no chunk has a priority, each call is one call of the policy.

    Args:
        normal: orders the chunks of priority 0.
    """

    def __init__(self, normal: Policy) -> None:
        self.normal = normal
        # Of chunks in the order, or pinned, or being stored; 0 is not noted.
        self._priority: dict[bytes, int] = {}
        self._orders: dict[int, OrderedDict[bytes, None]] = {}
        self.num_above = 0
        """Chunks of a priority above 0."""

    def mark(self, keys: Iterable[bytes], priority: int) -> None:
        """Give chunks a priority; none has one or is in the order."""
        if priority:
            priority = max(-FURTHEST, min(FURTHEST, priority))
            before = len(self._priority)
            self._priority.update(dict.fromkeys(keys, priority))
            if priority > 0:
                self.num_above += len(self._priority) - before

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the priorities of chunks that left the cache for good.

        ``remove`` and ``victims`` do not: a pinned or protected chunk is added again.
        """
        if self._priority:
            gone = map(self._priority.pop, keys, repeat(0))
            self.num_above -= sum(priority > 0 for priority in gone)

    def _split(self, keys: Sequence[bytes]) -> tuple[Sequence[bytes], list[tuple[bytes, int]]]:
        """Return the keys of priority 0, and the other keys with their priority."""
        if not self._priority:
            return keys, []
        priorities = list(map(self._priority.get, keys, repeat(0)))
        pairs = list(zip(keys, priorities, strict=True))
        return [key for key, at in pairs if not at], [pair for pair in pairs if pair[1]]

    def add(self, keys: Sequence[bytes]) -> None:
        normal, special = self._split(keys)
        if normal:
            self.normal.add(normal)
        for key, priority in special:
            self._orders.setdefault(priority, OrderedDict())[key] = None

    def touch(self, keys: Sequence[bytes]) -> None:
        if not self._orders:
            self.normal.touch(keys)
            return
        absent: OrderedDict[bytes, None] = OrderedDict()
        normal: list[bytes] = []
        for key in keys:
            order = self._orders.get(self._priority.get(key, 0), absent)
            if key in order:
                order.move_to_end(key)
            else:
                normal.append(key)
        if normal:
            self.normal.touch(normal)

    def remove(self, keys: Sequence[bytes]) -> None:
        normal, special = self._split(keys)
        if normal:
            self.normal.remove(normal)
        for key, priority in special:
            del self._orders[priority][key]

    def victims(self, count: int) -> Sequence[bytes]:
        if not self._orders:
            return self.normal.victims(count)
        taken: list[bytes] = []
        priorities = sorted(self._orders)
        for priority in priorities:
            if priority < 0:
                self._take(priority, count, taken)
        taken.extend(self.normal.victims(count - len(taken)))
        for priority in priorities:
            if priority > 0:
                self._take(priority, count, taken)
        return taken

    def _take(self, priority: int, count: int, taken: list[bytes]) -> None:
        order = self._orders[priority]
        while order and len(taken) < count:
            taken.append(order.popitem(last=False)[0])
        if not order:
            del self._orders[priority]

    def __len__(self) -> int:
        return len(self.normal) + sum(map(len, self._orders.values()))

    def __contains__(self, key: object) -> bool:
        return key in self.normal or any(key in order for order in self._orders.values())

    def clear(self) -> None:
        self.normal.clear()
        self._orders.clear()
        self._priority.clear()
        self.num_above = 0
