"""Which chunks of a tier all ranks hold, where the tier's stores list them.

A chunk is present if every rank's store has its part. One dictionary maps each key to a bit mask of
ranks, so that a lookup takes one step whatever the number of ranks.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from kvoffload.backends.base import Removal
from kvoffload.offload.tiers import Presence

_ANNOUNCED = 1
"""This engine told of the chunk as stored in the tier, and must tell of its removal."""
_FORGOTTEN = 2
"""A load of the chunk failed: absent until a rank announces it again."""
_FLAGS = _ANNOUNCED | _FORGOTTEN
_FIRST_RANK = 4
_MOST_BITS = 60
"""Masks below this size are small integers."""
_LEAST_LIMIT = 1 << 20
_MAX_ASKED = 1 << 16
"""Keys that may wait for an incomplete index at a time; further ones are absent."""


class TellsRemovals(Presence):
    """Keeps the chunks that were told of as stored in a tier, and left it, until they are taken."""

    is_up = True

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._removals: list[Removal] = []

    def take_removals(self) -> list[Removal]:
        """Return what was told of as stored and left since, once each."""
        taken, self._removals = self._removals, []
        return taken


class TierIndex(TellsRemovals):
    """Presence of chunks in one tier, for the scheduler's thread alone.

    A rank that begins a new listing gets a new bit, so its old listing counts no more, and no key
    is visited. Memory is bounded by twice the chunks that ranks announced, or 2²⁰ of them.

    Args:
        ranks: their numbers.
        timeout_s: how long a lookup may stay at None while listings are incomplete.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._timeout_s = timeout_s
        self._masks: dict[bytes, int] = {}
        self._bits = {rank: _FIRST_RANK << i for i, rank in enumerate(ranks)}
        self._required = sum(self._bits.values())
        self._complete = 0
        """The bits of the ranks whose listings are complete."""
        self._dead = 0
        """Former bits of ranks, which masks may still have."""
        self._has_garbage = False
        self._limit = _LEAST_LIMIT
        self._asked: dict[bytes, float] = {}
        """Until when a lookup of a key may stay at None."""

    # ---- looking up ----

    def holds(self, key: bytes) -> bool | None:
        """Return whether every rank has a chunk; None while a listing may still bring it."""
        mask = self._masks.get(key, 0)
        if mask & (self._required | _FORGOTTEN) == self._required:
            return True
        here = self._required & mask
        if (self._required & ~here) & self._complete or (here and mask & _FORGOTTEN):
            return False
        if len(self._asked) >= _MAX_ASKED:
            return False
        now = self._clock()
        return None if now < self._asked.setdefault(key, now + self._timeout_s) else False

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """Count the leading chunks for which :meth:`holds` answers True."""
        get, required = self._masks.get, self._required
        wanted = required | _FORGOTTEN
        count = 0
        for key in keys:
            if get(key, 0) & wanted != required:
                break
            count += 1
        return count

    @property
    def is_complete(self) -> bool:
        """Whether every rank has listed what it had at its start."""
        return self._complete == self._required

    # ---- what ranks report ----

    def restart(self, rank: int) -> None:
        """Begin a new listing of a rank: what it announced before counts no more."""
        old = self._bits[rank]
        self._required &= ~old
        self._complete &= ~old
        self._dead |= old
        self._has_garbage = True
        if self._unused_bit() >> _MOST_BITS:
            self._sweep()
        self._bits[rank] = self._unused_bit()
        self._required |= self._bits[rank]

    def apply(self, rank: int, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Take in what appeared in a rank's store and what left it."""
        masks, bit = self._masks, self._bits[rank]
        for key in added:
            masks[key] = (masks.get(key, 0) | bit) & ~_FORGOTTEN
        for key in removed:
            mask = masks.get(key, 0) & ~bit
            if mask & ~_FORGOTTEN:
                masks[key] = mask
                self._has_garbage |= not mask & self._required
            else:
                masks.pop(key, None)
        if len(masks) > self._limit:
            if self._has_garbage:
                self._sweep()
            self._limit = max(_LEAST_LIMIT, 2 * len(self._masks))

    def completed(self, rank: int) -> None:
        """Note that a rank has listed all that it had at its start."""
        self._complete |= self._bits[rank]
        if self.is_complete:
            self._asked.clear()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Count chunks as absent until a rank announces them again."""
        for key in keys:
            mask = self._masks.get(key, 0)
            if mask:
                self._masks[key] = mask & ~_ANNOUNCED | _FORGOTTEN

    def written(self, keys: Iterable[bytes]) -> None:
        """Note that every rank has just stored these, and that they were told of as stored."""
        for key in keys:
            self._masks[key] = self._required | _ANNOUNCED

    def removed(self, removals: Iterable[Removal]) -> None:
        """Note which chunks some rank's store gave up; what it still has, its changes say."""
        for removal in removals:
            mask = self._masks.get(removal.key, 0)
            if mask & _ANNOUNCED:
                self._masks[removal.key] = mask & ~_ANNOUNCED
                self._has_garbage |= not mask & self._required
                self._removals.append(removal)

    # ---- bits ----

    def _unused_bit(self) -> int:
        """Return the lowest bit that no mask has."""
        used = _FLAGS | self._required | self._dead
        return ~used & (used + 1)

    def _sweep(self) -> None:
        """Drop the keys that no rank has, and free the bits of former listings."""
        live, kept = self._required, self._required | _FLAGS
        self._masks = {key: mask & kept for key, mask in self._masks.items() if mask & live}
        self._dead, self._has_garbage = 0, False
