"""Events of chunks that become resident or leave, and the reasons of misses."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from kvoffload.messages import OffloadKey
from kvoffload.metrics.names import HOST
from kvoffload.offload.base import ChunksRemoved, ChunksStored, OffloadingEvent, Reason
from kvoffload.offload.tiers import Tier

CPU = "CPU"
NEVER_STORED = "never_stored"
TIER_DOWN = "tier_down"
"""Nothing but an eviction is recorded of the chunk, and a tier that may have it cannot be asked."""
DROPPED = "dropped"
NOT_ADMITTED = "not_admitted"
NOT_WANTED = "not_wanted"
OTHER_NAMESPACE = "other_namespace"
EVICTED_WHILE_WAITING = "evicted_while_waiting"
"""Host memory had it when the request came, and needed its slot before the request's turn."""
EVICTED_BEFORE_RETURN = "evicted_before_return"
"""The request's session had said that it returns, and host memory evicted the chunk before."""
REMEMBERED_MISSES = 1 << 15
"""Chunks whose reasons are remembered."""
MAX_EVENTS = 1 << 16
"""Events kept for a consumer that may never take them. The oldest are dropped, and the consumer
gets an event with the reason LOST."""
MAX_EVENT_KEYS = 1 << 20
"""Keys in these events: one event may name all chunks of host memory."""


class MissReasons:
    """Remembers why chunks are missing, for the latest ``limit`` chunks that left a medium.

    At most three times as many keys are kept. :meth:`note` takes O(1) for a batch, because each
    eviction calls it. The index of answers is updated when :meth:`reason` is called.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._batches: deque[tuple[Sequence[OffloadKey], str]] = deque()
        self._num_noted = 0
        self._index: OrderedDict[OffloadKey, str] = OrderedDict()

    def note(self, keys: Sequence[OffloadKey], reason: str) -> None:
        """Remember that chunks left a medium, or never reached it, for this reason."""
        if not keys:
            return
        keys = keys[-self._limit :]
        self._batches.append((keys, str(reason)))
        self._num_noted += len(keys)
        while self._num_noted - len(self._batches[0][0]) >= self._limit:
            self._num_noted -= len(self._batches.popleft()[0])

    def reason(self, key: OffloadKey) -> str:
        """Return why a chunk is in no medium."""
        self._catch_up()
        return self._index.get(key, NEVER_STORED)

    def new_namespace(self) -> None:
        """Count all chunks remembered so far as chunks of another namespace."""
        self._catch_up()
        for key in self._index:
            self._index[key] = OTHER_NAMESPACE

    def _catch_up(self) -> None:
        while self._batches:
            keys, reason = self._batches.popleft()
            for key in keys:
                self._index[key] = reason
                self._index.move_to_end(key)
        self._num_noted = 0
        while len(self._index) > self._limit:
            self._index.popitem(last=False)


class EventLog:
    """Keeps events until a consumer takes them, and remembers the reasons of misses.

    Args:
        counters: where ``events_lost`` is counted.
        removals: counts the chunks that left, by tier and reason.
    """

    def __init__(self, counters: Counter[str], removals: Counter[tuple[str, str]]) -> None:
        self.reasons = MissReasons(REMEMBERED_MISSES)
        self._counters = counters
        self._events: deque[OffloadingEvent] = deque()
        self._num_keys = 0
        # Media of events that were dropped since events were last taken.
        self._gaps: dict[str, None] = {}
        self._removals = removals

    def stored(self, keys: Sequence[OffloadKey], medium: str = CPU) -> None:
        """Record chunks that became resident."""
        if keys:
            self._append(ChunksStored(tuple(keys), medium))

    def removed(self, keys: Sequence[OffloadKey], reason: Reason) -> None:
        """Record chunks that left host memory."""
        if keys:
            self._removals[HOST, reason.value] += len(keys)
            self._append(ChunksRemoved(tuple(keys), CPU, reason))

    def _append(self, event: OffloadingEvent) -> None:
        self._events.append(event)
        self._num_keys += len(event.keys)
        while len(self._events) > MAX_EVENTS or self._num_keys > MAX_EVENT_KEYS:
            lost = self._events.popleft()
            self._num_keys -= len(lost.keys)
            self._gaps[lost.medium] = None
            self._counters["events_lost"] += 1

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """Record chunks evicted from host memory."""
        self.reasons.note(keys, Reason.EVICTED)
        self.removed(keys, Reason.EVICTED)

    def written(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Record chunks that were written to a tier."""
        # A tier may have removed a chunk before this write or after it. Only the tier knows.
        gone = self._take_removals(tier)
        if gone:
            keys = [key for key in keys if key not in gone or tier.holds(key) is not False]
        self.stored(keys, tier.medium)

    def _take_removals(self, tier: Tier) -> set[OffloadKey]:
        """Record the chunks that a tier removed by itself; return their keys."""
        removals = tier.take_removals()
        if not removals:
            return set()
        by_reason: dict[str, list[OffloadKey]] = {}
        for removal in removals:
            by_reason.setdefault(removal.reason, []).append(OffloadKey(removal.key))
        for why, keys in by_reason.items():
            self._removals[tier.name, why] += len(keys)
            self.reasons.note(keys, why)
            reason = Reason.EVICTED if why == Reason.EVICTED else Reason.FAILED
            self._append(ChunksRemoved(tuple(keys), tier.medium, reason))
        return {OffloadKey(removal.key) for removal in removals}

    def replaced(self, tiers: Iterable[Tier]) -> None:
        """Record that other stores replace these tiers, with chunks of another namespace."""
        for tier in tiers:
            self._take_removals(tier)
            self._append(ChunksRemoved((), tier.medium, Reason.REPLACED))
        self.reasons.new_namespace()

    def take_events(self, tiers: Iterable[Tier]) -> list[OffloadingEvent]:
        """Return the events since the last call, with the chunks that tiers removed by themselves.

        If events were dropped, the first events remove all chunks of their media, with the reason
        LOST. The events after them are correct but incomplete.
        """
        for tier in tiers:
            self._take_removals(tier)
        taken: list[OffloadingEvent] = [
            ChunksRemoved((), medium, Reason.LOST) for medium in self._gaps
        ]
        taken += self._events
        self._gaps.clear()
        self._events.clear()
        self._num_keys = 0
        return taken
