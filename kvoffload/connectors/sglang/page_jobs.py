"""Loads and stores of pages in flight, and what they tell the thread of their call."""

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from kvoffload.connectors.sglang.staging_slots import Lease, StagingSlots
from kvoffload.io.deadlines import Listener


@dataclass(frozen=True)
class News:
    """What a job told: pages that arrived, or its end."""

    job: "PageJob"
    numbers: Sequence[int]
    has_ended: bool
    reason: str = ""


class PageJob(Listener):
    """A load or store of some pages of a call.

    Args:
        places: of its pages in the call.
        lease: their slots, released here once the server does not use them any more.
        news: tells the thread of the call.
        tier: that carries it out. Its slots are late while the server uses them and no call waits
            for the job any more.
        staging: lends the slots.
    """

    def __init__(
        self,
        places: Sequence[int],
        lease: Lease,
        news: "SimpleQueue[News]",
        tier: str,
        staging: StagingSlots,
    ) -> None:
        self.places = places
        self.lease = lease
        self._news = news
        self._tier = tier
        self._staging = staging
        self._is_late = self._is_over = False

    def arrived(self, numbers: Sequence[int]) -> None:
        self._news.put(News(self, numbers, has_ended=False))

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        good = [i for i, fine in enumerate(ok) if fine]
        if settled:
            self.released()
        else:
            self.give_up()
        self._news.put(News(self, good, has_ended=True, reason=reason))

    def released(self) -> None:
        with self._staging.changed:
            self._is_over = True
            if self._is_late:
                self._staging.late[self._tier] -= len(self.places)
        self._staging.release(self.lease)

    def give_up(self) -> None:
        """Count as late, unless the server has released the slots; the call waits no more."""
        with self._staging.changed:
            if not (self._is_over or self._is_late):
                self._is_late = True
                self._staging.late[self._tier] += len(self.places)
