"""Decides what is loaded from where, what is stored and evicted, and what is written through.

A chunk's life in host memory (kept in :mod:`kvoffload.offload.host_cache`)::

    prepare_store → incoming ─complete_store→ ready ⇄ ready + pinned ─evicted→ gone
    prepare_load  → fetching ─complete_load─→ ready   (a chunk that was only on a lower tier)

Nothing here does I/O; write-through is handed out by ``take_transfers``. Loads are in
:mod:`kvoffload.offload.loading`, stores in :mod:`kvoffload.offload.storing`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvoffload.config import HARMLESS_HINTS
from kvoffload.offload.admission import AdmissionFilter
from kvoffload.offload.base import (
    CPULoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    Reason,
    ReqContext,
    Transfer,
)
from kvoffload.offload.books import Books
from kvoffload.offload.events import CPU, EventLog
from kvoffload.offload.hints import Hints
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.loading import Loading
from kvoffload.offload.lookup import Lookups
from kvoffload.offload.miss_reasons import DROPPED
from kvoffload.offload.retirement import Retirement
from kvoffload.offload.stats import Stats, by_tier
from kvoffload.offload.storing import Storing
from kvoffload.offload.tiers import Tier
from kvoffload.offload.write_through import WriteThrough
from kvoffload.policies.base import Policy

__all__ = ["CPU", "Tier", "TieredOffloadingManager"]

REMEMBERED_DEPARTURES = 1 << 15
MIN_SIGHTINGS = 1 << 16


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
        client_hints: names of the hints that requests may use.
    """

    lookups_type = Lookups
    loading_type = Loading
    storing_type = Storing

    def __init__(
        self,
        host: HostCache | int,
        policy: Policy | None = None,
        tiers: Sequence[Tier] = (),
        max_persisting_slots: int | None = None,
        *,
        slot_bytes: int = 1,
        store_threshold: int = 1,
        promote: bool = True,
        client_hints: Iterable[str] = HARMLESS_HINTS,
    ) -> None:
        if isinstance(host, int):
            if policy is None:
                raise TypeError("a number of host slots needs a policy beside it")
            host = HostCache(host, policy, slot_bytes)
        self.counters: Counter[str] = Counter()
        self.figures = Stats()
        """What connectors measure: see :class:`Stats`."""
        self._host = host
        self._residence = EventLog(REMEMBERED_DEPARTURES, self.counters)
        self._lookups = self.lookups_type(host, self.figures, self.counters, client_hints)
        if max_persisting_slots is None:
            max_persisting_slots = max(1, host.num_slots // 2)
        self._write_through = WriteThrough(
            host,
            max_persisting_slots * max(1, host.slot_bytes),
            self.counters,
            self._dropped,
        )
        self._retirement = Retirement(host, self._write_through)
        self._books = Books(
            host, self._lookups, self._residence, self._write_through, self.counters, promote
        )
        self._loading = self.loading_type(self._books)
        self._sightings = AdmissionFilter(store_threshold, max(MIN_SIGHTINGS, 2 * host.num_slots))
        self._storing = self.storing_type(self._books, self._sightings)
        self._use_tiers(tiers)

    def _use_tiers(self, tiers: Sequence[Tier]) -> None:
        self.tiers = self._lookups.tiers = tuple(tiers)
        self._write_through.use(tiers)

    def _dropped(self, keys: Sequence[OffloadKey]) -> None:
        self._residence.departures.note(keys, DROPPED)
        self._retirement.landed(keys)

    # ---- looking up ----

    def hints(self, req_context: ReqContext | None) -> Hints:
        """Return what a request asks for; connectors obey ``max_load_tokens`` and ``explain``."""
        return self._lookups.hints(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """See :meth:`OffloadingManager.lookup`.

        A chunk being fetched for another request is None: it is about to be ready. One being stored
        is False: it is still in GPU memory, where the engine's own prefix cache finds it.
        """
        return self._host.is_ready(key) or self._lookups.find(key, req_context)

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> tuple[int, bool]:
        """See :meth:`OffloadingManager.lookup_prefix`.

        Hits on lower tiers count only as far as host memory has room to receive them.
        """
        return self._lookups.find_prefix(keys, req_context)

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether host memory can take all these chunks at once, as a load of them needs it."""
        return self._lookups.has_room(keys)

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
        return self._loading.prepare(keys, req_context)

    def complete_load(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
        reason: str = "",
    ) -> None:
        """See :meth:`OffloadingManager.complete_load`."""
        self._loading.complete(keys, req_context, success, settled, reason)

    # ---- storing ----

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """See :meth:`OffloadingManager.prepare_store`."""
        return self._storing.prepare(keys, req_context)

    def complete_store(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """See :meth:`OffloadingManager.complete_store`."""
        answered = tuple(keys)
        self._storing.complete(answered, req_context, success, settled)
        self._retirement.landed(answered)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """Give up storing chunks that were refused; see :class:`PrepareStoreOutput`."""
        self._storing.drop(keys)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """See :meth:`OffloadingManager.touch`."""
        self._sightings.see(keys, req_context.req_id if req_context else "")
        self._host.touch(keys[::-1])

    def retire(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """See :meth:`OffloadingManager.retire`."""
        self._lookups.forget_hints(req_context)
        self._retirement.retire(keys)

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
            self._books.unexpected("complete_transfer", transfer.keys[:1])
            return
        for key in reversed(transfer.keys):
            self._host.end_use(key, settled)
        good = [key for key, fine in zip(transfer.keys, ok, strict=True) if fine]
        self.counters[f"persist_failed_{transfer.tier}"] += len(ok) - len(good)
        if any(tier is current for current in self.tiers):  # not replaced meanwhile
            self._residence.written(tier, good)
        self._write_through.begin()
        self._retirement.landed(transfer.keys)

    def release_slots(self, host_slots: Iterable[int]) -> None:
        """See :meth:`OffloadingManager.release_slots`."""
        for slot in host_slots:
            if not self._host.release(slot):
                self.counters["unexpected_release"] += 1

    # ---- events, reset ----

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
        self._storing.clear()
        self._write_through.forget_waiting()
        self._retirement.clear()

    def replace_tiers(self, tiers: Sequence[Tier]) -> None:
        """Use other stores below from now on; follow-ups not taken yet are dropped.

        What is known to have been in the old ones counts as of another namespace.
        """
        self._write_through.forget_waiting()
        for transfer in self.take_transfers():
            self.complete_transfer(transfer, [False] * len(transfer.keys))
        self._residence.replaced(self.tiers)
        self._use_tiers(tiers)
        self._retirement.clear()

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
        return self._host.num_ready

    def check(self) -> None:
        """Raise UsageError if the ledger contradicts itself; for tests, O(host slots)."""
        self._host.check()
        self._retirement.check()
