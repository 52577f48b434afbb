"""Early reads: what a queued request needs and only a tier has comes while the request waits.

The first requests of the queue come first. A tier's early reads, late ones included, keep a bounded
part of host memory, and count as its loads do. None begins while the tier loads for a request that
runs, or keeps all that it may. They evict nothing that is kept for an earlier request. A load or
store that lacks the room that they keep waits until they have ended, and none begins meanwhile.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from kvoffload.messages import BackendLoadStoreSpec, CPULoadStoreSpec, OffloadKey
from kvoffload.metrics.names import QUEUE_CHUNKS
from kvoffload.metrics.samples import Registry
from kvoffload.offload.base import ReqContext
from kvoffload.offload.claims import QueuedRequest
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.in_flight import JobsInFlight
from kvoffload.offload.job import EarlyRead
from kvoffload.offload.promises import Promises
from kvoffload.offload.tiers import Tier, first_holder
from kvoffload.offload.waiting import PORTION, WaitingQueue

MOST_BYTES, MOST_S = 64 << 20, 0.2
"""Host memory that the early reads of a tier keep, or as much as the tier reads in that time.

A step of the engine may take as long, and a load behind them waits no longer. One read takes half
of it, so that the tier reads on until the engine's next step."""
PART = 8
"""In small host memory they keep this part of it."""
HELD_BACK_S = 1.0
"""So long after a load or store lacked room no read begins: it is looked at again by then."""
ASKED_AHEAD = 64
"""Chunks after one without an answer that tiers are asked about in the same step."""


class EarlyReads:
    """Begins early reads and takes in how they end.

    Args:
        host: host memory.
        queue: of requests.
        tiers_of: returns the tiers that a request may load from.
        stored_on: returns the names of those that its chunks may be stored on; None: all.
        promises: knows what each tier loads for running requests.
        jobs: the manager's jobs in flight.
        figures: counts the chunks that were read.
    """

    def __init__(
        self,
        host: HostCache,
        queue: WaitingQueue,
        tiers_of: Callable[[ReqContext], tuple[Tier, ...]],
        stored_on: Callable[[ReqContext], tuple[str, ...] | None],
        promises: Promises,
        jobs: JobsInFlight,
        figures: Registry,
    ) -> None:
        self._host = host
        self._queue = queue
        self._tiers_of = tiers_of
        self._stored_on = stored_on
        self._promises = promises
        self._jobs = jobs
        self._limit_bytes = min(host.capacity_bytes // PART, promises.share_bytes // 2)
        self._held_back_until_s = 0.0
        self._counts = figures.counter(QUEUE_CHUNKS, "read_early")

    def lacks_room(self) -> bool | None:
        """Note that a load or store lacks room; return None if reads in flight keep some."""
        self._held_back_until_s = self._host.now_s() + HELD_BACK_S
        return None if self._are_in_flight() else False

    def are_waited_for(self) -> bool:
        """Whether a load or store lacked room lately, and reads in flight keep some."""
        return self._are_held_back() and self._are_in_flight()

    def _are_in_flight(self) -> bool:
        return any(isinstance(job, EarlyRead) for job in self._jobs.values())

    def _are_held_back(self) -> bool:
        # Or the clock has jumped.
        return 0 < self._held_back_until_s - self._host.now_s() <= HELD_BACK_S

    def read_more(self, request: QueuedRequest) -> bool:
        """Begin to read what a request needs next; return whether to call this again for it."""
        if request.is_pending:
            # A load of its own is faster than many reads. The engine asks again in each step, or
            # it has become full meanwhile.
            request.is_pending = False
            return True
        if not request.has_waited:
            request.has_waited = True  # or each request would, in an engine without a queue
            return True
        # What another tier has as well does not wait for one that hangs.
        tiers = tuple(sorted(self._tiers_of(request.context), key=self._promises.hangs))
        while self._begin_one(request, tiers):
            if request.num_kept == request.num_keys:
                return False
        tier, answer = first_holder(request.keys[request.num_kept], tiers)
        return tier is not None or answer is None

    def _begin_one(self, request: QueuedRequest, tiers: tuple[Tier, ...]) -> bool:
        """Begin a read of a request's next chunks, if there is room; return whether it did."""
        first = request.num_kept
        part = request.keys[first : min(first + PORTION, request.num_keys)]
        tier, answer = first_holder(part[0], tiers)
        if tier is None:
            if answer is None:
                for key in part[1:ASKED_AHEAD]:
                    if first_holder(key, tiers)[1] is False:
                        break
            return False
        kept_bytes, most_bytes = self._promises.early_bytes(tier.name), self._most_bytes(tier)
        room = min(most_bytes - kept_bytes, most_bytes // 2)
        if (kept_bytes and room <= 0) or not self._promises.may_read_early(tier.name):
            return False
        if self._are_held_back():
            return False
        keys = self._on_tier(tier, part)
        fits = self._host.fitting(keys, room)
        if not fits and not kept_bytes:
            fits = 1  # a chunk larger than the budget is read when nothing else is
        fits = self._queue.claims.fitting(request, keys[:fits])
        self._host.own(keys[:fits], request.context.tenant)
        slots = self._slots_for(request, keys[:fits])
        self._host.disown(keys[len(slots) : fits])
        if slots:
            self._begin(request, tier, keys[: len(slots)], slots)
        return bool(slots)

    def _most_bytes(self, tier: Tier) -> int:
        """Return how much host memory the early reads of a tier may keep."""
        seconds = self._promises.read_s(tier.name, MOST_BYTES) or MOST_S
        return min(int(MOST_BYTES * max(1.0, MOST_S / seconds)), self._limit_bytes)

    def _on_tier(self, tier: Tier, part: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the leading chunks that the tier has and host memory has not, once each."""
        if not (run := part[: tier.num_leading(part)]):
            run = [*takewhile(tier.holds, part)]
        host = self._host
        new = [*takewhile(lambda key: not (host.is_ready(key) or host.moving(key)), run)]
        new = [*takewhile(lambda key: key not in host.claims, new)]
        return new if len(set(new)) == len(new) else new[:1]

    def _slots_for(self, request: QueuedRequest, keys: Sequence[OffloadKey]) -> list[int]:
        self._queue.claims.served = request
        try:
            return self._host.reserve(keys)[0] if keys else []
        finally:
            self._queue.claims.served = None

    def _begin(
        self, request: QueuedRequest, tier: Tier, keys: Sequence[OffloadKey], slots: list[int]
    ) -> None:
        self._host.fetching.update(zip(keys, slots, strict=True))
        self._queue.claims.begin(request, keys)
        spec = CPULoadStoreSpec(slots)
        source = BackendLoadStoreSpec(tier.name, tuple(keys), self._host.tenants_of(keys))
        job_id = self._jobs.new_id()
        num_bytes = self._host.bytes_of_all(keys)
        job = EarlyRead(
            job_id,
            source.keys,
            spec,
            (source, spec),
            tier,
            num_bytes,
            request,
            self._stored_on(request.context),
        )
        self._promises.keeps_early(tier.name, num_bytes)
        self._jobs.begin(job)

    def ended(
        self, job: EarlyRead, ok: Sequence[bool], settled: bool, arrived: Collection[OffloadKey]
    ) -> None:
        """Take in the answer of a read, after that of its chunks.

        Args:
            job: the read.
            ok: for each chunk, whether it succeeded.
            settled: whether nothing uses its slots any more; :meth:`released` tells it later.
            arrived: chunks that host memory has now.
        """
        self._counts["read_early"] += len(arrived)
        self._queue.has_read(job.request, arrived)
        late_bytes = 0 if settled else job.num_bytes
        self._promises.keeps_early(job.tier.name, -job.num_bytes, late_bytes, any(ok))
        job.num_bytes = late_bytes

    def released(self, job: EarlyRead) -> None:
        """Take in that nothing writes to the slots of an answered read any more."""
        self._promises.keeps_early(job.tier.name, 0, -job.num_bytes)
