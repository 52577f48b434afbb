"""The engine's queue: what its requests need next stays in host memory until they run.

The leading chunks of a queued request get a *claim* (:mod:`kvoffload.offload.claims`): they leave
the eviction order. The first requests of the queue get their claims first. When no chunk without a
claim is left to evict, the last request gives way, from its tail on. So claims never refuse a slot
to a running request. Where the share is full, it gives way to an earlier request as well.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum, auto
from itertools import count, islice

from kvoffload.messages import OffloadKey
from kvoffload.metrics.names import QUEUE_CHUNKS, QUEUE_KEPT_BYTES, QUEUE_REQUESTS
from kvoffload.metrics.samples import Registry, Sample
from kvoffload.offload.base import ReqContext
from kvoffload.offload.claims import Claims, QueuedRequest, Tenant, drop, in_order, insert
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.needed_chunks import NeededChunks

PORTION = 256
"""Chunks that one call looks at: a longer prompt gets its claims over several calls."""
LISTED, LISTED_REQUESTS = 2048, 128
"""Chunks of new requests, and new requests, after which a call lists no more."""
TRIES = 16
"""Requests that one call looks at: half of them the first in the queue, half of them in turn."""
AGAIN_S, FIRST = 0.5, 64
"""So often a look at the first requests whose next chunk no tier had."""
MAX_REQUESTS = 1 << 16
"""Further requests wait without claims."""


class Place(Enum):
    """Where a request enters the queue."""

    PREEMPTED = auto()
    """At the beginning: it ran before."""
    ARRIVED = auto()
    """Behind the requests that are there."""
    AWAITED = auto()
    """Behind all requests: its session said that it returns."""


class WaitingQueue:
    """Gives claims to the chunks of queued requests, a bounded number in each call.

    Args:
        host: host memory.
        share: of host memory, for claims; 0: requests wait without claims.
        figures: counts the chunks by what became of them.
    """

    def __init__(
        self,
        host: HostCache,
        share: float,
        figures: Registry,
    ) -> None:
        self._host = host
        self.read_more: Callable[[QueuedRequest], bool] = lambda request: False
        """Called for a request whose next chunk host memory lacks; returns whether to call it
        again."""
        self._numbers = {
            Place.PREEMPTED: count(-1, -1),
            Place.ARRIVED: count(1),
            Place.AWAITED: count(1 << 62),
        }
        self.requests: dict[str, QueuedRequest] = {}
        """By their name."""
        self._newcomers: dict[QueuedRequest, None] = {}
        """Those whose chunks are not listed yet."""
        self._unfinished: list[QueuedRequest] = []
        """Those to be looked at again, the first of the queue first."""
        self._looked_at: QueuedRequest | None = None
        """The last request that was looked at."""
        self._look_s = 0.0
        """When to look at requests whose next chunk no tier had."""
        self._lacking: dict[OffloadKey, dict[QueuedRequest, None]] = {}
        """Chunk → requests that need it next, and are looked at again when it is stored."""
        self.claims = Claims(host, share, figures, self._look_at)
        self.needed = NeededChunks()
        """What stores are told of the queue."""
        self._counts = figures.counter(QUEUE_CHUNKS, "read_in_vain")
        figures.read(self._samples)

    # ---- a request's way ----

    def add(
        self,
        list_keys: Callable[[], Sequence[OffloadKey]],
        context: ReqContext,
        place: Place = Place.ARRIVED,
    ) -> None:
        """Put a request into the queue; one of its name leaves it.

        Args:
            list_keys: lists its chunks, head to tail; called by the next :meth:`serve`, or a later
                one, if the request waits until then. The caller may add to the list, and change
                nothing else.
            context: of the request, with its tenant.
            place: where it enters.
        """
        self.leave(context.req_id)
        if not self.claims.share_bytes or len(self.requests) >= MAX_REQUESTS:
            return
        tenant = self.claims.joins(context.tenant)
        request = QueuedRequest(next(self._numbers[place]), context, tenant, list_keys)
        self.requests[context.req_id] = request
        self._newcomers[request] = None

    def _take_in(self) -> None:
        """List the chunks of newcomers."""
        left = LISTED
        for request in [*islice(self._newcomers, LISTED_REQUESTS)]:
            del self._newcomers[request]
            request.keys = request.list_keys()
            request.num_keys = len(request.keys)
            request.num_here = self._host.num_leading(request.keys)
            self._look_at(request)
            self.needed.add(request.number, request.keys)
            left -= request.num_keys
            if left <= 0:
                break

    def answered(self, req_id: str, is_pending: bool) -> None:
        """Note whether the engine has to ask again what a request can load.

        After a final answer one that does not run waits for blocks.
        """
        if (request := self.requests.get(req_id)) is not None:
            request.is_pending = is_pending

    def leave(self, req_id: str) -> None:
        """Take out a request that runs or has ended; harmless for one that is unknown.

        Of a long prompt's claims, this call ends some, and each :meth:`serve` some more. Until then
        they give way first.
        """
        if (request := self.requests.pop(req_id, None)) is None:
            return
        drop(self._unfinished, request)
        self._newcomers.pop(request, None)
        self.needed.leave(request.number)
        self._note_lack(request, None)
        self._counts["read_in_vain"] += len(request.read_early)
        self.claims.leaves(request)
        self._end_claims()

    def ended(self, req_id: str) -> None:
        """Take out a request that has ended, and end all its claims now."""
        self.leave(req_id)
        for request in [each for each in self.claims.leaving if each.context.req_id == req_id]:
            self._end_some(request, request.num_kept)

    def _end_claims(self) -> int:
        """End claims of requests that have left; return how many chunks may be looked at yet."""
        left, leaving = PORTION, self.claims.leaving
        while left and leaving:
            left -= self._end_some(next(iter(leaving)), left)
        return left

    def _end_some(self, request: QueuedRequest, most: int) -> int:
        """End the last claims of a request that has left; return how many."""
        num_ended = min(most, request.num_kept)
        self.claims.end(request, num_ended)
        if not request.num_kept:
            self.claims.left(request)
            tenants = self.claims.tenants
            for tenant in tenants.values() if len(tenants) < 2 else (request.tenant,):
                self._look_again(tenant)
        return num_ended

    def _is_here(self, request: QueuedRequest) -> bool:
        return self.requests.get(request.context.req_id) is request

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Look again at requests that need one of these chunks, which host memory has now."""
        self.claims.came(keys)
        lacking = self._lacking
        if not lacking or lacking.keys().isdisjoint(keys):
            return
        again = [request for key in keys for request in lacking.pop(key, ())]
        for request in again:
            request.lacks = None
        self._unfinished = in_order(self._unfinished, again)

    def _note_lack(self, request: QueuedRequest, key: OffloadKey | None) -> None:
        if request.lacks is not None:
            requests = self._lacking[request.lacks]
            del requests[request]
            if not requests:
                del self._lacking[request.lacks]
        if key is not None:
            self._lacking.setdefault(key, {})[request] = None
        request.lacks = key

    def loads(self, req_id: str, keys: Sequence[OffloadKey]) -> None:
        """Note that a request loads these chunks: none of them was read early in vain."""
        if (request := self.requests.get(req_id)) is not None and request.read_early:
            request.read_early = request.read_early.difference(keys)

    def has_read(self, request: QueuedRequest, keys: Collection[OffloadKey]) -> None:
        """Note chunks that were read for a request, which may have left meanwhile."""
        if self._is_here(request):
            request.read_early = request.read_early.union(keys)
        else:
            self._counts["read_in_vain"] += len(keys)

    def lost(self, keys: Collection[OffloadKey]) -> None:
        """Take in that chunks are gone, or will not come: requests that claim one look again.

        Of many requests, this call ends the claims of some, and each :meth:`serve` of some more.
        """
        if self.claims.lost(keys):
            self._end_lost(PORTION)

    def _end_lost(self, left: int) -> int:
        """End claims on chunks that are gone; return how many chunks may be looked at yet."""
        if self.claims.gone:
            losers, left = self.claims.end_lost(left)
            for request in losers:
                self._note_lack(request, None)
                self._look_at(request)
        return left

    def serve(self) -> None:
        """Go on with claims; call it once a step."""
        if self._newcomers:
            self._take_in()
        self.needed.serve()
        if self._lacking:
            self._look_at_lacking()
        claims = self.claims
        left = self._end_lost(self._end_claims())
        if not self._unfinished and claims.too_large is None:
            return
        left = claims.shrink(left)
        for request in self._next_looks():
            if not left or not claims.have_room(request):
                return
            self._looked_at = request
            if claims.has_lost(request):
                continue  # until its claims on what is gone have ended, or it has come again
            if not claims.tenant_has_room(request):
                drop(self._unfinished, request)
                request.tenant.full.append(request)
                continue
            left -= claims.extend(request, left)
            if left and self._is_at_end(request):
                drop(self._unfinished, request)

    def _next_looks(self) -> list[QueuedRequest]:
        """Return the first requests to look at, and further ones in turn.

        All of the first ones may wait for a slow tier.
        """
        requests, half = self._unfinished, TRIES // 2
        at = half
        if self._looked_at is not None:
            at = max(half, bisect_right(requests, self._looked_at))
        return [*requests[:half], *(requests[at : at + half] or requests[half : 2 * half])]

    def _look_at_lacking(self) -> None:
        """Look from time to time at first requests whose next chunk no tier had.

        A tier that was opened again lists its chunks late, and other engines may store there.
        """
        now_s = self._host.now_s()
        if 0 < self._look_s - now_s <= AGAIN_S:  # or the clock has jumped
            return
        self._look_s = now_s + AGAIN_S
        for request in islice(self.requests.values(), FIRST):
            if request.lacks is not None:
                self._note_lack(request, None)
                self._look_at(request)

    def begin_again(self) -> None:
        """Look at all requests again: host memory has forgotten all chunks, and their claims."""
        requests = self.requests.values()
        for request in requests:
            request.lacks, request.read_early = None, frozenset()
        self.claims.forget(requests)
        self._end_claims()
        self._lacking.clear()
        waiting = (each for each in requests if each not in self._newcomers)
        self._unfinished = in_order(waiting)

    # ---- which to look at again ----

    def _is_at_end(self, request: QueuedRequest) -> bool:
        """Whether no further chunk of a request can be kept."""
        if request.num_kept == request.num_keys:
            return True
        key = request.keys[request.num_kept]
        if key in self._host.claims or self._host.is_ready(key) or self._host.moving(key):
            return False  # it lacked room
        if self.read_more(request):
            return False
        self._note_lack(request, key)
        return True

    def _look_at(self, request: QueuedRequest) -> None:
        insert(self._unfinished, request)

    def _look_again(self, tenant: Tenant) -> None:
        if tenant.full:
            self._unfinished = in_order(self._unfinished, filter(self._is_here, tenant.full))
            tenant.full = []

    # ---- figures ----

    def _samples(self) -> Iterator[Sample]:
        yield QUEUE_REQUESTS, (), len(self.requests)
        yield QUEUE_KEPT_BYTES, (), self.claims.held_bytes
