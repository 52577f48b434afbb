"""When sessions return: turns what requests say of it into claims on their chunks."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

from kvoffload.messages import OffloadKey
from kvoffload.offload.coming_sessions import ComingSessions
from kvoffload.offload.hints import Hints
from kvoffload.offload.host_cache import HostCache
from kvoffload.policies.told_return import ToldReturn

REMEMBERED_REQUESTS = 1024
MOST_UNTOLD, MOST_UNTOLD_CHUNKS = 1024, 1 << 14
"""Returns, and chunks of them, that stores are yet to be told of; older ones are not told."""


class Returns:
    """Claims of ended requests on chunks in host memory.

    A request that says nothing ends the claim of its session, and makes none.

    Args:
        host: whose order of eviction follows the claims.
        coming: puts sessions into the queue before they return.
    """

    def __init__(self, host: HostCache, coming: ComingSessions) -> None:
        self._host = host
        self._coming = coming
        self.are_told = False
        """Whether a request has said when its session returns, so far."""
        self._begun: OrderedDict[str, tuple[list[OffloadKey], int]] = OrderedDict()
        """Request → what its session had told, and the leading chunks that other requests left."""
        self.is_telling = False
        """Whether there are stores to tell."""
        self.to_tell: deque[ToldReturn] = deque()
        """What stores are to be told."""
        self._num_to_tell = 0

    def began(self, keys: Sequence[OffloadKey], hints: Hints, req_id: str) -> None:
        """Note a request before its chunks count as used, head first."""
        if not keys or not (self.are_told or hints.returns_s is not None):
            return
        self.are_told = True
        came, found = self._coming.began(_name(hints, keys), keys), 0
        if hints.returns_s is not None:
            claims = self._host.returns
            # Or what it finds is its own.
            if not (claims.has_claim(_name(hints, keys)) or any(map(claims.has_claim, keys))):
                found = self._host.num_leading(keys)
        if came or found:
            self._begun[req_id] = came, found
            if len(self._begun) > REMEMBERED_REQUESTS:
                self._begun.popitem(last=False)

    def told(self, keys: Sequence[OffloadKey], hints: Hints, req_id: str) -> set[OffloadKey]:
        """Return the chunks that a request's session had told to be needed about now."""
        if not keys or not self.are_told:
            return set()
        awaited = self._coming.told(_name(hints, keys), keys)
        came, _ = self._begun.get(req_id, ((), 0))
        return {*came, *(key for told in awaited.values() for key in told)}

    def ended(self, keys: Sequence[OffloadKey], hints: Hints, req_id: str, tenant: bytes) -> None:
        """Let the request's chunks be ordered by what it says of its session's return.

        The session will queue as a request of the tenant.
        """
        _, found = self._begun.pop(req_id, ((), 0))
        if not keys or not (self.are_told or hints.returns_s is not None):
            return
        self.are_told = True
        name, in_s = _name(hints, keys), hints.returns_s
        if in_s is not None and hints.load_tiers is None and hints.max_load_tokens != 0:
            self._coming.expect(name, keys, in_s, tenant)
        else:
            self._coming.forget(name)
        told = ToldReturn(name, keys, in_s, len(keys) if in_s is None else found)
        told.apply(self._host.returns)
        if self.is_telling:
            self.to_tell.append(told)
            self._num_to_tell += len(keys)
            while len(self.to_tell) > MOST_UNTOLD or (
                self._num_to_tell > MOST_UNTOLD_CHUNKS and len(self.to_tell) > 1
            ):
                self._num_to_tell -= len(self.to_tell.popleft().keys)

    def take_told(self) -> list[ToldReturn]:
        """Return :attr:`to_tell`, and empty it."""
        taken = list(self.to_tell)
        self.to_tell.clear()
        self._num_to_tell = 0
        return taken


def _name(hints: Hints, keys: Sequence[OffloadKey]) -> bytes:
    """Name the claimant: its session among those whose prompts begin alike, or its last chunk."""
    if hints.session is None:
        return keys[-1]
    return blake2b(
        hints.session.encode(errors="replace"), digest_size=16, key=keys[0][:64]
    ).digest()
