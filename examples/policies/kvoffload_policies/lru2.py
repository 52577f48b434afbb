"""LRU-2 (E. O'Neil, P. O'Neil, G. Weikum: SIGMOD 1993)."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.policies.history import PinnedState

_HISTORY = 3
"""Evicted keys remembered, in capacities: with the residents, four capacities of keys."""


class LRU2Policy:
    """The key whose last but one use is the oldest leaves first; keys used once leave before.

    Keys used once leave in the order of that use, O(1). The other keys are in a heap. A heap entry
    goes stale when its key is used or removed: O(log n).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        self._now = 0
        self._once: OrderedDict[bytes, int] = OrderedDict()  # last use
        self._twice: dict[bytes, tuple[int, int]] = {}  # last but one use, last use
        self._heap: list[tuple[int, int, bytes]] = []
        self._evicted: OrderedDict[bytes, int] = OrderedDict()  # last use
        self._pinned: PinnedState[tuple[int | None, int]] = PinnedState(self.capacity)

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys into the order, with the uses remembered of them."""
        for key in keys:
            uses = self._pinned.pop(key, None)
            if uses is None:
                self._now += 1
                uses = self._evicted.pop(key, None), self._now
            before, last = uses
            if before is None:
                self._once[key] = last
            else:
                self._push(key, before, last)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of keys that are in the order or pinned."""
        for key in keys:
            if key in self._twice:
                self._now += 1
                self._push(key, self._twice[key][1], self._now)
            elif key in self._once:
                self._now += 1
                self._push(key, self._once.pop(key), self._now)
            elif key in self._pinned:
                self._now += 1
                self._pinned[key] = self._pinned[key][1], self._now

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order and remember their last two uses."""
        once, twice = self._once, self._twice
        uses = [(None, once.pop(key)) if key in once else twice.pop(key) for key in keys]
        self._pinned.keep(keys, uses)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take keys used once, then those whose last but one use is the oldest."""
        taken: list[bytes] = []
        for _ in range(min(count, len(self))):
            if self._once:
                key, last = self._once.popitem(last=False)
            else:
                key, last = self._pop()
            self._evicted[key] = last
            taken.append(key)
        while len(self._evicted) > _HISTORY * self.capacity:
            self._evicted.popitem(last=False)
        return taken

    def _push(self, key: bytes, before: int, last: int) -> None:
        self._twice[key] = before, last
        heapq.heappush(self._heap, (before, last, key))
        if len(self._heap) > 2 * len(self._twice) + 64:
            self._heap = [(before, last, key) for key, (before, last) in self._twice.items()]
            heapq.heapify(self._heap)

    def _pop(self) -> tuple[bytes, int]:
        while True:
            before, last, key = heapq.heappop(self._heap)
            if self._twice.get(key) == (before, last):
                del self._twice[key]
                return key, last

    def __len__(self) -> int:
        return len(self._once) + len(self._twice)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._twice
