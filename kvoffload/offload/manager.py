"""Decides what is loaded from where, what is stored and evicted, and what is written through.

A chunk's life in host memory (kept in :mod:`kvoffload.offload.host`)::

    prepare_store → incoming ─complete_store→ ready ⇄ ready + pinned ─evicted→ gone
    prepare_load  → fetching ─complete_load─→ ready   (a chunk that was only on a lower tier)

Nothing here does I/O; write-through is handed out by ``take_transfers``.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload.backends.base import Presence, Removal, ReportsRemovals
from kvoffload.offload.base import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    Fetch,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    Reason,
    ReqContext,
    StagedLoadStoreSpec,
    Transfer,
)
from kvoffload.offload.host import HostLedger
from kvoffload.offload.policies.base import Policy

log = logging.getLogger(__name__)
CPU = "CPU"


@dataclass(frozen=True)
class Tier:
    """A store below host memory, as the ledger sees it."""

    name: str
    presence: Presence
    removals: ReportsRemovals | None = None

    @property
    def medium(self) -> str:
        """The name used in events."""
        return self.name.upper()

    def holds(self, key: OffloadKey) -> bool | None:
        """Ask the store's presence; whatever a plug-in raises is a miss."""
        try:
            return self.presence.holds(key)
        except Exception:
            log.exception("%s: looking up a chunk failed; taken as a miss", self.name)
            return False

    def forget(self, key: OffloadKey) -> None:
        """Tell the store's presence that a chunk could not be loaded."""
        try:
            self.presence.forget([key])
        except Exception:
            log.exception("%s: forgetting a chunk failed", self.name)

    def take_removals(self) -> list[Removal]:
        """Return what the store removed by itself."""
        try:
            return self.removals.take_removals() if self.removals else []
        except Exception:
            log.exception("%s: reporting removals failed", self.name)
            return []


class TieredOffloadingManager(OffloadingManager):
    """Host memory over any number of tiers, looked up in the order given.

    Args:
        host_slots: chunks that host memory holds.
        policy: orders idle chunks; made for this manager alone.
        tiers: stores below, nearest first. Stored chunks are written through to all of them.
        max_persisting_slots: host slots that write-through may pin at once. Chunks beyond it wait
            their turn unpinned; one that is evicted first is dropped from write-through and
            counted: a future miss, nothing else.
    """

    def __init__(
        self,
        host_slots: int,
        policy: Policy,
        tiers: Sequence[Tier] = (),
        max_persisting_slots: int | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._host = HostLedger(host_slots, policy)
        self._fetch_tier: dict[OffloadKey, Tier] = {}
        self._max_persisting = (
            max(1, host_slots // 2) if max_persisting_slots is None else max_persisting_slots
        )
        self._follow_ups: list[Transfer] = []
        self._events: list[OffloadingEvent] = []
        self._use_tiers(tiers)

    def _use_tiers(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        # Tier name → host slots its write-through pins now. Each tier has its own share of the
        # limit, so that one that hangs does not hold up the others.
        self._persisting = {tier.name: 0 for tier in tiers}
        self._persisting_limit = -(-self._max_persisting // max(1, len(tiers)))
        # Tier name → chunks waiting for their write-through, oldest first.
        self._waiting: dict[str, dict[OffloadKey, None]] = {tier.name: {} for tier in tiers}

    # ---- looking up ----

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """See :meth:`OffloadingManager.lookup`.

        A chunk being fetched for another request is None: it is about to be ready. One being stored
        is False: it is still in GPU memory, where the engine's own prefix cache finds it.
        """
        host = self._host
        if key in host.ready:
            return True
        if key in host.fetching:
            return None
        if host.moving(key):
            return False
        return self._find_below(key)[1]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> tuple[int, bool]:
        """See :meth:`OffloadingManager.lookup_prefix`.

        Hits on lower tiers count only as far as host memory has room to receive them.
        """
        host = self._host
        hits, idle_hits, from_below = 0, 0, 0
        answer: bool | None = False
        for key in keys:
            if key in host.ready:
                idle_hits += key not in host.pins
            else:
                answer = self.lookup(key, req_context)
                if not answer:
                    break
                from_below += 1
            if from_below and from_below > host.room_for(key) - idle_hits:
                answer = False
                break
            hits += 1
        pending = hits < len(keys) and answer is None
        self.counters["lookup_hits"] += hits
        if hits < len(keys):
            self.counters["lookup_pending" if pending else "lookup_misses"] += 1
        return hits, pending

    def _find_below(self, key: OffloadKey) -> tuple[Tier | None, bool | None]:
        """Return the first tier that holds a key, with True; or None with False or "ask again"."""
        answer: bool | None = False
        for tier in self.tiers:
            holds = tier.holds(key)
            if holds:
                return tier, True
            if holds is None:
                answer = None
        return None, answer

    # ---- loading ----

    def prepare_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> CPULoadStoreSpec:
        """See :meth:`OffloadingManager.prepare_load`."""
        host = self._host
        sources = self._sources(keys)
        here = [key for key, tier in zip(keys, sources, strict=False) if tier is None]
        # Pin what is here before making room for the rest, or it might be what is evicted.
        for key in here:
            host.pin(key)
        slots = self._reserve([key for key, tier in zip(keys, sources, strict=False) if tier])
        slots.reverse()
        host_slots: list[int] = []
        fetches: dict[Tier, list[int]] = {}
        for i, tier in enumerate(sources):
            if tier is None:
                host_slots.append(host.ready[keys[i]])
            elif slots:
                host.fetching[keys[i]] = slot = slots.pop()
                self._fetch_tier[keys[i]] = tier
                host_slots.append(slot)
                fetches.setdefault(tier, []).append(i)
            else:
                break
        for i in range(len(host_slots), len(sources)):
            if sources[i] is None:
                host.end_use(keys[i])
        self.counters["load_refused"] += len(keys) - len(host_slots)
        if not fetches:
            return CPULoadStoreSpec(host_slots)
        return StagedLoadStoreSpec(
            host_slots,
            [Fetch(t.name, tuple(at), tuple(keys[i] for i in at)) for t, at in fetches.items()],
        )

    def _sources(self, keys: Sequence[OffloadKey]) -> list[Tier | None]:
        """For the leading keys that can be had: None (in host memory) or the tier to fetch from."""
        host = self._host
        sources: list[Tier | None] = []
        named: set[OffloadKey] = set()
        for key in keys:
            tier = None
            if key not in host.ready:
                if host.moving(key) or key in named:
                    break
                tier = self._find_below(key)[0]
                if tier is None:
                    break
                named.add(key)
            sources.append(tier)
        return sources

    def complete_load(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """See :meth:`OffloadingManager.complete_load`."""
        host = self._host
        arrived: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        # From tail to head, so that of one prompt the tail is the older and leaves first.
        for key in reversed(list(keys)):
            source = self._fetch_tier.pop(key, None)
            if source and not success:
                source.forget(key)
            if key in host.fetching:
                slot = host.fetching.pop(key)
                if success:
                    host.become_ready(key, slot)
                    arrived.append(key)
                else:
                    host.give_back(slot, settled)
            elif key in host.pins:
                if not success:
                    host.forget(key)
                    lost.append(key)
                host.end_use(key, settled)
            elif host.orphaned(key):
                host.end_use(key, settled)
            else:
                self._unexpected("complete_load", key)
        self._record(lost[::-1], CPU, Reason.FAILED)
        self._record(arrived[::-1], CPU, Reason.STORED)

    # ---- storing ----

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """See :meth:`OffloadingManager.prepare_store`."""
        host = self._host
        new = [k for k in dict.fromkeys(keys) if k not in host.ready and not host.moving(k)]
        if not new:
            return PrepareStoreOutput((), CPULoadStoreSpec(()), ())
        slots, evicted = host.reserve(new, protected=keys)
        self._evicted(evicted)
        self.counters["store_refused"] += len(new) - len(slots)
        if not slots:
            return None
        stored = tuple(new[: len(slots)])
        host.incoming.update(zip(stored, slots, strict=True))
        return PrepareStoreOutput(stored, CPULoadStoreSpec(slots), tuple(evicted))

    def complete_store(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """See :meth:`OffloadingManager.complete_store`."""
        host = self._host
        stored: list[OffloadKey] = []
        for key in reversed(list(keys)):
            if key in host.incoming:
                slot = host.incoming.pop(key)
                if success:
                    host.become_ready(key, slot)
                    stored.append(key)
                else:
                    host.give_back(slot, settled)
                    self.counters["store_failed"] += 1
            elif host.orphaned(key):
                host.end_use(key, settled)
            else:
                self._unexpected("complete_store", key)
        stored.reverse()
        self._record(stored, CPU, Reason.STORED)
        for tier in self.tiers:
            self._write_through(tier, stored)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """See :meth:`OffloadingManager.touch`."""
        for key in reversed(keys):
            self._host.policy.touch(key)

    def retire(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """See :meth:`OffloadingManager.retire`."""
        policy = self._host.policy
        for key in reversed(keys):
            if key in policy:
                policy.remove(key)
                policy.add(key)

    # ---- write-through ----

    def _write_through(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        waiting = self._waiting[tier.name]
        waiting.update(dict.fromkeys(key for key in keys if not tier.holds(key)))
        while len(waiting) > self._host.num_slots:  # the oldest cannot all be resident any more
            del waiting[next(iter(waiting))]
            self.counters[f"persist_dropped_{tier.name}"] += 1
        self._begin_persisting(tier)

    def _begin_persisting(self, tier: Tier) -> None:
        """Hand out write-through for waiting chunks, as far as the limit on pins allows."""
        waiting = self._waiting[tier.name]
        batch: list[OffloadKey] = []
        while waiting and self._persisting[tier.name] < self._persisting_limit:
            key = next(iter(waiting))
            del waiting[key]
            if key in self._host.ready:
                self._host.pin(key)
                self._persisting[tier.name] += 1
                batch.append(key)
            else:
                self.counters[f"persist_dropped_{tier.name}"] += 1
        if batch:
            source = CPULoadStoreSpec([self._host.ready[key] for key in batch])
            target = BackendLoadStoreSpec(tier.name, batch)
            self._follow_ups.append(Transfer(source, target, tuple(batch), tier.name))

    def take_transfers(self) -> list[Transfer]:
        """See :meth:`OffloadingManager.take_transfers`."""
        taken, self._follow_ups = self._follow_ups, []
        return taken

    def complete_transfer(
        self, transfer: Transfer, ok: Sequence[bool], settled: bool = True
    ) -> None:
        """See :meth:`OffloadingManager.complete_transfer`."""
        if transfer.tier in self._persisting:
            self._persisting[transfer.tier] -= len(transfer.keys)
        for key in reversed(transfer.keys):
            self._host.end_use(key, settled)
        good = [key for key, fine in zip(transfer.keys, ok, strict=True) if fine]
        self.counters[f"persist_failed_{transfer.tier}"] += len(ok) - len(good)
        self._record(good, transfer.tier.upper(), Reason.STORED)
        for tier in self.tiers:
            self._begin_persisting(tier)

    def release_slots(self, host_slots: Iterable[int]) -> None:
        """See :meth:`OffloadingManager.release_slots`."""
        for slot in host_slots:
            if not self._host.release(slot):
                self.counters["unexpected_release"] += 1

    # ---- events, reset, self-check ----

    def _reserve(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots, evicted = self._host.reserve(keys) if keys else ([], [])
        self._evicted(evicted)
        return slots

    def _evicted(self, keys: Sequence[OffloadKey]) -> None:
        self.counters["evicted"] += len(keys)
        self._record(keys, CPU, Reason.EVICTED)

    def _record(self, keys: Sequence[OffloadKey], medium: str, reason: Reason) -> None:
        if keys:
            removed = reason is not Reason.STORED
            self._events.append(OffloadingEvent(tuple(keys), medium, removed, reason))

    def _unexpected(self, verb: str, key: OffloadKey) -> None:
        self.counters["unexpected_completion"] += 1
        log.warning("%s for chunk %s, which was not prepared", verb, key.hex())

    def take_events(self) -> list[OffloadingEvent]:
        """See :meth:`OffloadingManager.take_events`; includes what tiers evicted themselves."""
        for tier in self.tiers:
            for removal in tier.take_removals():
                reason = Reason.EVICTED if removal.reason == "evicted" else Reason.FAILED
                self._record([OffloadKey(removal.key)], tier.medium, reason)
        taken, self._events = self._events, []
        return taken

    def reset_cache(self) -> None:
        """See :meth:`OffloadingManager.reset_cache`.

        This is about host memory. If the bytes changed their meaning, give the tiers a new
        namespace and call :meth:`replace_tiers`.
        """
        self._record(self._host.forget_all(), CPU, Reason.RESET)
        for waiting in self._waiting.values():
            waiting.clear()

    def replace_tiers(self, tiers: Sequence[Tier]) -> None:
        """Use other stores below from now on; follow-ups not taken yet are dropped."""
        for waiting in self._waiting.values():
            waiting.clear()
        for transfer in self.take_transfers():
            self.complete_transfer(transfer, [False] * len(transfer.keys))
        self._use_tiers(tiers)

    @property
    def busy_slots(self) -> int:
        """Host slots that a transfer uses, or that wait for one to let go; 0 when all is quiet."""
        return self._host.busy_slots

    @property
    def resident(self) -> int:
        """Chunks loadable from host memory."""
        return len(self._host.ready)

    def check(self) -> None:
        """Raise UsageError if the ledger contradicts itself; for tests, O(host slots)."""
        self._host.check()
