"""Stores below host memory: asks which has a chunk, and writes stored chunks through to them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from operator import is_not
from typing import Protocol

from kvoffload.backends.base import Removal
from kvoffload.messages import BackendLoadStoreSpec, CPULoadStoreSpec, OffloadKey
from kvoffload.metrics.names import INFLIGHT_BYTES, WAITING_CHUNKS
from kvoffload.metrics.samples import Sample
from kvoffload.offload.base import WriteJob
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.in_flight import JobsInFlight

WHILE_LOADING = 4
"""While a load from a tier is in flight, write-through gets this part of its limit."""


class Presence(Protocol):
    """What the manager asks about a tier's chunks.

    Each call looks at tables of this process and answers at once. None does I/O or raises.
    """

    @property
    def is_up(self) -> bool:
        """Whether the store can be asked now, as far as this process knows."""
        return True

    def holds(self, key: bytes) -> bool | None:
        """Return True, False, or None for "ask again" until the lookup deadline at most."""
        ...

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Count leading keys for which ``holds`` answers True; 0 if it must be asked for each."""
        return 0

    def forget(self, keys: Sequence[bytes]) -> None:
        """Answer False for these keys, whose load just failed, until they are written again."""
        ...

    def take_removals(self) -> list[Removal]:
        """Return the chunks that left the tier by itself since the last call."""
        return []


class Tier:
    """A store below host memory, for as long as its chunks mean the same.

    Args:
        name: of the tier.
        presence: tells what the store has.
    """

    def __init__(self, name: str, presence: Presence) -> None:
        self.name = name
        self.medium = name.upper()
        """The name in events."""
        self.presence = presence
        # The presence's own methods: a lookup calls them for each chunk of a prompt.
        self.holds, self.num_leading = presence.holds, presence.num_leading
        self.forget, self.take_removals = presence.forget, presence.take_removals


def first_holder(key: OffloadKey, tiers: Iterable[Tier]) -> tuple[Tier | None, bool | None]:
    """Return the first tier that has a key, with True; or None with False or "ask again"."""
    answer: bool | None = False
    for tier in tiers:
        holds = tier.holds(key)
        if holds:
            return tier, True
        if holds is None:
            answer = None
    return None, answer


class WriteThrough:
    """Chunks that wait for tiers, and their transfers in flight.

    A chunk beyond the limit waits unpinned. If it is evicted first, it is dropped and counted: a
    future miss, nothing else.

    Args:
        host: pinned while a chunk is read.
        limit_bytes: high-water mark of host bytes pinned for write-through. Each tier has an equal
            share, so that a tier that hangs does not block the rest.
        lost: counts the chunks that are not written, by tier and reason.
        jobs: gets each transfer that has begun.
        dropped: called with the chunks that will not be written.
    """

    def __init__(
        self,
        host: HostCache,
        limit_bytes: int,
        lost: Counter[tuple[str, str]],
        jobs: JobsInFlight,
        dropped: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        self._host = host
        self._limit_bytes = limit_bytes
        self._lost = lost
        self._dropped = dropped
        self._waiting: dict[Tier, dict[OffloadKey, None]] = {}
        """Tier → chunks that wait for it, the oldest first. They are not pinned: a chunk evicted
        before its turn is dropped."""
        self._share_bytes = 0
        """Of the limit, for each tier."""
        self._jobs = jobs
        self._kept_bytes: Counter[str] = Counter()
        """Tier → bytes of its transfers in flight, and of answered ones for which it may read."""

    def use(self, tiers: Sequence[Tier]) -> None:
        """Write to these tiers from now on; transfers in flight to old tiers end as usual.

        Until then they count for the new tier of that name: a store that hangs has no share again.
        """
        slots = self._limit_bytes // self._host.slot_bytes
        self._share_bytes = -(-slots // max(1, len(tiers))) * self._host.slot_bytes
        self._waiting = {tier: {} for tier in tiers}

    def offer(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Queue ready chunks for a tier, except those that it has."""
        waiting = self._waiting[tier]
        waiting.update(dict.fromkeys(key for key in keys if not tier.holds(key)))
        too_many = len(waiting) - self._host.num_slots
        if too_many > 0:  # not all of them can be resident any more
            self._drop(tier, [key for key, _ in zip(waiting, range(too_many), strict=False)])
        self._begin(tier)

    def promote(
        self,
        keys: Sequence[OffloadKey],
        sources: Mapping[OffloadKey, Tier],
        tiers: Sequence[Tier],
    ) -> None:
        """Queue fetched chunks for the tiers nearer than their source: the next load is faster."""
        for source in dict.fromkeys(map(sources.__getitem__, keys)):
            for tier in takewhile(partial(is_not, source), tiers):
                self.offer(tier, [key for key in keys if sources[key] is source])

    def begin(self) -> None:
        """Begin the transfers that the limits allow now."""
        for tier, waiting in self._waiting.items():
            if waiting:
                self._begin(tier)

    def room_bytes(self) -> int:
        """Return the bytes that the tier with the most room would begin to write now."""
        kept_bytes, limit = self._kept_bytes, self._limit()
        return max((limit - kept_bytes[tier.name] for tier in self._waiting), default=0)

    def _limit(self) -> int:
        if self._host.fetching and self._share_bytes:
            return max(self._share_bytes // WHILE_LOADING, self._host.slot_bytes)
        return self._share_bytes

    def _begin(self, tier: Tier) -> None:
        host, waiting = self._host, self._waiting[tier]
        name, limit = tier.name, self._limit()
        kept_bytes = before = self._kept_bytes[name]
        batch: list[OffloadKey] = []
        gone: list[OffloadKey] = []
        for key in waiting:
            if not host.is_ready(key):
                gone.append(key)
                continue
            size = host.bytes_of(key)
            # A chunk larger than the limit is written when nothing else is.
            if kept_bytes + size > limit and (kept_bytes or not limit):
                break
            kept_bytes += size
            batch.append(key)
        slots = host.pin_all(batch) or list(map(host.pin, batch))
        for key in batch:
            del waiting[key]
        if gone:
            self._drop(tier, gone)
        if batch:
            source = CPULoadStoreSpec(slots)
            target = BackendLoadStoreSpec(name, tuple(batch), host.tenants_of(batch))
            job_id = self._jobs.new_id()
            self._kept_bytes[name] = kept_bytes
            num_bytes = kept_bytes - before
            transfer = WriteJob(job_id, target.keys, source, (source, target), tier, num_bytes)
            self._jobs.begin(transfer)

    def _drop(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self._waiting[tier][key]
        self._lost[tier.name, "back_pressure"] += len(keys)
        self._dropped(keys)

    def settled(self, transfer: WriteJob) -> None:
        """Take in that nothing reads for an answered transfer any more; begin the next ones.

        Until then its bytes count: a tier that hangs has its share alone.
        """
        self._kept_bytes[transfer.tier.name] -= transfer.num_bytes
        self.begin()

    def forget_waiting(self) -> None:
        """Drop all waiting chunks uncounted."""
        for waiting in self._waiting.values():
            waiting.clear()

    def waiting(self) -> list[dict[OffloadKey, None]]:
        """Return for each tier the chunks that wait for it."""
        return list(self._waiting.values())

    def samples(self) -> Iterator[Sample]:
        """Yield for each tier the bytes in flight, and the chunks that wait; on any thread."""
        for tier, waiting in list(self._waiting.items()):
            yield INFLIGHT_BYTES, (tier.name,), self._kept_bytes[tier.name]
            yield WAITING_CHUNKS, (tier.name,), len(waiting)
