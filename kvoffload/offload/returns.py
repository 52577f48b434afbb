"""When sessions return: turns what requests say of it into claims on their chunks."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from kvoffload.messages import OffloadKey
from kvoffload.offload.coming_sessions import ComingSessions
from kvoffload.offload.hints import Hints
from kvoffload.offload.host_cache import HostCache

REMEMBERED_REQUESTS = 1024


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
        # Request → its leading chunks that other requests had left when it came.
        self._found: OrderedDict[str, int] = OrderedDict()

    def began(self, keys: Sequence[OffloadKey], hints: Hints, req_id: str) -> None:
        """Note a request before its chunks count as used, head first."""
        if hints.returns_s is None or not keys:
            return
        self.are_told = True
        self._coming.began(_name(hints, keys), keys)
        claims = self._host.returns
        if claims.has_claim(_name(hints, keys)) or any(map(claims.has_claim, keys)):
            return  # what it finds is its own
        found = next((i for i, key in enumerate(keys) if not self._host.is_ready(key)), len(keys))
        self._found[req_id] = found
        if len(self._found) > REMEMBERED_REQUESTS:
            self._found.popitem(last=False)

    def ended(self, keys: Sequence[OffloadKey], hints: Hints, req_id: str) -> None:
        """Let the request's chunks be ordered by what it says of its session's return."""
        found = self._found.pop(req_id, 0)
        if not keys or not (self.are_told or hints.returns_s is not None):
            return
        self.are_told = True
        claims, name = self._host.returns, _name(hints, keys)
        if hints.returns_s is None:
            self._coming.forget(name)
            claims.withdraw(name)
            claims.used(keys)
        else:
            if hints.load_tiers is None and hints.max_load_tokens != 0:
                self._coming.expect(name, keys, hints.returns_s)
            else:
                self._coming.forget(name)
            claims.expect(name, keys, hints.returns_s)
            if found:
                claims.used(keys[:found])


def _name(hints: Hints, keys: Sequence[OffloadKey]) -> bytes:
    """Name the claimant: its session among those whose prompts begin alike, or its last chunk."""
    if hints.session is None:
        return keys[-1]
    return blake2b(
        hints.session.encode(errors="replace"), digest_size=16, key=keys[0][:64]
    ).digest()
