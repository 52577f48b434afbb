"""Decides what is loaded from where, what is stored and evicted, and what is written through.

A chunk's life in host memory (kept in :mod:`kvoffload.offload.host`)::

    prepare_store → incoming ─complete_store→ ready ⇄ ready + pinned ─evicted→ gone
    prepare_load  → fetching ─complete_load─→ ready   (a chunk that was only on a lower tier)

Nothing here does I/O; write-through is handed out by ``take_transfers``. Whole batches go through
the ledger in few calls; a batch with something unusual in it goes chunk by chunk.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from kvoffload.offload.admission import Sightings
from kvoffload.offload.base import (
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
from kvoffload.offload.departures import DROPPED
from kvoffload.offload.figures import Figures, by_tier
from kvoffload.offload.hints import Hints
from kvoffload.offload.host import HostLedger
from kvoffload.offload.lookups import Lookups
from kvoffload.offload.policies.base import Policy
from kvoffload.offload.residence import CPU, Residence
from kvoffload.offload.tiers import Tier, first_holder
from kvoffload.offload.write_through import WriteThrough

__all__ = ["CPU", "Tier", "TieredOffloadingManager"]

log = logging.getLogger(__name__)
REMEMBERED_DEPARTURES = 1 << 16
MIN_SIGHTINGS = 1 << 16
MAX_WARNINGS = 20
"""Unexpected answers that are logged; the others are only counted."""


class TieredOffloadingManager(OffloadingManager):
    """Host memory over any number of tiers, looked up in the order given.

    Args:
        host: the ledger of host memory; or how many chunks of one size it holds.
        policy: orders idle chunks, if ``host`` is a number; made for this manager alone.
        tiers: stores below, nearest first. Stored chunks are written through to all of them.
        max_persisting_slots: host slots (rows, if chunks differ in size) that write-through may pin
            at once; default: a half. Chunks beyond it wait their turn unpinned; one that is evicted
            first is dropped from write-through and counted: a future miss, nothing else.
        slot_bytes: bytes of a slot, if ``host`` is a number; for figures in bytes.
        store_threshold: requests a chunk must be seen in to be stored.
        promote: whether what is loaded from a tier is also written to the nearer ones.
    """

    def __init__(
        self,
        host: HostLedger | int,
        policy: Policy | None = None,
        tiers: Sequence[Tier] = (),
        max_persisting_slots: int | None = None,
        *,
        slot_bytes: int = 1,
        store_threshold: int = 1,
        promote: bool = True,
    ) -> None:
        if isinstance(host, int):
            if policy is None:
                raise TypeError("a number of host slots needs a policy beside it")
            host = HostLedger(host, policy, slot_bytes)
        self.counters: Counter[str] = Counter()
        self.figures = Figures()
        """What connectors measure: see :class:`Figures`."""
        self._host = host
        self._fetch_tier: dict[OffloadKey, Tier] = {}
        self._residence = Residence(REMEMBERED_DEPARTURES)
        self._lookups = Lookups(host, self.figures, self.counters)
        self._promotes = promote
        self._sightings = Sightings(store_threshold, max(MIN_SIGHTINGS, 2 * host.num_slots))
        # Chunks being stored for a request that wants them on some tiers only.
        self._only_tiers: dict[OffloadKey, tuple[str, ...]] = {}
        if max_persisting_slots is None:
            max_persisting_slots = max(1, host.num_slots // 2)
        self._write_through = WriteThrough(
            host,
            max_persisting_slots * max(1, host.slot_bytes),
            self.counters,
            lambda keys: self._residence.departures.note(keys, DROPPED),
        )
        self._use_tiers(tiers)

    def _use_tiers(self, tiers: Sequence[Tier]) -> None:
        self.tiers = self._lookups.tiers = tuple(tiers)
        self._write_through.use(tiers)

    # ---- looking up ----

    def hints(self, req_context: ReqContext | None) -> Hints:
        """Return what a request asks for; connectors obey ``max_load_tokens``."""
        return self._lookups.hints(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """See :meth:`OffloadingManager.lookup`.

        A chunk being fetched for another request is None: it is about to be ready. One being stored
        is False: it is still in GPU memory, where the engine's own prefix cache finds it.
        """
        return key in self._host.ready or self._lookups.find(key, req_context)

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> tuple[int, bool]:
        """See :meth:`OffloadingManager.lookup_prefix`.

        Hits on lower tiers count only as far as host memory has room to receive them.
        """
        return self._lookups.find_prefix(keys, req_context)

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether host memory can take all these chunks at once, as a load of them needs it."""
        return self._host.has_room(keys)

    def explain(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> list[str]:
        """Say for each chunk where it is or why it is not; for people, not for every step.

        Returns:
            ``CPU`` or the medium of a tier; ``storing``, ``fetching`` or ``pending`` if that is not
            decided yet; else the reason of the miss, see ``docs/manager.md``.
        """
        where = [self._lookups.whereabouts(key, req_context) for key in keys]
        return [
            place or self._residence.departures.reason(key)
            for key, place in zip(keys, where, strict=True)
        ]

    # ---- loading ----

    def prepare_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> CPULoadStoreSpec:
        """See :meth:`OffloadingManager.prepare_load`."""
        host = self._host
        try:
            slots = list(map(host.ready.__getitem__, keys))
        except KeyError:
            pass
        else:
            if host.pin_all(keys):
                return CPULoadStoreSpec(slots)
        return self._prepare_staged_load(keys, self._lookups.tiers_for(req_context))

    def _prepare_staged_load(
        self, keys: Sequence[OffloadKey], tiers: tuple[Tier, ...]
    ) -> CPULoadStoreSpec:
        host = self._host
        sources = self._sources(keys, tiers)
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

    def _sources(self, keys: Sequence[OffloadKey], tiers: tuple[Tier, ...]) -> list[Tier | None]:
        """For the leading keys that can be had: None (in host memory) or the tier to fetch from."""
        host = self._host
        sources: list[Tier | None] = []
        named: set[OffloadKey] = set()
        for key in keys:
            tier = None
            if key not in host.ready:
                if host.moving(key) or key in named:
                    break
                tier = first_holder(key, tiers)[0]
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
        reason: str = "",
    ) -> None:
        """See :meth:`OffloadingManager.complete_load`."""
        # From tail to head, so that of one prompt the tail is the older and leaves first.
        backwards = list(keys)[::-1]
        if success and settled and not self._host.fetching and self._host.unpin_all(backwards):
            return
        host = self._host
        arrived: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        missed: list[OffloadKey] = []
        promotions: dict[Tier, list[OffloadKey]] = {}
        for key in backwards:
            source = self._fetch_tier.pop(key, None)
            if source and not success:
                source.forget(key)
                missed.append(key)
            if key in host.fetching:
                slot = host.fetching.pop(key)
                if success:
                    host.become_ready(key, slot)
                    arrived.append(key)
                    if source and self._promotes:
                        promotions.setdefault(source, []).append(key)
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
        self._residence.departures.note([*lost, *missed], reason or Reason.FAILED)
        self._residence.record(lost[::-1], CPU, Reason.FAILED)
        self._residence.record(arrived[::-1], CPU, Reason.STORED)
        for source, fetched in promotions.items():
            self._promote(source, fetched[::-1], req_context)
        self._write_through.begin()

    def _promote(
        self, source: Tier, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> None:
        """What came from a tier goes to the nearer ones, too: next time it is faster from there."""
        for tier in self._lookups.tiers_for(req_context):
            if tier is source:
                return
            self._write_through.offer(tier, keys)

    # ---- storing ----

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """See :meth:`OffloadingManager.prepare_store`."""
        host = self._host
        new = host.absent(keys)
        hints = self._lookups.hints(req_context)
        if not hints.offload:
            self.counters["store_not_wanted"] += len(new)
            self._residence.departures.note(new, "not_wanted")
            new = []
        elif self._sightings.threshold > 1:
            new = self._admit(new, req_context)
        if not new:
            return PrepareStoreOutput((), CPULoadStoreSpec(()), ())
        # What is named and not here needs no protection: mostly that is all of it.
        protected = keys if len(new) < len(keys) else ()
        slots, evicted = host.reserve(new, protected)
        self.counters["evicted"] += len(evicted)
        self._residence.evicted(evicted)
        if len(slots) < len(new):
            self.counters["store_refused"] += len(new) - len(slots)
            self._residence.departures.note(new[len(slots) :], DROPPED)
            if not slots:
                return None
        stored = tuple(new[: len(slots)])
        host.incoming.update(zip(stored, slots, strict=True))
        host.prioritise(stored, hints.priority)
        if hints.tiers is not None:
            self._only_tiers.update(dict.fromkeys(stored, hints.tiers))
        return PrepareStoreOutput(stored, CPULoadStoreSpec(slots), tuple(evicted))

    def _admit(self, keys: list[OffloadKey], req_context: ReqContext | None) -> list[OffloadKey]:
        admitted = self._sightings.admitted(keys, req_context.req_id if req_context else "")
        if len(admitted) < len(keys):
            here = set(admitted)
            self.counters["store_not_admitted"] += len(keys) - len(admitted)
            self._residence.departures.note(
                [key for key in keys if key not in here], "not_admitted"
            )
        return admitted

    def complete_store(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """See :meth:`OffloadingManager.complete_store`."""
        keys = stored = list(keys)
        if not (success and settled and self._host.all_ready(stored[::-1])):
            stored = self._complete_store_one_by_one(stored, success, settled)
        self._residence.record(stored, CPU, Reason.STORED)
        only = {key: self._only_tiers.pop(key, None) for key in keys} if self._only_tiers else {}
        for tier in self.tiers if stored else ():
            wanted = stored
            if only:
                wanted = [k for k in stored if (t := only.get(k)) is None or tier.name in t]
            self._write_through.offer(tier, wanted)

    def _complete_store_one_by_one(
        self, keys: Sequence[OffloadKey], success: bool, settled: bool
    ) -> list[OffloadKey]:
        """Return what is stored now."""
        host = self._host
        stored: list[OffloadKey] = []
        failed: list[OffloadKey] = []
        for key in reversed(keys):
            if key in host.incoming:
                slot = host.incoming.pop(key)
                if success:
                    host.become_ready(key, slot)
                    stored.append(key)
                else:
                    host.give_back(slot, settled)
                    failed.append(key)
            elif host.orphaned(key):
                host.end_use(key, settled)
            else:
                self._unexpected("complete_store", key)
        self.counters["store_failed"] += len(failed)
        self._residence.departures.note(failed, Reason.FAILED)
        stored.reverse()
        return stored

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """See :meth:`OffloadingManager.touch`."""
        self._sightings.see(keys, req_context.req_id if req_context else "")
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

    def take_transfers(self) -> list[Transfer]:
        """See :meth:`OffloadingManager.take_transfers`."""
        return self._write_through.take()

    def complete_transfer(
        self, transfer: Transfer, ok: Sequence[bool], settled: bool = True
    ) -> None:
        """See :meth:`OffloadingManager.complete_transfer`."""
        tier = self._write_through.ended(transfer)
        if tier is None:
            self._unexpected("complete_transfer", *transfer.keys[:1])
            return
        for key in reversed(transfer.keys):
            self._host.end_use(key, settled)
        good = [key for key, fine in zip(transfer.keys, ok, strict=True) if fine]
        self.counters[f"persist_failed_{transfer.tier}"] += len(ok) - len(good)
        if any(tier is current for current in self.tiers):  # not replaced meanwhile
            self._residence.written(tier, good)
        self._write_through.begin()

    def release_slots(self, host_slots: Iterable[int]) -> None:
        """See :meth:`OffloadingManager.release_slots`."""
        for slot in host_slots:
            if not self._host.release(slot):
                self.counters["unexpected_release"] += 1

    # ---- events, reset ----

    def _reserve(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots, evicted = self._host.reserve(keys) if keys else ([], [])
        self.counters["evicted"] += len(evicted)
        self._residence.evicted(evicted)
        return slots

    def _unexpected(self, verb: str, *keys: OffloadKey) -> None:
        self.counters["unexpected_completion"] += 1
        if self.counters["unexpected_completion"] <= MAX_WARNINGS:
            named = keys[0].hex() if keys else "none"
            log.warning("%s for chunk %s, which was not prepared", verb, named)

    def take_events(self) -> list[OffloadingEvent]:
        """See :meth:`OffloadingManager.take_events`; includes what tiers evicted themselves."""
        return self._residence.take_events(self.tiers)

    def reset_cache(self) -> None:
        """See :meth:`OffloadingManager.reset_cache`.

        This is about host memory. If the bytes changed their meaning, give the tiers a new
        namespace and call :meth:`replace_tiers`.
        """
        gone = self._host.forget_all()
        self._residence.departures.note(gone, Reason.RESET)
        self._residence.record(gone, CPU, Reason.RESET)
        self._sightings.clear()
        self._only_tiers.clear()
        self._write_through.forget_waiting()

    def replace_tiers(self, tiers: Sequence[Tier]) -> None:
        """Use other stores below from now on; follow-ups not taken yet are dropped.

        What is known to have been in the old ones counts as of another namespace.
        """
        self._write_through.forget_waiting()
        for transfer in self.take_transfers():
            self.complete_transfer(transfer, [False] * len(transfer.keys))
        self._residence.replaced(self.tiers)
        self._use_tiers(tiers)

    # ---- figures, self-check ----

    def stats(self) -> dict[str, object]:
        """Return all figures as plain data; see ``docs/manager.md``."""
        host = self._host
        return {
            "host": {
                "capacity_bytes": host.capacity_bytes,
                "resident_bytes": host.resident_bytes,
                "inflight_bytes": host.inflight_bytes,
                "resident_chunks": self.resident,
                "busy_chunks": self.busy_slots,
            },
            "write_through": {t.medium: self._write_through.figures(t.name) for t in self.tiers},
            "removed": self._residence.removed_by_medium(),
            "counters": dict(self.counters),
            **by_tier(self.counters, self.tiers),
            **self.figures.as_dict(),
        }

    @property
    def busy_slots(self) -> int:
        """Chunks' slots that a transfer uses, or that wait for one to let go; 0 when quiet."""
        return self._host.busy_slots

    @property
    def resident(self) -> int:
        """Chunks loadable from host memory."""
        return len(self._host.ready)

    def check(self) -> None:
        """Raise UsageError if the ledger contradicts itself; for tests, O(host slots)."""
        self._host.check()
