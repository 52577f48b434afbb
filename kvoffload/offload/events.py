"""What became resident and what ceased to be: events, counts by reason, memory of departures."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvoffload.messages import OffloadKey
from kvoffload.offload.base import OffloadingEvent, Reason
from kvoffload.offload.miss_reasons import EVICTED, MissReasons
from kvoffload.offload.tiers import Tier

CPU = "CPU"
MAX_EVENTS = 1 << 16
"""Events kept for a listener that may never ask; the oldest are lost to it, and it is told so."""


class EventLog:
    """Keeps events in an order whose replay gives what is resident.

    Args:
        remembered: departures to remember.
        counters: where ``events_lost`` is counted.
    """

    def __init__(self, remembered: int, counters: Counter[str]) -> None:
        self.departures = MissReasons(remembered)
        self._counters = counters
        self._events: deque[OffloadingEvent] = deque()
        # Media of events that were lost since the last time events were taken.
        self._gaps: dict[str, None] = {}
        self._removed: Counter[tuple[str, str]] = Counter()

    def record(self, keys: Sequence[OffloadKey], medium: str, reason: Reason) -> None:
        """Chunks became resident (STORED), or ceased to be."""
        if keys:
            removed = reason is not Reason.STORED
            if removed:
                self._removed[medium, reason] += len(keys)
            self._tell(OffloadingEvent(tuple(keys), medium, removed, reason))

    def _tell(self, event: OffloadingEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._gaps[self._events.popleft().medium] = None
            self._counters["events_lost"] += 1
        self._events.append(event)

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """Chunks made room in host memory."""
        self.departures.note(keys, EVICTED)
        self.record(keys, CPU, Reason.EVICTED)

    def written(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Chunks were written to a tier."""
        # What the tier gave up may have been these, before they were written or already again:
        # then only the tier knows.
        gone = self._take_removals(tier)
        if gone:
            keys = [key for key in keys if key not in gone or tier.holds(key) is not False]
        self.record(keys, tier.medium, Reason.STORED)

    def _take_removals(self, tier: Tier) -> set[OffloadKey]:
        """Record what a tier gave up by itself since the last time."""
        removals = tier.take_removals()
        if not removals:
            return set()
        by_reason: dict[str, list[OffloadKey]] = {}
        for removal in removals:
            by_reason.setdefault(removal.reason, []).append(OffloadKey(removal.key))
        for why, keys in by_reason.items():
            self._removed[tier.medium, why] += len(keys)
            self.departures.note(keys, why)
            reason = Reason.EVICTED if why == EVICTED else Reason.FAILED
            self._tell(OffloadingEvent(tuple(keys), tier.medium, True, reason))
        return {OffloadKey(removal.key) for removal in removals}

    def replaced(self, tiers: Iterable[Tier]) -> None:
        """Other stores take the place of these: what was known to be there is not there any more.

        All that is known so far counts as of another namespace.
        """
        for tier in tiers:
            self._take_removals(tier)
            self._tell(OffloadingEvent((), tier.medium, True, Reason.REPLACED))
        self.departures.new_namespace()

    def take_events(self, tiers: Iterable[Tier]) -> list[OffloadingEvent]:
        """Return the events since the last call, with what tiers gave up by themselves.

        Where some were lost, what was known of their media is taken back first: the others then say
        of each chunk they name what is so, and of no chunk what is not so.
        """
        for tier in tiers:
            self._take_removals(tier)
        gaps = [OffloadingEvent((), medium, True, Reason.LOST) for medium in self._gaps]
        taken = gaps + list(self._events)
        self._gaps.clear()
        self._events.clear()
        return taken

    def removed_by_medium(self) -> dict[str, dict[str, int]]:
        """Count what left, by medium and reason."""
        table: dict[str, dict[str, int]] = {}
        for (medium, why), count in self._removed.items():
            table.setdefault(medium, {})[str(why)] = count
        return table
