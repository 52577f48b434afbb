"""LRU with a handicap on keys that were seen rarely, set by small shadow caches."""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import TypeVar
from zlib import crc32

from kvoffload.policies.history import PinnedState, RotatingBloomFilter

HANDICAPS: tuple[tuple[float, float, float], ...] = (
    (0, 0, 0),
    (1, 0.25, 0),
    (8, 4, 1),
    (64, 32, 16),
)
"""The rows to choose from: how much older, in capacities, a key seen 1, 2 or 3 times counts.

The first row is LRU. The last one evicts the key seen least often first.
"""
_START = 1
_SHADOW_ENTRIES = 1024
_LEAST_RATE = 4
_TICKS = 256
_TICKS_A_ROUND = 16
_LEAST_ROUNDS = 64
_LEAST_SAMPLES = 2048
"""A choice rests on so many rounds and sampled uses; with fewer, small stores follow noise."""
_ADVANTAGE = 1.01
_HISTORY = 2.7


_Name = TypeVar("_Name", bytes, int)
_Queue = OrderedDict[_Name, int]
"""Keys in the order of last use, each with the tick of that use."""


def _oldest(queues: Sequence[_Queue[_Name]], handicaps: Sequence[int]) -> tuple[int, float]:
    """Return the queue whose head counts as the oldest, and the tick until which it does.

    At least one queue is not empty. The first of two equally old heads is older.
    """
    at, least, limit = -1, inf, inf
    for number, (queue, handicap) in enumerate(zip(queues, handicaps, strict=True)):
        if queue:
            tick = next(iter(queue.values())) - handicap
            if tick < least:
                at, least, limit = number, tick, least
            elif tick < limit:
                limit = tick
    return at, limit + handicaps[at]


class _Shadow:
    """A small cache of sampled checksums that counts the hits of its row of handicaps."""

    __slots__ = ("capacity", "handicaps", "hits", "queues")

    def __init__(self, capacity: int, handicaps: tuple[int, ...]) -> None:
        self.capacity = capacity
        self.handicaps = handicaps
        self.hits = 0.0
        self.queues: tuple[_Queue[int], ...] = tuple(OrderedDict() for _ in range(4))

    def use(self, checksum: int, queue: int, now: int) -> None:
        """Count a use of a key that belongs in ``queue``."""
        queues = self.queues
        for number, held in enumerate(queues):
            if checksum in held:
                del held[checksum]
                queues[min(3, number + 1)][checksum] = now
                self.hits += 1
                return
        if sum(map(len, queues)) >= self.capacity:
            queues[_oldest(queues, self.handicaps)[0]].popitem(last=False)
        queues[queue][checksum] = now


class HandicapPolicy:
    """The key that counts as the oldest leaves first.

    A key's age is the number of uses, of any keys, since its own last one. A key that was seen only
    once, twice or three times has a handicap added. It is large under scans and one-time prompts,
    and 0 where only recency matters. Four shadow caches, fed with the same small sample of keys,
    try one row of handicaps each. The order takes over the row of the shadow that hit most of late.
    A filter remembers how often evicted keys had been seen.

    Every operation is O(1) a key. Decisions depend on keys and calls alone, not on time or chance.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        entries = max(1, capacity)
        self._rate = max(_LEAST_RATE, entries // _SHADOW_ENTRIES)
        # A clock of few ticks lets thousands of keys share one int object as their last use.
        self._uses_a_tick = max(1, entries // _TICKS)
        samples_a_round = self._uses_a_tick * _TICKS_A_ROUND / self._rate
        self._fades = 1 - 1 / max(_LEAST_ROUNDS, _LEAST_SAMPLES / samples_a_round)
        self.clear()

    def clear(self) -> None:
        entries = max(1, self.capacity)
        self._now = 0
        self._uses_left = self._uses_a_tick
        # Keys seen once, twice, three times, more often.
        self._queues: tuple[_Queue[bytes], ...] = tuple(OrderedDict() for _ in range(4))
        self._pinned: PinnedState[int] = PinnedState(entries)  # the queue of each key
        self._seen = RotatingBloomFilter(round(_HISTORY * entries))
        ticks = entries / self._uses_a_tick
        self._shadows = tuple(
            _Shadow(max(1, entries // self._rate), (*(round(each * ticks) for each in row), 0))
            for row in HANDICAPS
        )
        self._chosen = self._shadows[_START]

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the recent end of the queues they belong to."""
        pinned, queues = self._pinned, self._queues
        for key in keys:
            queue = pinned.pop(key, None)
            if queue is None:
                checksum = crc32(key)
                queue = self._seen.recall(checksum)
                self._count_use(checksum, queue)
            queues[queue][key] = self._now

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of keys that are in the order or pinned."""
        once, twice, thrice, more = self._queues
        pinned = self._pinned
        for key in keys:
            queue = 3
            if key in more:
                more[key] = self._now
                more.move_to_end(key)
            elif key in once:
                del once[key]
                twice[key] = self._now
                queue = 1
            elif key in twice:
                del twice[key]
                thrice[key] = self._now
                queue = 2
            elif key in thrice:
                del thrice[key]
                more[key] = self._now
            elif key in pinned:
                queue = pinned[key] = min(3, pinned[key] + 1)
            else:
                continue
            self._count_use(crc32(key), queue)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order and remember how often they were seen."""
        found = list(map(self._queue_of, keys))
        for key, queue in zip(keys, found, strict=True):
            del self._queues[queue][key]
        self._pinned.keep(keys, found)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the keys that count as the oldest."""
        taken: list[bytes] = []
        count = min(count, len(self))
        while len(taken) < count:
            at, limit = _oldest(self._queues, self._chosen.handicaps)
            queue, wanted, run = self._queues[at], count - len(taken), 0
            # Keys behind the oldest head leave with it, until they are younger than another head.
            for tick in queue.values():
                if run == wanted or (run and tick >= limit):
                    break
                run += 1
            leaving = [queue.popitem(last=False)[0] for _ in range(run)]
            self._seen.note([crc32(key) for key in leaving], min(3, at + 1))
            taken += leaving
        return taken

    def _queue_of(self, key: bytes) -> int:
        """Return the number of the queue that a key of the order is in."""
        once, twice, thrice, more = self._queues
        if key in once:
            return 0
        if key in more:
            return 3
        if key in twice:
            return 1
        if key in thrice:
            return 2
        raise KeyError(key)

    def _count_use(self, checksum: int, queue: int) -> None:
        """Advance the clock, and show the use to the shadows if this key is one of the sample."""
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
        for shadow in self._shadows:
            shadow.hits *= self._fades

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, key: object) -> bool:
        once, twice, thrice, more = self._queues
        return key in more or key in once or key in twice or key in thrice
