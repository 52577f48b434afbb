"""LRU with a handicap on keys that were seen rarely, set by small shadow caches."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, count, repeat
from math import inf
from zlib import crc32

from kvoffload.policies.history import PinnedState, RotatingBloomFilter
from kvoffload.policies.ordered_queue import OrderedQueue, compact

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


_NEXT = (1, 2, 3, 3)
"""The queue that a use moves a key to."""


def _oldest(firsts: Iterable[int | None], handicaps: Sequence[int]) -> tuple[int, float]:
    """Return the queue whose first key counts as the oldest, and the tick below which it does.

    ``firsts`` has the tick of each queue's first key; None for an empty queue, which not all are.
    The first of two equally old keys is older.
    """
    at, least, limit = -1, inf, inf
    for number, (tick, handicap) in enumerate(zip(firsts, handicaps, strict=True)):
        if tick is not None:
            age = tick - handicap
            if age < least:
                at, least, limit = number, age, least
            elif age < limit:
                limit = age + 1  # keys of that age are behind those of queue `at`
    return at, limit + handicaps[at]


class _Shadow:
    """A small cache of sampled checksums that counts the hits of its row of handicaps."""

    __slots__ = ("capacity", "handicaps", "hits", "queues")

    def __init__(self, capacity: int, handicaps: tuple[int, ...]) -> None:
        self.capacity = capacity
        self.handicaps = handicaps
        self.hits = 0.0
        # In the order of last use, each with the tick of that use.
        self.queues: tuple[OrderedDict[int, int], ...] = tuple(OrderedDict() for _ in range(4))

    def use(self, checksum: int, queue: int, now: int) -> None:
        """Count a use of a key that belongs in ``queue``."""
        queues = self.queues
        for number, held in enumerate(queues):
            if checksum in held:
                del held[checksum]
                queues[_NEXT[number]][checksum] = now
                self.hits += 1
                return
        if sum(map(len, queues)) >= self.capacity:
            firsts = [next(iter(held.values())) if held else None for held in queues]
            queues[_oldest(firsts, self.handicaps)[0]].popitem(last=False)
        queues[queue][checksum] = now


class HandicapPolicy:
    """The key that counts as the oldest leaves first.

    A key's age is the number of uses, of any keys, since its own last one. A key that was seen only
    once, twice or three times has a handicap added. It is large under scans and one-time prompts,
    and 0 where only recency matters. Four shadow caches, fed with the same small sample of keys,
    try one row of handicaps each. The order takes over the row of the shadow that hit most of late.
    A filter remembers how often evicted keys had been seen.

    Every operation is O(1) a key, amortised. Decisions depend on keys and calls alone, not on time
    or chance.
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
        self._uses = 0  # since the last tick
        # Keys seen once, twice, three times, more often.
        self._queues = tuple(OrderedQueue(entries) for _ in range(4))
        self._tables = tuple(queue.keys for queue in self._queues)
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
        pinned, tables = self._pinned, self._tables
        if pinned.keys().isdisjoint(keys):
            self._add_new(keys)
            return
        queues = list(map(pinned.pop, keys, repeat(-1)))
        at = queues[0]
        if at >= 0 and queues.count(at) == len(queues):  # neighbours in a prompt mostly are
            tables[at].update(zip(keys, repeat(self._now)))
            return
        for key, queue in zip(keys, queues, strict=True):
            if queue < 0:
                self._add_new((key,))
            else:
                tables[queue][key] = self._now

    def _add_new(self, keys: Sequence[bytes]) -> None:
        """Put keys in that the store did not have; it counts as a use."""
        tables, checksums = self._tables, list(map(crc32, keys))
        queues = self._seen.recall_all(checksums)
        ticks = self._ticks(self._uses + 1, len(keys))
        self._count_uses(checksums, queues)
        for key, queue, tick in zip(keys, queues, ticks, strict=False):
            tables[queue][key] = tick

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of keys that are in the order or pinned."""
        tables, pinned = self._tables, self._pinned
        at = self._queue_of(keys[0]) if keys else None
        if at is None and all(each.keys().isdisjoint(keys) for each in (*tables, pinned) if each):
            return
        used, queues = [], []
        ticks = iter(self._ticks(self._uses, len(keys)))
        for key in keys:
            # Neighbours in a prompt are mostly in one queue.
            if at is None or tables[at].pop(key, None) is None:
                at = self._queue_of(key)
                if at is not None:
                    del tables[at][key]
            if at is not None:
                queue = _NEXT[at]
                tables[queue][key] = next(ticks)
            elif key in pinned:
                queue = pinned[key] = _NEXT[pinned[key]]
                next(ticks)
            else:
                continue
            used.append(key)
            queues.append(queue)
        self._count_uses(list(map(crc32, used)), queues)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order and remember how often they were seen."""
        tables, queues = self._tables, []
        at: int | None = 0
        for key in keys:
            if at is None or tables[at].pop(key, None) is None:
                at = self._queue_of(key)
                if at is None:
                    raise KeyError(key)
                del tables[at][key]
            queues.append(at)
        if at is not None:
            compact(tables[at])
        self._pinned.keep(keys, queues)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the keys that count as the oldest."""
        taken: list[bytes] = []
        count = min(count, len(self))
        while len(taken) < count:
            firsts = [queue.first() if queue.keys else None for queue in self._queues]
            at, limit = _oldest(firsts, self._chosen.handicaps)
            leaving = self._queues[at].pop(count - len(taken), limit)
            self._seen.note(list(map(crc32, leaving)), min(3, at + 1))
            taken += leaving
        return taken

    def _queue_of(self, key: bytes) -> int | None:
        """Return the number of the queue that a key is in; None if it is not in the order."""
        once, twice, thrice, more = self._tables
        if key in once:
            return 0
        if key in more:
            return 3
        if key in twice:
            return 1
        return 2 if key in thrice else None

    def _ticks(self, uses: int, num: int) -> Iterable[int]:
        """Return the ticks of ``num`` uses, or more: the first is ``uses`` after the last tick."""
        now, each = self._now, self._uses_a_tick
        if uses + num <= each:
            return repeat(now)
        return chain(
            repeat(now, each - uses),
            chain.from_iterable(map(repeat, count(now + 1), repeat(each))),
        )

    def _count_uses(self, checksums: Sequence[int], queues: Sequence[int]) -> None:
        """Advance the clock, and show uses of the keys of the sample to the shadows."""
        rate, each, now, uses = self._rate, self._uses_a_tick, self._now, self._uses
        for i, checksum in enumerate(checksums):
            if not checksum % rate:
                self._advance(now + (uses + i) // each)
                for shadow in self._shadows:
                    shadow.use(checksum, queues[i], self._now)
        uses += len(checksums)
        if uses < each:
            self._uses = uses
        else:
            self._advance(now + uses // each)
            self._uses = uses % each

    def _advance(self, now: int) -> None:
        """Choose again at the end of each round."""
        if now > self._now:
            for _ in range(now // _TICKS_A_ROUND - self._now // _TICKS_A_ROUND):
                self._choose()
            self._now = now

    def _choose(self) -> None:
        """Take over the handicaps of the shadow that hit most, if it is clearly ahead."""
        best = max(self._shadows, key=lambda shadow: shadow.hits)
        if best.hits > self._chosen.hits * _ADVANTAGE:
            self._chosen = best
        for shadow in self._shadows:
            shadow.hits *= self._fades

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def __contains__(self, key: object) -> bool:
        once, twice, thrice, more = self._tables
        return key in once or key in more or key in twice or key in thrice
