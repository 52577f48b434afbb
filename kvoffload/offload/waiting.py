"""The engine's queue: what its requests need next stays in host memory until they run.

The leading chunks of a queued request get a *claim*: they leave the eviction order. The first
requests of the queue get their claims first. When no chunk without a claim is left to evict, the
last request gives way, from its tail on. So claims never refuse a slot to a running request.

Claims take at most a share of host memory. While requests of several tenants wait, one tenant's
claims take at most half of the share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, count, islice
from operator import indexOf

from kvoffload.errors import UsageError
from kvoffload.messages import OffloadKey
from kvoffload.metrics.names import QUEUE_CHUNKS, QUEUE_KEPT_BYTES, QUEUE_REQUESTS
from kvoffload.metrics.samples import Registry, Sample
from kvoffload.offload.base import ReqContext
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


@dataclass(eq=False, slots=True)
class Tenant:
    """The queued requests of one tenant."""

    name: bytes
    num_requests: int = 0
    held_bytes: int = 0
    """Of the chunks whose first claim was its."""
    full: list[int] = field(default_factory=list)
    """Requests that found it at its limit."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request in the queue."""

    number: int
    """Its place: requests that come first have lower ones."""
    context: ReqContext
    tenant: Tenant
    list_keys: Callable[[], Sequence[OffloadKey]]
    keys: Sequence[OffloadKey] = ()
    """Of its chunks, head to tail; the connector's, which may add to them."""
    num_keys: int = 0
    num_here: int = 0
    """Leading chunks that host memory had when it came."""
    num_kept: int = 0
    """Leading chunks that have its claim."""
    has_waited: bool = False
    """Whether it waits for a step, at least."""
    is_asked: bool = False
    """Whether the engine has asked what it can load: its turn has come."""
    lacks: OffloadKey | None = None
    """The chunk that it needs next, if neither host memory nor a tier has it."""
    read_early: frozenset[OffloadKey] = frozenset()
    """Chunks that were read for it, and that it has not loaded."""


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
        self._share_bytes = self._limit_bytes = int(share * host.capacity_bytes)
        self._held_bytes = 0
        self._numbers = {
            Place.PREEMPTED: count(-1, -1),
            Place.ARRIVED: count(1),
            Place.AWAITED: count(1 << 62),
        }
        self._number_of: dict[str, int] = {}
        self.requests: dict[int, QueuedRequest] = {}
        """By their number."""
        self._newcomers: dict[int, QueuedRequest] = {}
        """Those whose chunks are not listed yet."""
        self.needed = NeededChunks()
        """What stores are told of the queue."""
        self._tenants: dict[bytes, Tenant] = {}
        self._too_large: Tenant | None = None
        """The tenant that may have claims beyond its limit, as it was alone before."""
        # Numbers of requests, the first of the queue first: with claims; to be looked at again.
        self._claimants: list[int] = []
        self._unfinished: list[int] = []
        self._looked_at = 0
        """The last request that was looked at."""
        self._look_s = 0.0
        """When to look at requests whose next chunk no tier had."""
        self._lacking: dict[OffloadKey, dict[int, None]] = {}
        """Chunk → requests that need it next, and are looked at again when it is stored."""
        self._more: dict[OffloadKey, int] = {}
        """How many requests beyond the first have a claim on a chunk."""
        self.gives_way = True
        """False while room is made for a request that waits."""
        self._counts = figures.counter(QUEUE_CHUNKS, "kept", "given_up", "read_in_vain")
        figures.read(self._samples)
        if share:
            host.allow_claims(self._give_way)

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
        if context.req_id in self._number_of:
            self.leave(context.req_id)
        if not self._share_bytes or len(self.requests) >= MAX_REQUESTS:
            return
        if (owner := self._tenants.get(context.tenant)) is None:
            if len(self._tenants) == 1:
                (self._too_large,) = self._tenants.values()
            owner = self._tenants[context.tenant] = Tenant(context.tenant)
        owner.num_requests += 1
        number = next(self._numbers[place])
        request = QueuedRequest(number, context, owner, list_keys)
        self.requests[number] = self._newcomers[number] = request
        self._number_of[context.req_id] = number

    def _take_in(self) -> None:
        """List the chunks of newcomers."""
        left = LISTED
        for number in [*islice(self._newcomers, LISTED_REQUESTS)]:
            request = self._newcomers.pop(number)
            request.keys = request.list_keys()
            request.num_keys = len(request.keys)
            request.num_here = self._leading_here(request.keys)
            self._insert(self._unfinished, number)
            self.needed.add(number, request.keys)
            left -= request.num_keys
            if left <= 0:
                break

    def asked(self, req_id: str) -> None:
        """Note that a request's turn has come, though it may have to wait for blocks."""
        if (number := self._number_of.get(req_id)) is not None:
            self.requests[number].is_asked = True

    def get(self, req_id: str) -> QueuedRequest | None:
        """Return a request if it is in the queue."""
        return self.requests.get(self._number_of.get(req_id, 0))

    def leave(self, req_id: str) -> None:
        """End the claims of a request that runs or has ended; harmless for one that is unknown."""
        if (number := self._number_of.pop(req_id, None)) is None:
            return
        request = self.requests.pop(number)
        self._drop(self._unfinished, number)
        self._newcomers.pop(number, None)
        self.needed.leave(number)
        self._note_lack(request, None)
        self._end_claims(request, request.num_kept)
        self._counts["read_in_vain"] += len(request.read_early)
        self._limit_bytes = self._share_bytes
        request.tenant.num_requests -= 1
        if not request.tenant.num_requests:
            del self._tenants[request.tenant.name]
        for tenant in self._tenants.values() if len(self._tenants) < 2 else (request.tenant,):
            self._look_again(tenant)

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Look again at requests that need one of these chunks, which host memory has now."""
        lacking = self._lacking
        if not lacking or lacking.keys().isdisjoint(keys):
            return
        again = [number for key in keys for number in lacking.pop(key, ())]
        for number in again:
            self.requests[number].lacks = None
        self._unfinished = sorted({*self._unfinished, *again})

    def _note_lack(self, request: QueuedRequest, key: OffloadKey | None) -> None:
        if request.lacks is not None:
            numbers = self._lacking[request.lacks]
            del numbers[request.number]
            if not numbers:
                del self._lacking[request.lacks]
        if key is not None:
            self._lacking.setdefault(key, {})[request.number] = None
        request.lacks = key

    def loads(self, req_id: str, keys: Sequence[OffloadKey]) -> None:
        """Note that a request loads these chunks: none of them was read early in vain."""
        if (request := self.get(req_id)) is not None and request.read_early:
            request.read_early = request.read_early.difference(keys)

    def has_read(self, request: QueuedRequest, keys: Collection[OffloadKey]) -> None:
        """Note chunks that were read for a request, which may have left meanwhile."""
        if request.number in self.requests:
            request.read_early = request.read_early.union(keys)
        else:
            self._counts["read_in_vain"] += len(keys)

    def lost(self, keys: Collection[OffloadKey]) -> None:
        """Take in that chunks are gone, or will not come: requests that claim one look again."""
        if not keys or not (gone := self._host.claims.keys() & set(keys)):
            return
        for number in self._claimants.copy():
            request = self.requests[number]
            if not gone.isdisjoint(islice(request.keys, request.num_kept)):
                at = next(i for i, key in enumerate(request.keys) if key in gone)
                self._end_claims(request, request.num_kept - at, gone)
                self._note_lack(request, None)
                self._insert(self._unfinished, number)

    def serve(self) -> None:
        """Go on with claims; call it once a step."""
        if self._newcomers:
            self._take_in()
        self.needed.serve()
        if self._lacking:
            self._look_at_lacking()
        if not self._unfinished and self._too_large is None:
            return
        left = self._shrink(PORTION)
        for number in self._next_looks():
            if not left or self._held_bytes >= self._limit_bytes:
                return
            self._looked_at = number
            request = self.requests[number]
            if self.room_bytes(request) <= 0:
                self._drop(self._unfinished, number)
                request.tenant.full.append(number)
                continue
            left -= self._claim_more(request, left)
            if left and self._is_at_end(request):
                self._drop(self._unfinished, number)

    def _next_looks(self) -> list[int]:
        """Return the first requests to look at, and further ones in turn.

        All of the first ones may wait for a slow tier.
        """
        numbers, half = self._unfinished, TRIES // 2
        at = max(half, bisect_right(numbers, self._looked_at))
        return [*numbers[:half], *(numbers[at : at + half] or numbers[half : 2 * half])]

    def _look_at_lacking(self) -> None:
        """Look from time to time at first requests whose next chunk no tier had.

        A tier that was opened again lists its chunks late, and other engines may store there.
        """
        now_s = self._host.now_s()
        if 0 < self._look_s - now_s <= AGAIN_S:  # or the clock has jumped
            return
        self._look_s = now_s + AGAIN_S
        for request in islice(self.requests.values(), FIRST):
            if request.lacks is not None and not request.is_asked:
                self._note_lack(request, None)
                self._insert(self._unfinished, request.number)

    def begin_again(self) -> None:
        """Look at all requests again: host memory has forgotten all chunks, and their claims."""
        for request in self.requests.values():
            request.num_kept, request.lacks, request.read_early = 0, None, frozenset()
        for tenant in self._tenants.values():
            tenant.held_bytes, tenant.full = 0, []
        self._lacking.clear()
        self._more.clear()
        self._claimants = []
        self._unfinished = sorted(self.requests.keys() - self._newcomers.keys())
        self._held_bytes, self._limit_bytes = 0, self._share_bytes
        self._too_large = None

    # ---- claims ----

    def _leading_here(self, keys: Sequence[OffloadKey]) -> int:
        host = self._host
        here = indexOf(chain(map(host.evictable.__contains__, keys), (False,)), False)
        while host.pinned and here < len(keys) and host.is_ready(keys[here]):
            here += 1
        return here

    def _tenant_limit(self) -> int:
        return self._share_bytes // 2 if len(self._tenants) > 1 else self._share_bytes

    def room_bytes(self, request: QueuedRequest) -> int:
        """Return the bytes of the chunks that may be claimed for a request."""
        of_tenant = self._tenant_limit() - request.tenant.held_bytes
        return min(self._limit_bytes - self._held_bytes, of_tenant)

    def _claim_more(self, request: QueuedRequest, most: int) -> int:
        """Claim further leading chunks that host memory has; return how many were looked at."""
        host, claims, left = self._host, self._host.claims, most
        while left and request.num_kept < request.num_keys:
            first = request.num_kept
            part = request.keys[first : min(first + left, request.num_keys)]
            fits = host.fitting(part, self.room_bytes(request))
            if part[0] in claims:
                taken = self._share_claims(part)
            elif not fits:
                break
            elif not (taken := self._claim_idle(request, part[:fits])):
                if not (host.is_ready(part[0]) or host.is_coming(part[0])):
                    break
                self._claim(request, part[:1])  # it is in flight
                taken = 1
            request.num_kept = first + taken
            left -= taken
        if request.num_kept:
            self._insert(self._claimants, request.number)
        return most - left

    def _share_claims(self, part: Sequence[OffloadKey]) -> int:
        """Claim the leading chunks of ``part`` that have a claim already; return how many."""
        claims, more = self._host.claims, self._more
        taken = indexOf(chain(map(claims.__contains__, part), (False,)), False)
        for key in part[:taken]:
            more[key] = more.get(key, 0) + 1
        return taken

    def _claim_idle(self, request: QueuedRequest, part: Sequence[OffloadKey]) -> int:
        """Claim the leading chunks that are idle in host memory; return how many."""
        host, claims = self._host, self._host.claims
        taken = indexOf(chain(map(host.evictable.__contains__, part), (False,)), False)
        if claims and not claims.keys().isdisjoint(part[:taken]):
            taken = indexOf(map(claims.__contains__, part), True)
        if len(set(part[:taken])) < taken:  # a prompt cannot have a chunk twice
            taken = 1
        if taken:
            self._claim(request, part[:taken])
        return taken

    def _claim(self, request: QueuedRequest, keys: Sequence[OffloadKey]) -> None:
        """Claim chunks without a claim; the caller counts them in ``num_kept``."""
        num_bytes = self._host.bytes_of_all(keys)
        self._host.claim(keys, request.tenant)
        request.tenant.held_bytes += num_bytes
        self._held_bytes += num_bytes
        self._counts["kept"] += len(keys)

    def claim_read(self, request: QueuedRequest, keys: Sequence[OffloadKey]) -> None:
        """Claim the next chunks of a request, which are being read for it."""
        self._claim(request, keys)
        request.num_kept += len(keys)
        self._insert(self._claimants, request.number)

    def _end_claims(
        self, request: QueuedRequest, num_chunks: int, gone: Collection[OffloadKey] = ()
    ) -> int:
        """End the last claims of a request; return how many chunks have no claim any more."""
        host, more = self._host, self._more
        keys = request.keys[request.num_kept - num_chunks : request.num_kept][::-1]
        request.num_kept -= num_chunks
        if not request.num_kept:
            self._drop(self._claimants, request.number)
        if more and not more.keys().isdisjoint(keys):
            last = []
            for key in keys:
                if others := more.pop(key, 0):
                    if others > 1:
                        more[key] = others - 1
                else:
                    last.append(key)
            keys = last
        claimants: list[Tenant] = host.end_claims(keys, gone)
        if claimants.count(request.tenant) == len(keys):
            num_bytes = host.bytes_of_all(keys)
            request.tenant.held_bytes -= num_bytes
            self._held_bytes -= num_bytes
        else:
            for key, tenant in zip(keys, claimants, strict=True):
                tenant.held_bytes -= host.bytes_of(key)
                self._held_bytes -= host.bytes_of(key)
        return len(keys)

    def _give_way(self, count: int) -> bool:
        """End the claims of so many chunks, of the last requests first; False if there is none."""
        ended = 0
        if not self.gives_way:
            return False
        while ended < count and self._claimants:
            request = self.requests[self._claimants[-1]]
            ended += self._end_claims(request, min(count - ended, request.num_kept))
            self._insert(self._unfinished, request.number)
        self._counts["given_up"] += ended
        self._limit_bytes = self._held_bytes  # until a request leaves: now memory is short
        return ended > 0

    def _shrink(self, left: int) -> int:
        """End claims of the tenant that was alone before, down to its limit; return what is left.

        Args:
            left: how many chunks may be looked at.
        """
        if (tenant := self._too_large) is None:
            return left
        numbers = reversed(self._claimants.copy())
        while left and tenant.held_bytes > self._tenant_limit():
            request = next((r for n in numbers if (r := self.requests[n]).tenant is tenant), None)
            if request is None:
                break
            while left and request.num_kept and tenant.held_bytes > self._tenant_limit():
                self._end_claims(request, 1)
                left -= 1
            self._insert(self._unfinished, request.number)
        if left:
            self._too_large = None
        return left

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

    def _look_again(self, tenant: Tenant) -> None:
        if tenant.full:
            again = filter(self.requests.__contains__, tenant.full)
            self._unfinished = sorted({*self._unfinished, *again})
            tenant.full = []

    @staticmethod
    def _insert(numbers: list[int], number: int) -> None:
        i = bisect_left(numbers, number)
        if i == len(numbers) or numbers[i] != number:
            numbers.insert(i, number)

    @staticmethod
    def _drop(numbers: list[int], number: int) -> None:
        i = bisect_left(numbers, number)
        if i < len(numbers) and numbers[i] == number:
            del numbers[i]

    # ---- figures, self-check ----

    def _samples(self) -> Iterator[Sample]:
        yield QUEUE_REQUESTS, (), len(self.requests)
        yield QUEUE_KEPT_BYTES, (), self._held_bytes

    def check(self) -> None:
        """Raise UsageError if the queue contradicts itself or host memory; for tests."""
        uses: dict[OffloadKey, int] = {}
        for request in self.requests.values():
            for key in request.keys[: request.num_kept]:
                uses[key] = uses.get(key, 0) + 1
        held = self._host.bytes_of_all(list(uses))
        of_tenants = [tenant.held_bytes for tenant in self._tenants.values()]
        host = self._host
        for broken, what in (
            (uses.keys() != host.claims.keys(), "queued requests claim what is kept"),
            (
                not all(host.is_ready(key) or host.is_coming(key) for key in uses),
                "claimed chunks are in host memory, or on their way to it",
            ),
            (
                {key: n - 1 for key, n in uses.items() if n > 1} != self._more,
                "shared claims are counted",
            ),
            (held != self._held_bytes, "the bytes of claimed chunks are counted"),
            (held > self._share_bytes, "claims keep to their share"),
            (
                self._too_large is None and max(of_tenants, default=0) > self._tenant_limit(),
                "a tenant keeps to its limit",
            ),
            (
                self._claimants != sorted(n for n, r in self.requests.items() if r.num_kept),
                "requests with claims are listed",
            ),
        ):
            if broken:
                raise UsageError(f"the queue is inconsistent: not true that {what}")
