"""Slots of the slab, lent to calls and to the I/O server until both are done with them."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Lease:
    """Slots that several parties use; they are free when each has released them."""

    slots: Sequence[int]
    num_holders: int
    is_for_store: bool


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
        self.late: Counter[str] = Counter()
        """Tier → slots that its late calls use; changed while :attr:`changed` is held."""
        self.changed = threading.Condition()

    @property
    def num_busy(self) -> int:
        """Slots that are lent."""
        return self._num_slots - len(self._free)

    def lend(self, count: int, num_holders: int, *, storing: bool, until_s: float) -> Lease | None:
        """Lend at most ``count`` slots, and at least one; None if there is none until then.

        Args:
            count: of the slots.
            num_holders: how many times :meth:`release` will be called.
            storing: what they are for.
            until_s: when to wait no more.
        """

        def available() -> int:
            return min(len(self._free), self._for_stores) if storing else len(self._free)

        with self.changed:
            self.changed.wait_for(available, max(0.0, until_s - time.monotonic()))
            taken = [self._free.pop() for _ in range(min(count, available()))]
            if storing:
                self._for_stores -= len(taken)
        return Lease(taken, num_holders, storing) if taken else None

    def release(self, lease: Lease) -> None:
        """End the use of slots by one holder; on any thread."""
        with self.changed:
            lease.num_holders -= 1
            if not lease.num_holders:
                self._free.extend(lease.slots)
                if lease.is_for_store:
                    self._for_stores += len(lease.slots)
                self.changed.notify_all()

    def are_late(self, tier: str) -> bool:
        """Whether late calls keep a tier's share: it gets no job until some of them return."""
        return self.late[tier] >= self._most_late
