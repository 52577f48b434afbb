"""Priorities over any policy: chunks of a lower priority leave first, whatever their use."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat

from kvoffload.policies.base import Policy

SHARE_ABOVE = 0.5
"""Of host memory: the most that chunks of priorities above 0 hold. They never age, so without
a limit one client could keep all of it."""
FURTHEST = 8
"""Priorities beyond this, above or below 0, count as this: each has an order of its own."""


class ByPriority:
    """A policy's order between orders of lesser and of greater chunks.

    Within a priority other than 0 the least recently used leaves first.

    Args:
        normal: orders the chunks of priority 0; may hold some already.
    """

    def __init__(self, normal: Policy) -> None:
        self._normal = normal
        # Of chunks in the order, or out of it for a while; 0 is not noted.
        self._priority: dict[bytes, int] = {}
        self._orders: dict[int, OrderedDict[bytes, None]] = {}
        self.num_above = 0
        """Chunks of a priority above 0."""

    @property
    def marked(self) -> Collection[bytes]:
        """The chunks that have a priority other than 0."""
        return self._priority.keys()

    def mark(self, keys: Iterable[bytes], priority: int) -> None:
        """Give chunks that have none, and are not in the order, a priority."""
        if priority:
            priority = max(-FURTHEST, min(FURTHEST, priority))
            before = len(self._priority)
            self._priority.update(dict.fromkeys(keys, priority))
            if priority > 0:
                self.num_above += len(self._priority) - before

    def forget(self, keys: Iterable[bytes]) -> None:
        """Chunks that are not in the order any more will not come back with their priority.

        Neither ``remove`` nor ``victims`` says that: what was pinned or spared is added again.
        """
        if self._priority:
            gone = map(self._priority.pop, keys, repeat(0))
            self.num_above -= sum(priority > 0 for priority in gone)

    def _order_of(self, key: bytes, priority: int) -> OrderedDict[bytes, None] | None:
        order = self._orders.get(priority)
        return order if order is not None and key in order else None

    def _special(self, key: object) -> OrderedDict[bytes, None] | None:
        """Return the order a chunk is in if that is not the normal one."""
        if not isinstance(key, bytes) or key not in self._priority:
            return None
        return self._order_of(key, self._priority[key])

    def add(self, key: bytes) -> None:
        """See :meth:`Policy.add`."""
        priority = self._priority.get(key)
        if priority is None:
            self._normal.add(key)
        else:
            order = self._orders.setdefault(priority, OrderedDict())
            order[key] = None
            order.move_to_end(key)

    def touch(self, key: bytes) -> None:
        """See :meth:`Policy.touch`."""
        order = self._special(key)
        if order is None:
            self._normal.touch(key)
        else:
            order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """See :meth:`Policy.remove`."""
        order = self._special(key)
        if order is None:
            self._normal.remove(key)
        else:
            del order[key]

    def victims(self, count: int) -> Sequence[bytes]:
        """See :meth:`Policy.victims`."""
        taken: list[bytes] = []
        priorities = sorted(self._orders)
        for priority in [p for p in priorities if p < 0]:
            self._take(priority, count, taken)
        taken.extend(self._normal.victims(count - len(taken)))
        for priority in [p for p in priorities if p > 0]:
            self._take(priority, count, taken)
        return taken

    def _take(self, priority: int, count: int, taken: list[bytes]) -> None:
        order = self._orders[priority]
        while order and len(taken) < count:
            taken.append(order.popitem(last=False)[0])
        if not order:
            del self._orders[priority]

    def __len__(self) -> int:
        return len(self._normal) + sum(map(len, self._orders.values()))

    def __contains__(self, key: object) -> bool:
        return self._special(key) is not None or key in self._normal

    def clear(self) -> None:
        """See :meth:`Policy.clear`."""
        self._normal.clear()
        self._orders.clear()
        self._priority.clear()
        self.num_above = 0
