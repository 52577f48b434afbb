"""Slots of the slab, lent to calls and to the I/O server until both are done with them."""

import threading
import time
from collections import Counter
from collections.abc import Sequence


class StagingSlots:
    """Lends slots to several threads. Stores get at most a half, so that loads find some.

    It counts the slots that calls of tiers still use, though their jobs have ended.

    Args:
        num_slots: of the slab.
        num_tiers: that chunks are stored on.
    """

    def __init__(self, num_slots: int, num_tiers: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._for_stores = max(1, num_slots // 2)
        self._most_late = max(1, num_slots // (2 * num_tiers))
        self._late: Counter[str] = Counter()
        self._changed = threading.Condition()

    @property
    def num_busy(self) -> int:
        """Slots that are lent."""
        return self._num_slots - len(self._free)

    def take(self, count: int, *, storing: bool, until_s: float) -> list[int]:
        """Return at most ``count`` slots, and at least one unless there is none until then."""

        def available() -> int:
            return min(len(self._free), self._for_stores) if storing else len(self._free)

        with self._changed:
            self._changed.wait_for(available, max(0.0, until_s - time.monotonic()))
            taken = [self._free.pop() for _ in range(min(count, available()))]
            if storing:
                self._for_stores -= len(taken)
        return taken

    def give(self, slots: Sequence[int], *, storing: bool) -> None:
        """Take slots back."""
        with self._changed:
            self._free.extend(slots)
            if storing:
                self._for_stores += len(slots)
            self._changed.notify_all()

    def add_late(self, tier: str, number: int) -> None:
        """Add slots that late calls of a tier use, or take some off; on any thread."""
        with self._changed:
            self._late[tier] += number

    def are_late(self, tier: str) -> bool:
        """Whether late calls keep a tier's share: it gets no job until some of them return."""
        return self._late[tier] >= self._most_late


class Lease:
    """Slots that several parties use; they are free when each has released them.

    Args:
        staging: gets the slots back.
        slots: what is lent.
        holders: how many times :meth:`release` will be called.
        storing: what the slots were taken for.
    """

    def __init__(
        self, staging: StagingSlots, slots: Sequence[int], holders: int, *, storing: bool
    ) -> None:
        self.slots = slots
        self.staging = staging
        self._holders = holders
        self._storing = storing
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the use by one holder; on any thread."""
        with self._lock:
            self._holders -= 1
            is_last = not self._holders
        if is_last:
            self.staging.give(self.slots, storing=self._storing)
