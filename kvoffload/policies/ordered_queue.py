"""Finding the oldest keys of a plain dict, which is half the memory and work of an OrderedDict."""

from collections import deque
from collections.abc import Iterable
from itertools import islice, repeat

_PART = 32
_AT_LEAST = 16


class OrderedQueue:
    """Keys in the order they were put in, of which the oldest leave first.

    ``keys`` may be asked and deleted from directly; keys are put in with :meth:`put` or with
    ``keys[key] = stamp``. The values tell a key that was deleted and put in again since the last
    look at the oldest from one that still has its place.
    """

    __slots__ = ("_ahead", "_oldest", "keys", "stamp")

    def __init__(self, capacity: int) -> None:
        self.keys: dict[bytes, int] = {}
        self.stamp = 0
        # A look steps over all keys deleted since the dict was last resized: it is to be for many.
        self._ahead = max(_AT_LEAST, capacity // _PART)
        self._oldest: list[bytes] = []

    def put(self, keys: Iterable[bytes]) -> None:
        """Put in keys that are not in it."""
        self.keys.update(zip(keys, repeat(self.stamp)))

    def pop(self, count: int) -> list[bytes]:
        """Take out the oldest keys, at most as many as there are."""
        count = min(count, len(self.keys))
        if count == 1:
            return [self._pop_one()]
        taken: list[bytes] = []
        while len(taken) < count:
            if not self._oldest:
                self._look()
            first = max(0, len(self._oldest) - count + len(taken))
            candidates = self._oldest[first:]
            del self._oldest[first:]
            candidates.reverse()
            stamps = list(map(self.keys.get, candidates, repeat(self.stamp)))
            if self.stamp in stamps:
                candidates = [
                    key
                    for key, stamp in zip(candidates, stamps, strict=True)
                    if stamp != self.stamp
                ]
            deque(map(self.keys.__delitem__, candidates), maxlen=0)
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
            self._look()

    def _look(self) -> None:
        self._oldest = list(islice(self.keys, self._ahead))
        self._oldest.reverse()
        self.stamp += 1
