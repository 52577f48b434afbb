"""Least recently used."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

_AHEAD = 32
"""A look at the oldest keys takes this part of the capacity."""
_AHEAD_AT_LEAST = 16


class LRUPolicy:
    """The key used longest ago leaves first; every operation is O(1), amortised.

    The order is the one in which a plain dict was filled: half the memory of an ``OrderedDict``
    and, in large stores, half the processor's cache misses. A look at a dict's first keys steps
    over those deleted since it was last resized, which may be a few times as many as there are
    residents; so a look is for many victims at once.

    Whoever owns the order may keep a number with each key, such as its slot: see
    :class:`~kvoffload.offload.idle.CarriesNumbers`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.numbers: dict[bytes, int] = {}
        self._ahead = max(_AHEAD_AT_LEAST, capacity // _AHEAD)
        # The oldest keys at the last look, oldest at the end; and those of them not moved since.
        self._oldest: list[bytes] = []
        self._unmoved: set[bytes] = set()

    def add(self, key: bytes) -> None:
        """Put a key at the recent end."""
        number = 0
        if key in self.numbers:
            number = self.numbers.pop(key)
            self._unmoved.discard(key)
        self.numbers[key] = number

    def touch(self, key: bytes) -> None:
        """Move an idle key to the recent end; others are ignored."""
        if key in self.numbers:
            self._unmoved.discard(key)
            self.numbers[key] = self.numbers.pop(key)

    def remove(self, key: bytes) -> None:
        """Take a key out of the order."""
        if key in self.numbers:
            self._unmoved.discard(key)
            del self.numbers[key]

    def add_all(self, keys: Sequence[bytes]) -> None:
        """Add keys, none of which is in the order, without a Python step for each."""
        self.numbers.update(dict.fromkeys(keys, 0))

    def put_all(self, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Add keys, none of which is in the order, each with a number."""
        self.numbers.update(zip(keys, numbers, strict=True))

    def remove_all(self, keys: Sequence[bytes]) -> None:
        """Take out keys, all of which are in the order."""
        deque(map(self.numbers.__delitem__, keys), maxlen=0)
        self._unmoved.difference_update(keys)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the ``count`` least recently used keys."""
        return self.evict(count)[0]

    def evict(self, count: int) -> tuple[list[bytes], list[int]]:
        """Take the ``count`` least recently used keys, with the number of each."""
        count = min(count, len(self.numbers))
        keys: list[bytes] = []
        numbers: list[int] = []
        while len(keys) < count:
            if not self._oldest:
                self._look()
            first = max(0, len(self._oldest) - count + len(keys))
            candidates = self._oldest[first:]
            del self._oldest[first:]
            candidates.reverse()
            if not self._unmoved.issuperset(candidates):
                candidates = [key for key in candidates if key in self._unmoved]
            self._unmoved.difference_update(candidates)
            keys += candidates
            numbers += map(self.numbers.pop, candidates)
        return keys, numbers

    def _look(self) -> None:
        self._oldest = list(islice(self.numbers, self._ahead))
        self._unmoved = set(self._oldest)
        self._oldest.reverse()

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, key: object) -> bool:
        return key in self.numbers

    def clear(self) -> None:
        """Forget everything."""
        self.numbers.clear()
        self._oldest.clear()
        self._unmoved.clear()
