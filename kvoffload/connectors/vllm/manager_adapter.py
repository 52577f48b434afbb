"""Our manager behind the interface that vLLM's offloading scheduler calls."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.kv_offload.base import OffloadingManager as VllmManager
from vllm.v1.kv_offload.base import PrepareStoreOutput as VllmStoreOutput
from vllm.v1.kv_offload.base import ReqContext as VllmContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.connectors.jobs import UseCounter
from kvoffload.connectors.vllm.engine_metrics import USAGE, StatsPublisher
from kvoffload.connectors.vllm.quiet_steps import KnownLookup
from kvoffload.metrics.samples import Sample, total
from kvoffload.offload.base import (
    ChunksRemoved,
    CPULoadStoreSpec,
    LoadJob,
    Manager,
    OffloadKey,
    ReqContext,
    StoreJob,
    tenant_id,
)
from kvoffload.offload.hints import NO_HINTS, Hints
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import CPU, TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy

log = logging.getLogger(__name__)

_ANSWERS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


@dataclass
class RequestNotes:
    """What our half notes of a request; vLLM keeps it with the request."""

    context: ReqContext
    is_kept_out: bool = False
    """Whether nothing is loaded for it, and nothing of it is stored."""
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """The chunks that its loads and stores named."""
    known: KnownLookup | None = None
    """What its last lookup has answered."""
    was_answered: bool = False
    """Whether a lookup of it has ended."""
    num_failed_loads: int = 0
    offered_s: float | None = None
    """Since when vLLM has known of a load that it has not begun; monotonic."""
    old_blocks: set[int] = field(default_factory=set)
    """The GPU blocks that it had when it was preempted last."""


def notes_of(req_context: VllmContext) -> RequestNotes:
    """Return the notes of a request; one that was not noted before has no salt."""
    notes: RequestNotes | None = req_context.get_state(RequestNotes)
    if notes is None:
        notes = RequestNotes(our_context(req_context))
        req_context.set_state(notes)
    return notes


class ManagerAdapter(VllmManager):  # type: ignore[misc]  # untyped base
    """vLLM's manager verbs over a :class:`Manager`, which :meth:`attach` brings.

    vLLM's scheduler completes jobs without saying how they ended. So ``complete_*`` do nothing
    here: the owner of this adapter takes the jobs with :meth:`take_jobs` and answers the manager
    from the workers' reports.
    """

    def __init__(self) -> None:
        self.manager: Manager = TieredOffloadingManager(HostCache(0, LRUPolicy(0)))
        """Has room for nothing until :meth:`attach` brings another one."""
        self.read_whole: Callable[[VllmContext], Iterable[OffloadKey]] = lambda req_context: ()
        """Lists a request's chunks of full attention, as far as they are full. Set by the owner."""
        self._uses = UseCounter(self.manager)
        self._num_slots = 0
        """Those of the attached manager; 0 before."""
        self.stats = StatsPublisher()
        self.worker_figures: dict[int, bytes] = {}
        """Rank → its figures, as its last report had them; set by the owner."""
        self.changes = 0
        """Rises with each change after which a lookup may be answered otherwise."""
        self._jobs: dict[int, LoadJob | StoreJob] = {}
        self._media: dict[OffloadKey, str] = {}
        """The medium of each chunk of the last load."""
        self.refused: dict[str, tuple[OffloadKey, ...]] = {}
        """For each request, chunks of this step that may be offered again; taken by the owner."""
        self.unplaced: dict[str, tuple[OffloadKey, ...]] = {}
        """The same, where none of its chunks found room; they are counted as refused."""

    def attach(self, manager: Manager, num_slots: int) -> None:
        """Use this manager from now on. Before, lookups are repeated and nothing is stored."""
        manager.counters.update(self.manager.counters)
        self.manager = manager
        self.changes += 1
        self._uses = UseCounter(manager)
        self._num_slots = num_slots

    def note_request(self, req_context: VllmContext, salt: str | None, is_trusted: bool) -> None:
        """Note whose a request is, and whether it is kept out of all tiers."""
        context = our_context(req_context, tenant_id(salt))
        req_context.set_state(RequestNotes(context, is_kept_out=not is_trusted))
        if not is_trusted:
            self.count("requests_not_trusted")

    def count(self, event: str) -> None:
        """Count an event of the metric's list."""
        self.manager.counters[event] += 1

    def take_jobs(self) -> dict[int, LoadJob | StoreJob]:
        """Return the jobs begun since the last call, by the ``job_id`` of their specs."""
        taken, self._jobs = self._jobs, {}
        return taken

    # ---- looking up ----

    def on_new_request(self, req_context: VllmContext) -> RequestOffloadingContext:
        """See vLLM: chunks are offered as they are computed."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: VllmContext) -> LookupResult:
        """See vLLM; RETRY never lasts beyond the lookup deadline of the tiers."""
        notes = notes_of(req_context)
        if notes.is_kept_out:
            return LookupResult.MISS
        if not self._num_slots:
            return LookupResult.RETRY
        return _ANSWERS[self.manager.lookup(key, notes.context)]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: VllmContext
    ) -> tuple[int, bool]:
        notes = notes_of(req_context)
        if notes.is_kept_out:
            return 0, False
        if not self._num_slots:
            return 0, bool(keys)
        return self.manager.lookup_prefix(keys, notes.context)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note how long the engine took to compute tokens of prompts."""
        self.manager.promises.prefilled(num_tokens, seconds)

    def hints(self, req_context: VllmContext) -> Hints:
        """Return what a request asks for."""
        if not self._num_slots:
            return NO_HINTS  # which may be used, and the names of tiers, are known later
        return self.manager.hints(notes_of(req_context).context)

    def explain(self, keys: Sequence[OffloadKey], req_context: VllmContext) -> list[str]:
        if notes_of(req_context).is_kept_out:
            return ["not_trusted"] * len(keys)
        return self.manager.explain(keys, notes_of(req_context).context)

    def get_load_source(self, key: OffloadKey, req_context: VllmContext) -> CacheHitSource:
        """Name the tier a chunk of the load just prepared comes from."""
        medium = self._media.get(key, CPU)
        if medium == CPU:
            return CacheHitSource.HOST
        on_disk = medium.startswith("DISK")
        return CacheHitSource.DISK if on_disk else CacheHitSource.EXTERNAL_UNSPECIFIED

    # ---- the queue ----

    def request_queued(
        self,
        list_keys: Callable[[], Sequence[OffloadKey]],
        req_context: VllmContext,
        was_preempted: bool = False,
    ) -> None:
        """Keep what a request that waits will load; see :meth:`Manager.request_queued`."""
        notes = notes_of(req_context)
        if not notes.is_kept_out:
            self.manager.request_queued(list_keys, notes.context, was_preempted)

    def serve_queue(self) -> None:
        """Go on with what queued requests need; call it once a step."""
        # A chunk that is read early is not to be loaded from its tier any more.
        self.changes += self.manager.serve_queue()

    # ---- loading and storing ----

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: VllmContext
    ) -> CPULoadStoreSpec:
        """See vLLM; the spec may cover only the leading keys."""
        wanted = list(keys)
        notes = self._count_use(wanted, req_context, wanted)
        job = self.manager.begin_load(wanted, notes.context)
        self.changes += 1
        self._media = dict(zip(job.keys, job.media(), strict=True))
        self._jobs[job.id] = job
        return job.spec

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: VllmContext
    ) -> VllmStoreOutput:
        if notes_of(req_context).is_kept_out:
            return VllmStoreOutput([], CPULoadStoreSpec(()), [])  # None would be offered again
        wanted, output = list(keys), None
        if self._num_slots:  # else all are offered again, and none counts as lost
            notes = self._count_use(wanted, req_context)
            output = self.manager.prepare_store(wanted, notes.context)
        if output is None:  # vLLM would log a line a request and step
            self.unplaced[req_context.req_id] = tuple(wanted)
            return VllmStoreOutput([], CPULoadStoreSpec(()), [])
        if output.refused_keys:
            self.refused[req_context.req_id] = output.refused_keys
        if output.job is not None:
            self.changes += 1
            self._jobs[output.job.id] = output.job
        return VllmStoreOutput(
            list(output.keys_to_store), output.store_spec, list(output.evicted_keys)
        )

    # ---- the rest ----

    def _count_use(
        self,
        named: Sequence[OffloadKey],
        req_context: VllmContext,
        loaded: Sequence[OffloadKey] = (),
    ) -> RequestNotes:
        """Count a request before room is made for what its first load or store names."""
        notes = notes_of(req_context)
        self._uses.count(notes.context, lambda: self._in_order(loaded, req_context))
        notes.keys.update(dict.fromkeys(named))
        return notes

    def _in_order(self, named: Iterable[OffloadKey], req_context: VllmContext) -> list[OffloadKey]:
        """Return these chunks of a request and those of full attention, from head to tail."""
        whole = self.read_whole(req_context)
        place = req_context.get_offload_key_position
        return sorted(dict.fromkeys(chain(whole, named)), key=lambda key: place(key) or 0)

    def on_request_finished(self, req_context: VllmContext) -> None:
        """Let the tail of a request's chunks leave before their head; does not count as a use."""
        if self._num_slots:
            notes = notes_of(req_context)
            self._uses.end(notes.context, lambda: self._in_order(notes.keys, req_context))

    def take_events(self) -> Iterable[VllmEvent]:
        """Translate the manager's events."""
        for event in self.manager.take_events():
            on_host, locality = event.medium == CPU, _locality(event.medium)
            yield VllmEvent(
                keys=list(event.keys),
                medium=Medium.CPU if on_host else Medium.STORAGE,
                removed=isinstance(event, ChunksRemoved),
                locality=locality,
                removal_expected=locality is Locality.LOCAL,  # other servers evict untold
            )

    def reset_cache(self) -> None:
        """Forget everything in host memory; the tiers' owner renews them."""
        self.changes += 1
        self.manager.reset_cache()

    def get_stats(self) -> Any:
        """Report the counts since the last call, under vLLM's metric names where they fit."""
        return self.stats.collect(self._samples)

    def _samples(self) -> Iterator[Sample]:
        yield USAGE, (), self.manager.busy_slots / max(1, self._num_slots)
        yield from self.manager.figures.samples()
        yield from total(self.worker_figures.values())


def _locality(medium: str) -> Locality:
    # Only a tier that several machines are known to share is called remote.
    is_shared = medium.rstrip("0123456789") in ("REDIS", "OBJECT", "FOLDER")
    return Locality.REMOTE if is_shared else Locality.LOCAL


def our_context(req_context: VllmContext, tenant: bytes = b"") -> ReqContext:
    """Translate vLLM's context of a request, its wish ``kv_load_tiers`` among it."""
    wished = req_context.load_tier_filter
    return ReqContext(
        req_context.req_id,
        req_context.kv_transfer_params,
        None if wished is TierFilter.ALL else partial(_allows, wished),
        tenant,
    )


def _allows(wished: TierFilter, tier: str) -> bool:
    return bool(wished.allows(Medium.STORAGE, _locality(tier.upper())))
