"""Decides what is loaded from where, what is stored and evicted, and what is written through.

A chunk's life in host memory (:mod:`kvoffload.offload.host_cache`)::

    prepare_store → incoming ─complete→ ready ⇄ ready + pinned ─evicted→ gone
    begin_load    → fetching ─complete→ ready   (a chunk that was only on a lower tier)

Nothing here does I/O. Each transfer is one job, which the caller answers once with ``complete``.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import compress

from kvoffload.config import HARMLESS_HINTS
from kvoffload.errors import UsageError
from kvoffload.metrics.names import HOST
from kvoffload.offload.admission import make_filter
from kvoffload.offload.base import (
    NO_REQUEST,
    CPULoadStoreSpec,
    Job,
    LoadJob,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    Reason,
    ReqContext,
    StoreJob,
    WriteJob,
    request_id,
)
from kvoffload.offload.coming_sessions import ComingSessions
from kvoffload.offload.early_reads import EarlyReads
from kvoffload.offload.events import (
    CPU,
    DROPPED,
    EVICTED_BEFORE_RETURN,
    EVICTED_WHILE_WAITING,
    NEVER_STORED,
    NOT_ADMITTED,
    NOT_WANTED,
    TIER_DOWN,
    EventLog,
)
from kvoffload.offload.figures import NO_ROOM, ManagerFigures
from kvoffload.offload.hints import NO_HINTS, HintReader, Hints
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.in_flight import JobsInFlight
from kvoffload.offload.job import EarlyRead
from kvoffload.offload.lookup import Lookups
from kvoffload.offload.passthrough import PassThrough
from kvoffload.offload.promises import Promises
from kvoffload.offload.retirement import Retirement
from kvoffload.offload.returns import Returns
from kvoffload.offload.staging import Staging
from kvoffload.offload.tiers import Tier, WriteThrough
from kvoffload.offload.waiting import Place, WaitingQueue

__all__ = ["CPU", "Tier", "TieredOffloadingManager"]


class TieredOffloadingManager(OffloadingManager):
    """Host memory over any number of tiers, looked up in the order given.

    Args:
        host: host memory; used by this manager alone.
        tiers: stores below, nearest first. Stored chunks are written through to all of them.
        max_persisting_slots: host slots (rows, if chunks differ in size) that write-through may pin
            at once; default: a half. Further chunks wait unpinned. A chunk evicted while it waits
            is dropped and counted: a future miss, nothing else.
        caching: False keeps no chunk in host memory; see :mod:`kvoffload.offload.passthrough`.
        store_threshold: requests a chunk must be seen in to be stored.
        promote: whether a chunk loaded from a tier is also written to the nearer ones.
        client_hints: names of the hints that requests may use.
        load_timeout_s: how long a load may wait for its first chunk.
        waiting_share: of host memory, which queued requests may keep; 0: they keep nothing.
    """

    def __init__(
        self,
        host: HostCache,
        tiers: Sequence[Tier] = (),
        max_persisting_slots: int | None = None,
        *,
        caching: bool = True,
        store_threshold: int = 1,
        promote: bool = True,
        client_hints: Iterable[str] = HARMLESS_HINTS,
        load_timeout_s: float = float("inf"),
        waiting_share: float = 0.0,
    ) -> None:
        if max_persisting_slots is None:
            max_persisting_slots = max(1, host.num_slots // 2)
        self.figures = ManagerFigures(host)
        """What this manager and its connector have counted since the start."""
        self.figures.begin(tiers)
        self.counters = self.figures.events
        self._not_stored = self.figures.not_stored
        self.tiers = tuple(tiers)
        self._host = host
        self._caching = caching
        self._promote = promote
        self._hints = HintReader(self.counters, client_hints)
        self._admission = make_filter(store_threshold, host.num_slots)
        self.promises = Promises(
            host, self._tiers_of, self.figures.lookups, load_timeout_s, len(self.tiers)
        )
        """Which loads are worth their time; connectors ask."""
        self._events = EventLog(self.counters, self.figures.removals)
        host.on_evicted = self._events.evicted
        self._jobs = JobsInFlight(self.counters)
        self._num_resets = 0
        self.unexpected = self._jobs.unexpected
        """Counts and logs an answer that fits no job; takes the words for the answer."""
        limit_bytes = max_persisting_slots * host.slot_bytes
        self._write_through = WriteThrough(
            host, limit_bytes, self._not_stored, self._jobs, self._dropped
        )
        self._write_through.use(self.tiers)
        self._passthrough = PassThrough(host, self._write_through, promote)
        take = host.reserve if caching else self._passthrough.take_turns
        self._staging = Staging(host, take, caching)
        self._retirement = Retirement(host, self._write_through)
        share = waiting_share if caching else 0.0
        self.waiting = WaitingQueue(host, share, self.figures)
        """What queued requests need next; connectors say who queues, and who runs."""
        self._early = EarlyReads(
            host,
            self.waiting,
            self._tiers_of,
            lambda context: self.hints(context).tiers,
            self.promises,
            self._jobs,
            self.figures,
        )
        self.waiting.read_more = self._early.read_more
        self._lookups = Lookups(host, self.figures.lookups, caching, self._early.lacks_room)
        self.coming = ComingSessions(self.waiting, host, self._read_s, self.figures)
        """Sessions that said when they return."""
        self.returns = Returns(host, self.coming)
        """What ended requests said of that; connectors tell it the stores."""
        self.waiting.needed.is_telling = self.returns.is_telling = bool(self.tiers)
        self.figures.read(self.promises.samples, self._write_through.samples)

    # ---- lookups ----

    def hints(self, req_context: ReqContext | None) -> Hints:
        request, reader = req_context, self._hints
        if not request or not (request.kv_transfer_params or request.reads_tier or reader.known):
            return NO_HINTS
        return reader.hints(request, frozenset(tier.name for tier in self.tiers))

    def _tiers_for(self, names: Collection[str] | None) -> tuple[Tier, ...]:
        """Return the tiers of these names; all for None."""
        return tuple(t for t in self.tiers if t.name in names) if names is not None else self.tiers

    def _tiers_of(self, req_context: ReqContext | None) -> tuple[Tier, ...]:
        """Return the tiers that a request may load from."""
        tiers = self._tiers_for(self.hints(req_context).load_tiers)
        return self.promises.allowed(tiers, request_id(req_context))

    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        return self._host.is_ready(key) or self._lookups.find(key, self._tiers_of(req_context))

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> tuple[int, bool]:
        """Look up a prompt; hits on tiers count as far as host memory has room to receive them."""
        return self._lookups.find_prefix(keys, partial(self._tiers_of, req_context))

    def has_room(self, keys: Sequence[OffloadKey]) -> bool | None:
        return self._lookups.has_room(keys)

    def is_fetching(self, keys: Iterable[OffloadKey]) -> bool:
        if self.promises.has_full(self.tiers) or self._early.are_waited_for():
            return True
        return any(key in self._host.fetching for key in keys)

    def explain(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> list[str]:
        tiers, reason = self._tiers_of(req_context), self._events.reasons.reason
        declined = self.promises.declined(self.tiers, request_id(req_context))
        found = [self._lookups.place(key, tiers, declined) or reason(key) for key in keys]
        if (queued := self.waiting.requests.get(request_id(req_context))) is not None:
            was_here = {*queued.keys[: queued.num_here]}
            for i, key in enumerate(keys):
                if found[i] == Reason.EVICTED and key in was_here:
                    found[i] = EVICTED_WHILE_WAITING
        told = self.returns.told(keys, self.hints(req_context), request_id(req_context))
        found = [
            EVICTED_BEFORE_RETURN if where == Reason.EVICTED and key in told else where
            for where, key in zip(found, keys, strict=True)
        ]
        if not all(tier.presence.is_up for tier in tiers):
            unknown = (NEVER_STORED, Reason.EVICTED)
            found = [TIER_DOWN if where in unknown else where for where in found]
        return found

    # ---- loads ----

    def begin_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> LoadJob:
        request, hints = req_context or NO_REQUEST, self.hints(req_context)
        slots = self._host.pin_all(keys)
        if slots is not None:
            spec, sources, covered = CPULoadStoreSpec(slots), dict[OffloadKey, Tier](), tuple(keys)
        else:
            self._host.own(keys, request.tenant)
            tiers = self._tiers_for(hints.load_tiers)
            allowed = self.promises.allowed(tiers, request.req_id)
            spec, sources = self._staging.plan(keys, allowed)
            self._host.disown(keys)
            covered = tuple(keys[: len(spec.block_ids)])
            self.counters["load_refused"] += len(keys) - len(covered)
        spec.job_id = self._jobs.new_id()
        job = LoadJob(spec.job_id, covered, spec, req_context, len(keys), hints.tiers, sources)
        if covered:
            if self.waiting.requests:
                self.waiting.loads(request.req_id, covered)
            self._jobs[job.id] = job
            if sources:
                self.promises.begun(job)
        return job

    def _load_ended(self, job: LoadJob, ok: Sequence[bool], settled: bool, reason: str) -> None:
        if job.sources:
            self.promises.ended(job, () if settled else job.keys)
        # From tail to head, so that the tail of a prompt is the older and leaves first.
        elif settled and all(ok) and self._host.unpin_all(job.held[::-1]):
            self._retirement.landed(job.keys)
            return
        self._take_in(job, ok, settled, reason)

    def _take_in(
        self, job: LoadJob | EarlyRead, ok: Sequence[bool], settled: bool, reason: str
    ) -> Collection[OffloadKey]:
        """End a load or read chunk by chunk; return the chunks that arrived from tiers."""
        ended = self._staging.end_load(job, ok, settled)
        failed = [*ended.lost, *ended.missed]
        if self.waiting.requests or self._host.claims:
            self.waiting.stored(ended.arrived)
        if failed and not job.reset:  # or they are other chunks of these names
            self._events.reasons.note(failed, reason or Reason.FAILED)
            self._events.removed(ended.lost, Reason.FAILED)
            self.waiting.lost(failed)
        self._events.stored(ended.arrived)
        if self._promote and ended.arrived and len(self.tiers) > 1:
            self._write_through.promote(ended.arrived, job.sources, self._tiers_for(job.tiers))
        self._write_through.begin()
        self._retirement.landed(job.keys)
        return ended.arrived

    # ---- stores ----

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        hints = self.hints(req_context)
        if self._caching:
            new = self._host.absent(keys)
        else:
            new = self._passthrough.missing(keys, self._tiers_for(hints.tiers))
        if not hints.offload:
            self._leave_out(new, NOT_WANTED)
            new = []
        elif self._admission is not None:
            new, rest = self._admission.admit(new, request_id(req_context))
            self._leave_out(rest, NOT_ADMITTED)
        if not new:
            return PrepareStoreOutput((), CPULoadStoreSpec(()), ())
        # Named keys that are absent need no protection; mostly all of them are absent.
        protected = keys if len(new) < len(keys) else ()
        fitting = new if self._caching else self._passthrough.fitting(new)
        self._host.own(fitting, (req_context or NO_REQUEST).tenant)
        slots, evicted = self._host.reserve(fitting, protected)
        refused = tuple(new[len(slots) :])
        if refused:
            self._host.disown(refused)
            if self._caching and self._early.lacks_room() is False:
                self.drop(refused)
                refused = ()
        spec = CPULoadStoreSpec(slots)
        if not slots:
            return PrepareStoreOutput((), spec, tuple(evicted), refused) if refused else None
        spec.job_id = self._jobs.new_id()
        job = StoreJob(spec.job_id, tuple(new[: len(slots)]), spec, req_context, hints.tiers)
        self._jobs[job.id] = job
        self._host.incoming.update(zip(job.keys, slots, strict=True))
        if hints.priority:
            self._host.order.prioritise(job.keys, hints.priority)
        return PrepareStoreOutput(job.keys, spec, tuple(evicted), refused, job)

    def _leave_out(self, keys: Sequence[OffloadKey], reason: str) -> None:
        if keys:
            self._not_stored[HOST, reason] += len(keys)
            self._events.reasons.note(keys, reason)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """Count chunks that are not stored for lack of room; see :class:`PrepareStoreOutput`."""
        self._not_stored[NO_ROOM] += len(keys)
        self._events.reasons.note(keys, DROPPED)

    def _store_ended(self, job: StoreJob, ok: Sequence[bool], settled: bool) -> None:
        stored: Sequence[OffloadKey] = job.held
        failed: Sequence[OffloadKey] = ()
        if not (settled and all(ok) and self._host.all_ready(stored[::-1], self._host.incoming)):
            stored, failed = self._staging.end_store(stored, ok, settled)
            self._not_stored[HOST, "failed"] += len(failed)
            self._events.reasons.note(failed, Reason.FAILED)
        if self.waiting.requests or self._host.claims:
            self.waiting.stored(stored)
            self.waiting.lost(failed)
        if stored:
            if self._caching:
                self._events.stored(stored)
            for tier in self._tiers_for(job.tiers):
                self._write_through.offer(tier, stored)
            if not self._caching:
                for key in stored:
                    self._host.forget(key)
                self._write_through.begin()  # drops chunks that no tier had room for
        self._retirement.landed(job.keys)

    # ---- answers ----

    def complete(
        self, job: Job, ok: Sequence[bool], settled: bool = True, reason: str = ""
    ) -> None:
        if len(ok) != len(job.keys):
            raise UsageError(f"{len(ok)} answers for a job of {len(job.keys)} chunks")
        if not job.keys:
            return  # a load that found no room: it is not in flight
        if self._jobs.get(job.id) is not job:
            self.unexpected(f"job {job.id}")
            return
        del self._jobs[job.id]
        if isinstance(job, WriteJob):
            self._transfer_ended(job, ok, settled)
        elif isinstance(job, LoadJob):
            self._load_ended(job, ok, settled, reason)
        elif isinstance(job, StoreJob):
            self._store_ended(job, ok, settled)
        elif isinstance(job, EarlyRead):
            arrived = self._take_in(job, ok, settled, reason)
            self._early.ended(job, ok, settled, arrived)

    def _transfer_ended(self, transfer: WriteJob, ok: Sequence[bool], settled: bool) -> None:
        held = transfer.held[::-1]
        if not (settled and self._host.unpin_all(held)):
            for name in held:
                self._host.end_use(name, settled)
        good = list(compress(transfer.keys, ok))
        self._not_stored[transfer.tier.name, "failed"] += len(ok) - len(good)
        if transfer.tier in self.tiers:  # not replaced meanwhile
            self._events.written(transfer.tier, good)
        if settled:
            self._write_through.settled(transfer)
        self._retirement.landed(transfer.keys)

    def release_slots(self, host_slots: Iterable[int], job: Job | None = None) -> None:
        # From tail to head, as all chunks return to the order.
        released = [self._host.release(slot) for slot in reversed(list(host_slots))]
        if unexpected := released.count(None):
            self.counters["unexpected_release"] += unexpected
        if isinstance(job, LoadJob):
            self.promises.released(job)
        elif isinstance(job, EarlyRead):
            self._early.released(job)
        elif isinstance(job, WriteJob):
            self._write_through.settled(job)
        self._retirement.landed([key for chunks in released for key in chunks or ()])

    # ---- the same by keys ----

    def complete_load(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
        reason: str = "",
    ) -> None:
        for job in self._jobs.take_parts(LoadJob, keys, req_context):
            self._load_ended(job, (success,) * len(job.keys), settled, reason)

    def complete_store(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        for job in self._jobs.take_parts(StoreJob, keys, req_context):
            self._store_ended(job, (success,) * len(job.keys), settled)

    # ---- write-through, events, reset ----

    def has_transfers(self) -> bool:
        return bool(self._jobs.begun)

    def take_transfers(self) -> list[WriteJob | EarlyRead]:
        taken, self._jobs.begun = self._jobs.begun, []
        return taken

    def _dropped(self, keys: Sequence[OffloadKey]) -> None:
        self._events.reasons.note(keys, DROPPED)
        self._retirement.landed(keys)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, with the chunks that tiers evicted themselves."""
        return self._events.take_events(self.tiers)

    def reset_cache(self) -> None:
        """Forget every chunk in host memory; transfers in flight end as if they were removed.

        If the bytes changed their meaning, also give the tiers a new namespace and call
        :meth:`replace_tiers`.
        """
        self._num_resets += 1
        gone = self._host.forget_all(self._num_resets)
        for job in self._jobs.values():
            job.reset = job.reset or self._num_resets
        self.waiting.begin_again()
        self._events.reasons.note(gone, Reason.RESET)
        self._events.removed(gone, Reason.RESET)
        if self._admission is not None:
            self._admission.clear()
        self._write_through.forget_waiting()
        self._retirement.clear()

    def replace_tiers(self, tiers: Sequence[Tier]) -> None:
        self._write_through.forget_waiting()
        for transfer in self.take_transfers():
            self.complete(transfer, [False] * len(transfer.keys))
        self._events.replaced(self.tiers)
        self.tiers = tuple(tiers)
        self.figures.begin(tiers)
        self._write_through.use(self.tiers)
        self.waiting.needed.is_telling = self.returns.is_telling = bool(self.tiers)
        self._retirement.clear()

    # ---- uses ----

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        if self._admission is not None:
            self._admission.see(keys, request_id(req_context))
        if req_context is not None and (req_context.kv_transfer_params or self.returns.are_told):
            self.returns.began(keys, self.hints(req_context), req_context.req_id)
        self._host.order.touch(keys[::-1])  # the head is the most recent

    # ---- the engine's queue ----

    def request_queued(
        self,
        list_keys: Callable[[], Sequence[OffloadKey]],
        req_context: ReqContext,
        was_preempted: bool = False,
    ) -> None:
        place = Place.PREEMPTED if was_preempted else Place.ARRIVED
        self.waiting.add(list_keys, req_context, place)

    def request_answered(self, req_context: ReqContext, is_pending: bool) -> None:
        if self.waiting.requests:
            self.waiting.answered(req_context.req_id, is_pending)

    def request_admitted(self, req_context: ReqContext) -> None:
        if self.waiting.requests:
            self.waiting.leave(req_context.req_id)

    def serve_queue(self) -> bool:
        num_begun = len(self._jobs.begun)
        if self.coming.times:
            self.coming.serve()
        self.waiting.serve()
        return len(self._jobs.begun) > num_begun

    def _read_s(self, keys: Sequence[OffloadKey]) -> float:
        """Return how long reading chunks takes, from the first tier of which it is known."""
        num_bytes = self._host.bytes_of_all(keys)
        return next(
            filter(None, (self.promises.read_s(t.name, num_bytes) for t in self.tiers)), 0.0
        )

    def retire(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        hints = NO_HINTS
        if req_context is not None:
            if self.waiting.requests or self.waiting.claims.leaving:
                self.waiting.ended(req_context.req_id)
            if req_context.kv_transfer_params or self._hints.known:
                hints = self.hints(req_context)
                self._hints.forget(req_context.req_id)
            self.promises.forget(req_context.req_id)
        self._retirement.retire(keys)
        if hints is not NO_HINTS or self.returns.are_told:
            request = req_context or NO_REQUEST
            self.returns.ended(keys, hints, request.req_id, request.tenant)

    # ---- figures ----

    @property
    def busy_slots(self) -> int:
        return self._host.busy_slots

    @property
    def resident(self) -> int:
        return self._host.num_ready
