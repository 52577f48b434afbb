"""Claims on chunks in host memory: what queued requests keep, how much, and who gives way.

A chunk under a claim is out of the eviction order. Claims take at most a share of host memory.
While requests of several tenants wait, one tenant's claims take at most half of the share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter, indexOf

from kvoffload.messages import OffloadKey
from kvoffload.metrics.names import QUEUE_CHUNKS
from kvoffload.metrics.samples import Registry
from kvoffload.offload.base import ReqContext
from kvoffload.offload.host_cache import HostCache

COMPARED, COMPARED_REQUESTS = 2048, 32
"""Claims, and requests with claims, that one call compares with the chunks that are gone.

Of the requests that it goes on with, it compares as many claims again."""


@dataclass(eq=False, slots=True)
class Tenant:
    """The queued requests of one tenant."""

    name: bytes
    num_requests: int = 0
    held_bytes: int = 0
    """Of the chunks whose first claim was its."""
    full: list["QueuedRequest"] = field(default_factory=list)
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
    num_lost: int = 0
    """How often chunks had gone when its claims were last compared with them, and were good."""
    has_waited: bool = False
    """Whether it waits for a step, at least."""
    is_pending: bool = False
    """Whether the engine has asked what it can load since the last step, and asks again: its turn
    may come with the answer."""
    lacks: OffloadKey | None = None
    """The chunk that it needs next, if neither host memory nor a tier has it."""
    read_early: frozenset[OffloadKey] = frozenset()
    """Chunks that were read for it, and that it has not loaded."""

    def __lt__(self, other: "QueuedRequest") -> bool:
        return self.number < other.number


def insert(requests: list[QueuedRequest], request: QueuedRequest) -> None:
    """Put a request into a list in order, unless it is there."""
    i = bisect_left(requests, request)
    if i == len(requests) or requests[i] is not request:
        requests.insert(i, request)


def drop(requests: list[QueuedRequest], request: QueuedRequest) -> None:
    """Take a request out of a list in order, if it is there."""
    i = bisect_left(requests, request)
    if i < len(requests) and requests[i] is request:
        del requests[i]


def in_order(*requests: Iterable[QueuedRequest]) -> list[QueuedRequest]:
    """Return the requests in order, each once; numbers are compared, without a call of Python."""
    return sorted(dict.fromkeys(chain.from_iterable(requests)), key=attrgetter("number"))


class Claims:
    """Gives chunks in host memory to queued requests, and takes them back, the last one's first.

    Args:
        host: host memory.
        share: of host memory, for claims.
        figures: counts the chunks by what became of them.
        look_again: called with a request that has lost claims.
    """

    def __init__(
        self,
        host: HostCache,
        share: float,
        figures: Registry,
        look_again: Callable[[QueuedRequest], None],
    ) -> None:
        self._host = host
        self._look_again = look_again
        self.share_bytes = self._limit_bytes = int(share * host.capacity_bytes)
        self.held_bytes = 0
        self.tenants: dict[bytes, Tenant] = {}
        self.too_large: Tenant | None = None
        """The tenant that may have claims beyond its limit, as it was alone before."""
        self._claimants: list[QueuedRequest] = []
        """Requests in the queue with claims, the first of the queue first."""
        self.leaving: dict[QueuedRequest, None] = {}
        """Requests that have left the queue, and whose claims end little by little."""
        self.gone: set[OffloadKey] = set()
        """Claimed chunks that are gone, and have not come again: claims on them, and on those
        behind them, end little by little."""
        self._num_lost = 0
        """How often chunks have gone."""
        self._compared: QueuedRequest | None = None
        """The last request whose claims were compared with them."""
        self._may_compare = 0
        """How many claims may be compared with them yet."""
        self._more: dict[OffloadKey, int] = {}
        """How many requests beyond the first have a claim on a chunk."""
        self.served: QueuedRequest | None = None
        """The request that waits for which room is made: those before it give way to none."""
        self._counts = figures.counter(QUEUE_CHUNKS, "kept", "given_up")
        host.give_way = self._give_way

    # ---- whose they are ----

    def joins(self, name: bytes) -> Tenant:
        """Return the tenant of one more request."""
        if (tenant := self.tenants.get(name)) is None:
            if len(self.tenants) == 1:
                (self.too_large,) = self.tenants.values()
            tenant = self.tenants[name] = Tenant(name)
        tenant.num_requests += 1
        return tenant

    def leaves(self, request: QueuedRequest) -> None:
        """Take a request out of the queue; its claims give way first."""
        drop(self._claimants, request)
        self.leaving[request] = None

    def left(self, request: QueuedRequest) -> None:
        """Forget a request that has left, and has no claim any more: other claims may grow."""
        del self.leaving[request]
        self._limit_bytes = self.share_bytes
        tenant = request.tenant
        tenant.num_requests -= 1
        if not tenant.num_requests:
            del self.tenants[tenant.name]

    def have_room(self, request: QueuedRequest) -> bool:
        """Whether a request may have a further claim, if its tenant may; one before it may too."""
        return self.held_bytes < self._limit_bytes or self._last(request, None) is not None

    def tenant_has_room(self, request: QueuedRequest) -> bool:
        """Whether the tenant of a request may have a further claim."""
        tenant = request.tenant
        return tenant.held_bytes < self._tenant_limit() or self._last(request, tenant) is not None

    def fitting(self, request: QueuedRequest, keys: Sequence[OffloadKey]) -> int:
        """Count the leading chunks that may be claimed for a request; later ones give way."""
        of_all, of_tenant = self._room_bytes(request)
        fits = self._host.fitting(keys, min(of_all, of_tenant))
        if fits < len(keys):
            tenant = request.tenant if of_tenant <= of_all else None
            self._end_last(len(keys) - fits, request, tenant)
            fits = self._host.fitting(keys, min(self._room_bytes(request)))
        return fits

    def _room_bytes(self, request: QueuedRequest) -> tuple[int, int]:
        of_tenant = self._tenant_limit() - request.tenant.held_bytes
        return self._limit_bytes - self.held_bytes, of_tenant

    def _tenant_limit(self) -> int:
        return self.share_bytes // 2 if len(self.tenants) > 1 else self.share_bytes

    # ---- claims ----

    def extend(self, request: QueuedRequest, most: int) -> int:
        """Claim further leading chunks that host memory has; return how many were looked at."""
        host, left = self._host, most
        while left and request.num_kept < request.num_keys:
            first = request.num_kept
            part = request.keys[first : min(first + left, request.num_keys)]
            if self.gone:
                part = part[: _leading_not(self.gone, part)]
            if taken := _leading(host.claims, part):
                for key in part[:taken]:
                    self._more[key] = self._more.get(key, 0) + 1
                self._keeps(request, taken)
            else:
                taken = self._num_idle(part)
                if not taken and part and (host.is_ready(part[0]) or host.is_coming(part[0])):
                    taken = 1  # it is in flight
                if not (taken := self.fitting(request, part[:taken])):
                    break
                self.begin(request, part[:taken])
            left -= taken
        return most - left

    def _num_idle(self, part: Sequence[OffloadKey]) -> int:
        """Count the leading chunks that are idle in host memory and have no claim."""
        claims = self._host.claims
        idle = _leading(self._host.evictable, part)
        if claims and not claims.keys().isdisjoint(part[:idle]):
            idle = indexOf(map(claims.__contains__, part), True)
        # A prompt cannot have a chunk twice.
        return idle if len(set(part[:idle])) == idle else 1

    def begin(self, request: QueuedRequest, keys: Sequence[OffloadKey]) -> None:
        """Claim the next chunks of a request, which have no claim yet."""
        self._host.claim(keys, request.tenant)
        num_bytes = self._host.bytes_of_all(keys)
        request.tenant.held_bytes += num_bytes
        self.held_bytes += num_bytes
        self._counts["kept"] += len(keys)
        self._keeps(request, len(keys))

    def _keeps(self, request: QueuedRequest, num_chunks: int) -> None:
        request.num_kept += num_chunks
        insert(self._claimants, request)

    def end(self, request: QueuedRequest, num_chunks: int) -> int:
        """End the last claims of a request; return how many chunks have no claim any more."""
        host, more = self._host, self._more
        keys = request.keys[request.num_kept - num_chunks : request.num_kept][::-1]
        request.num_kept -= num_chunks
        if not request.num_kept:
            drop(self._claimants, request)
        if more and not more.keys().isdisjoint(keys):
            last = []
            for key in keys:
                if others := more.pop(key, 0):
                    if others > 1:
                        more[key] = others - 1
                else:
                    last.append(key)
            keys = last
        gone = self.gone.intersection(keys) if self.gone else ()
        self.gone.difference_update(gone)
        claimants: list[Tenant] = host.end_claims(keys, gone)
        if claimants.count(request.tenant) == len(keys):
            num_bytes = host.bytes_of_all(keys)
            request.tenant.held_bytes -= num_bytes
            self.held_bytes -= num_bytes
        else:
            for key, tenant in zip(keys, claimants, strict=True):
                tenant.held_bytes -= host.bytes_of(key)
                self.held_bytes -= host.bytes_of(key)
        return len(keys)

    # ---- who loses them ----

    def _give_way(self, count: int) -> bool:
        """End the claims of so many chunks; False if there is none."""
        ended = self._end_last(count, self.served)
        if self.served is None:
            self._limit_bytes = self.held_bytes  # until a request leaves: now memory is short
        return ended > 0

    def _last(self, before: QueuedRequest | None, of: Tenant | None) -> QueuedRequest | None:
        """Return the last request with claims that comes after one, and is of a tenant.

        One that has left comes after all.
        """
        for request in self.leaving:
            if request.num_kept and (of is None or request.tenant is of):
                return request
        for request in reversed(self._claimants):
            if before is not None and not before < request:
                break
            if of is None or request.tenant is of:
                return request
        return None

    def _end_last(self, count: int, before: QueuedRequest | None, of: Tenant | None = None) -> int:
        """End the claims of so many chunks, of the last requests first; return how many."""
        ended = 0
        while ended < count and (request := self._last(before, of)) is not None:
            num_ended = self.end(request, min(count - ended, request.num_kept))
            ended += num_ended
            if request not in self.leaving:
                self._counts["given_up"] += num_ended
                self._look_again(request)
        return ended

    def shrink(self, left: int) -> int:
        """End claims of the tenant that was alone before, down to its limit; return what is left.

        Args:
            left: how many chunks may be looked at.
        """
        if (tenant := self.too_large) is None:
            return left
        for request in [each for each in self._claimants[::-1] if each.tenant is tenant]:
            while left and request.num_kept and tenant.held_bytes > self._tenant_limit():
                self.end(request, 1)
                self._look_again(request)
                left -= 1
        if left:
            self.too_large = None
        return left

    # ---- chunks that are gone ----

    def lost(self, keys: Collection[OffloadKey]) -> bool:
        """Note chunks that are gone, or will not come: :meth:`end_lost` ends the claims on them.

        Returns:
            Whether there are claims on them.
        """
        claimed = [*filter(self._host.claims.__contains__, keys)]
        self._num_lost += bool(claimed)
        self.gone.update(claimed)
        return bool(claimed)

    def came(self, keys: Collection[OffloadKey]) -> None:
        """Note chunks that host memory has now: claims on them that have not ended are good."""
        self.gone.difference_update(keys)

    def has_lost(self, request: QueuedRequest) -> bool:
        """Whether a request has a claim on a chunk that is gone; True if it is not known yet."""
        if not self.gone or not request.num_kept or request.num_lost == self._num_lost:
            return False
        if self._may_compare <= 0:
            return True
        self._may_compare -= request.num_kept
        if self.gone.isdisjoint(islice(request.keys, request.num_kept)):
            request.num_lost = self._num_lost
        return request.num_lost != self._num_lost

    def end_lost(self, left: int) -> tuple[list[QueuedRequest], int]:
        """End claims on chunks that are gone, and on those behind them, request by request.

        Args:
            left: how many chunks may be looked at.

        Returns:
            Requests that have lost claims, and how many chunks may be looked at yet.
        """
        losers: list[QueuedRequest] = []
        requests, self._may_compare = self._claimants, COMPARED
        for _ in range(COMPARED_REQUESTS):
            if not (self.gone and requests and left > 0 and self._may_compare > 0):
                break
            at = bisect_right(requests, self._compared) if self._compared is not None else 0
            request = requests[at] if at < len(requests) else requests[0]
            if self.has_lost(request):
                num_good = _leading_not(self.gone, request.keys)
                num_ended = min(left, request.num_kept - num_good)
                self.end(request, num_ended)
                left -= num_ended
                losers.append(request)
                if request.num_kept > num_good:
                    break
            self._compared = request
        self._may_compare = COMPARED  # for the requests that are looked at next
        return losers, left

    def forget(self, requests: Iterable[QueuedRequest]) -> None:
        """Begin again with these requests: host memory has forgotten all claims."""
        for request in (*requests, *self.leaving):
            request.num_kept = 0
        for tenant in self.tenants.values():
            tenant.held_bytes, tenant.full = 0, []
        self._more.clear()
        self._claimants.clear()
        self.gone.clear()
        self.held_bytes, self._limit_bytes = 0, self.share_bytes
        self.too_large = None


def _leading(place: Collection[OffloadKey], keys: Sequence[OffloadKey]) -> int:
    """Count the leading keys that are in a place."""
    return indexOf(chain(map(place.__contains__, keys), (False,)), False)


def _leading_not(place: Collection[OffloadKey], keys: Sequence[OffloadKey]) -> int:
    """Count the leading keys that are not in a place."""
    return indexOf(chain(map(place.__contains__, keys), (True,)), True)
