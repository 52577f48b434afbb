"""A queue of keys in a plain dict, with half the memory and work of an ``OrderedDict``."""

from collections import deque
from collections.abc import Iterable
from itertools import islice, repeat

PART = 32
"""A look-ahead reads this part of the capacity."""
AT_LEAST = 16
"""Keys a look-ahead reads in small stores."""


class OrderedQueue:
    """Keys in the order they were put in; the oldest leave first, O(1) amortised.

    Reading a dict's first keys steps over all keys deleted since the dict was last resized. A
    look-ahead therefore reads many of the oldest keys at once, for many evictions.

    Callers may read ``keys`` and delete from it. They put keys in with :meth:`put` or with
    ``keys[key] = stamp``. A key that has the current stamp moved after the last look-ahead.
    """

    __slots__ = ("_ahead", "_oldest", "keys", "stamp")

    def __init__(self, capacity: int) -> None:
        self.keys: dict[bytes, int] = {}
        self.stamp = 0
        self._ahead = max(AT_LEAST, capacity // PART)
        # The keys of the last look-ahead that are not evicted yet, the oldest at the end.
        self._oldest: list[bytes] = []

    def put(self, keys: Iterable[bytes]) -> None:
        """Put in keys that are not in the queue."""
        self.keys.update(zip(keys, repeat(self.stamp)))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Take out keys that are in the queue."""
        deque(map(self.keys.pop, keys), maxlen=0)

    def pop(self, count: int) -> list[bytes]:
        """Take out the oldest keys, at most as many as there are."""
        count = min(count, len(self.keys))
        if count == 1:
            return [self._pop_one()]
        taken: list[bytes] = []
        while len(taken) < count:
            if not self._oldest:
                self._look_ahead()
            first = max(0, len(self._oldest) - count + len(taken))
            candidates = self._oldest[first:]
            del self._oldest[first:]
            candidates.reverse()
            stamps = list(map(self.keys.get, candidates, repeat(self.stamp)))
            if self.stamp in stamps:
                pairs = zip(candidates, stamps, strict=True)
                candidates = [key for key, stamp in pairs if stamp != self.stamp]
            self.discard(candidates)
            taken += candidates
        return taken

    def _pop_one(self) -> bytes:
        keys = self.keys
        while True:
            while self._oldest:
                key = self._oldest.pop()
                if keys.get(key, self.stamp) != self.stamp:
                    del keys[key]
                    return key
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._oldest = list(islice(self.keys, self._ahead))
        self._oldest.reverse()
        self.stamp += 1
