"""A queue of keys in a plain dict, with half the memory and work of an ``OrderedDict``."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import islice, repeat
from sys import getsizeof
from typing import Any

_PART = 32
"""A look-ahead reads this part of the capacity."""
_AT_LEAST = 16
"""Keys a look-ahead reads in small stores."""
_ROOMY = 90
"""Bytes an entry from which on a dict is rebuilt. It then has room for at least half as many more
entries, so that rebuilding stays O(1) an entry."""
_AHEAD = -1
"""The stamp of a key that a look-ahead has read, until the key is put in again."""


class OrderedQueue:
    """Keys in the order they were put in, each with a stamp; the oldest leave first.

    Reading a dict's first keys steps over all keys deleted since the dict was last resized. A
    look-ahead therefore reads many of the oldest keys at once, for many evictions: O(1) amortised.

    Callers may read ``keys``, which is always the same dict, and delete from it. They put keys in
    with :meth:`put`, or with ``keys[key] = stamp``. Stamps are 0 or greater, and never decrease.
    """

    __slots__ = ("_at", "_look", "_oldest", "_stamps", "keys")

    def __init__(self, capacity: int) -> None:
        self.keys: dict[bytes, int] = {}
        self._look = max(_AT_LEAST, capacity // _PART)
        # The keys of the last look-ahead, with their stamps; those before ``_at`` are done with.
        self._oldest: list[bytes] = []
        self._stamps: list[int] = []
        self._at = 0

    def put(self, keys: Iterable[bytes]) -> None:
        """Put in keys that are not in the queue, with the stamp 0."""
        self.keys.update(zip(keys, repeat(0)))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Take out keys that are in the queue."""
        deque(map(self.keys.pop, keys), maxlen=0)

    def first(self) -> int:
        """Return the stamp of the oldest key, of which there is one at least."""
        while True:
            if self._at == len(self._oldest):
                self._look_ahead()
            if self.keys.get(self._oldest[self._at]) == _AHEAD:
                return self._stamps[self._at]
            self._at += 1

    def pop(self, count: int, below: float | None = None) -> list[bytes]:
        """Take out the oldest keys, at most as many as there are with a stamp below a limit."""
        taken: list[bytes] = []
        while len(taken) < count and self.keys:
            if self._at == len(self._oldest):
                self._look_ahead()
            at, end = self._at, min(self._at + count - len(taken), len(self._oldest))
            if below is not None:
                end = bisect_left(self._stamps, below, at, end)
                if at == end:
                    break
            candidates, self._at = self._oldest[at:end], end
            stamps = list(map(self.keys.get, candidates))
            if stamps.count(_AHEAD) < len(stamps):
                pairs = zip(candidates, stamps, strict=True)
                candidates = [key for key, stamp in pairs if stamp == _AHEAD]
            self.discard(candidates)
            taken += candidates
        return taken

    def _look_ahead(self) -> None:
        compact(self.keys)
        self._oldest = list(islice(self.keys, self._look))
        self._stamps = list(islice(self.keys.values(), self._look))
        self._at = 0
        self.keys.update(zip(self._oldest, repeat(_AHEAD)))


def compact(table: dict[Any, Any]) -> None:
    """Rebuild a dict that has room for more than twice the entries it has, in the same order.

    A dict that is inserted into and deleted from triples its room each time it is full. A new dict
    has half of that or less.
    """
    if getsizeof(table) > _ROOMY * len(table) + 4096:
        entries = dict(table)
        table.clear()
        table.update(entries)
