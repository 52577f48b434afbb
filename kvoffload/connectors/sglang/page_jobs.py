"""Loads and stores of pages in flight, and what they tell the thread of their call."""

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from kvoffload.connectors.sglang.staging_slots import Lease


@dataclass(frozen=True)
class News:
    """What a job told: pages that arrived, or its end."""

    job: "PageJob"
    numbers: Sequence[int]
    has_ended: bool
    reason: str = ""


class PageJob:
    """A load or store of some pages of a call; a listener of the I/O client.

    Args:
        places: of its pages in the call.
        lease: their slots, released here once the server does not use them any more.
        news: tells the thread of the call.
    """

    def __init__(self, places: Sequence[int], lease: Lease, news: "SimpleQueue[News]") -> None:
        self.places = places
        self.lease = lease
        self._news = news

    def arrived(self, numbers: Sequence[int]) -> None:
        self._news.put(News(self, numbers, has_ended=False))

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        good = [i for i, fine in enumerate(ok) if fine]
        self._news.put(News(self, good, has_ended=True, reason=reason))
        if settled:
            self.lease.release()

    def released(self) -> None:
        self.lease.release()
