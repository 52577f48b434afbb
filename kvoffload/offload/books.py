"""What loading, storing and looking up have in common: the accounts of one manager."""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvoffload.messages import OffloadKey
from kvoffload.offload.events import EventLog
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.lookup import Lookups
from kvoffload.offload.write_through import WriteThrough

log = logging.getLogger(__name__)
MAX_WARNINGS = 20
"""Unexpected answers that are logged; the others are only counted."""


@dataclass(frozen=True)
class Books:
    """Made and owned by the manager; each part changes them by their own methods."""

    host: HostCache
    lookups: Lookups
    residence: EventLog
    write_through: WriteThrough
    counters: Counter[str]
    promotes: bool = True
    """Whether what is loaded from a tier is also written to the nearer ones."""

    def reserve(
        self, keys: Sequence[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> tuple[list[int], list[OffloadKey]]:
        """Take slots for as many leading chunks as possible; record and return what had to go."""
        slots, evicted = self.host.reserve(keys, protected)
        self.counters["evicted"] += len(evicted)
        self.residence.evicted(evicted)
        return slots, evicted

    def unexpected(self, verb: str, keys: Sequence[OffloadKey]) -> None:
        """Chunks were answered for whose transfer is not under way, or is somebody else's."""
        for key in keys:
            self.counters["unexpected_completion"] += 1
            if self.counters["unexpected_completion"] <= MAX_WARNINGS:
                log.warning("%s for chunk %s, which was not prepared so", verb, key.hex())
