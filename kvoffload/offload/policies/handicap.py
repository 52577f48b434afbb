"""LRU with a handicap on what was seen once or twice, set by small shadow caches."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar
from zlib import crc32

from kvoffload.offload.policies.history import Away, SeenFilter

HANDICAPS: tuple[tuple[float, float], ...] = ((0, 0), (1, 0), (4, 0.25), (64, 4))
"""What is chosen from: how much older a key counts if it was seen once, or twice; in capacities.

The first is LRU. The last gives up every key seen once before any other, much like LRU-2.
"""
_START = 1
_SHADOW_ENTRIES = 1024
_LEAST_RATE = 8
_TICKS = 256
_TICKS_A_ROUND = 16
_ROUNDS_REMEMBERED = 64
_ADVANTAGE = 1.01
_HISTORY = 2.7


_Name = TypeVar("_Name", bytes, int)


class _Order(Generic[_Name]):
    """Keys seen once, twice, more often: three queues, each in the order of last use."""

    __slots__ = ("handicaps", "queues")

    def __init__(self) -> None:
        self.queues: tuple[OrderedDict[_Name, int], ...] = tuple(OrderedDict() for _ in range(3))
        self.handicaps = (0, 0, 0)

    def find(self, key: object) -> int | None:
        """Return the queue a key is in."""
        once, twice, more = self.queues
        if key in more:
            return 2
        if key in once:
            return 0
        return 1 if key in twice else None

    def oldest(self) -> int:
        """Return the queue whose head counts as the oldest; one of them has a head."""
        ages = [
            (next(iter(queue.values())) - handicap, at)
            for at, (queue, handicap) in enumerate(zip(self.queues, self.handicaps, strict=True))
            if queue
        ]
        return min(ages)[1]


class _Shadow(_Order[int]):
    """A small cache of sampled checksums that shows what its handicaps would have hit."""

    __slots__ = ("capacity", "hits")

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.hits = 0.0

    def use(self, checksum: int, queue: int, now: int) -> None:
        """Count a use of a key that belongs in ``queue``."""
        queues = self.queues
        found = self.find(checksum)
        if found is None:
            if sum(map(len, queues)) >= self.capacity:
                queues[self.oldest()].popitem(last=False)
            queues[queue][checksum] = now
            return
        self.hits += 1
        if found == 2:
            queues[2][checksum] = now
            queues[2].move_to_end(checksum)
        else:
            del queues[found][checksum]
            queues[found + 1][checksum] = now


class HandicapPolicy:
    """The key that counts as the oldest leaves first.

    A key's age is the number of uses, of any keys, since its own last one. If it was seen only once
    (or only twice) a handicap is added: much under scans and one-time prompts, none where
    recency is all that matters. Four shadow caches, fed with the same small sample of keys, try one
    set of handicaps each; the order takes over that of the shadow which hit most of late. A filter
    remembers how often evicted keys had been seen.

    Every operation is O(1). Decisions depend on keys and calls alone, not on time or chance.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        entries = max(1, capacity)
        rate = max(_LEAST_RATE, entries // _SHADOW_ENTRIES)
        # A clock of few ticks lets thousands of keys share one int object as their last use.
        self._uses_a_tick = max(1, entries // _TICKS)
        self._uses_left = self._uses_a_tick
        self._now = 0
        self._order: _Order[bytes] = _Order()
        self._away: Away[int] = Away(entries)  # notes the queue
        self._seen = SeenFilter(round(_HISTORY * entries))
        self._rate = rate
        self._shadows = tuple(_Shadow(max(1, entries // rate)) for _ in HANDICAPS)
        for shadow, (once, twice) in zip(self._shadows, HANDICAPS, strict=True):
            ticks = entries / self._uses_a_tick
            shadow.handicaps = (round(once * ticks), round(twice * ticks), 0)
        self._chosen = self._shadows[_START]
        self._order.handicaps = self._chosen.handicaps

    @property
    def handicaps(self) -> tuple[float, float]:
        """The handicaps in force; one of :data:`HANDICAPS`."""
        return HANDICAPS[self._shadows.index(self._chosen)]

    def add(self, key: bytes) -> None:
        """Put a key at the recent end of the queue it belongs to."""
        queue = self._away.pop(key, None) if self._away else None
        if queue is None:
            queue = self._order.find(key)
        if queue is None:
            checksum = crc32(key)
            queue = self._seen.recall(checksum)
            self._used(checksum, queue)
        self._order.queues[queue][key] = self._now
        self._order.queues[queue].move_to_end(key)

    def touch(self, key: bytes) -> None:
        """Count a use of a key that is idle or pinned."""
        queues = self._order.queues
        found = self._order.find(key)
        if found is None:
            if key not in self._away:
                return
            queue = self._away[key] = min(2, self._away[key] + 1)
        elif found == 2:
            queue = 2
            queues[2][key] = self._now
            queues[2].move_to_end(key)
        else:
            queue = found + 1
            del queues[found][key]
            queues[queue][key] = self._now
        self._used(crc32(key), queue)

    def remove(self, key: bytes) -> None:
        """Take a key out of the order, remembering how often it was seen."""
        found = self._order.find(key)
        if found is not None:
            del self._order.queues[found][key]
            self._away.keep(key, found)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the keys that count as the oldest."""
        order, note = self._order, self._seen.note
        taken: list[bytes] = []
        for _ in range(min(count, len(self))):
            queue = order.oldest()
            key = order.queues[queue].popitem(last=False)[0]
            note(crc32(key), queue > 0)
            taken.append(key)
        return taken

    def _used(self, checksum: int, queue: int) -> None:
        """Let time pass and the shadows see the use, if this key is one of the sample."""
        if checksum % self._rate == 0:
            for shadow in self._shadows:
                shadow.use(checksum, queue, self._now)
        self._uses_left -= 1
        if not self._uses_left:
            self._uses_left = self._uses_a_tick
            self._now += 1
            if self._now % _TICKS_A_ROUND == 0:
                self._choose()

    def _choose(self) -> None:
        """Take over the handicaps of the shadow that hit most, if it is clearly ahead."""
        best = max(self._shadows, key=lambda shadow: shadow.hits)
        if best.hits > self._chosen.hits * _ADVANTAGE:
            self._chosen = best
            self._order.handicaps = best.handicaps
        for shadow in self._shadows:
            shadow.hits *= 1 - 1 / _ROUNDS_REMEMBERED

    def __len__(self) -> int:
        return sum(map(len, self._order.queues))

    def __contains__(self, key: object) -> bool:
        return self._order.find(key) is not None

    def clear(self) -> None:
        """Forget everything, history and what was learnt included."""
        self.__init__(self.capacity)  # type: ignore[misc]
