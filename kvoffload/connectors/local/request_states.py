"""The states of an engine's requests, found by a request; two of them may have one name.

An engine may pass another object for its request in each call. So an object stands for the request
of its name, unless an object with other content still does.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvoffload.connectors.local.chunking import ChunkGroups
from kvoffload.connectors.local.engine_arguments import check_request
from kvoffload.connectors.offload_requests import OffloadRequest
from kvoffload.offload.base import LoadJob, OffloadKey, ReqContext, tenant_id


@dataclass(eq=False)
class RequestState:
    """The connector's state of a request."""

    context: ReqContext
    keys: list[list[OffloadKey]]
    """Keys of the full chunks, for each KV cache group."""
    next_store: list[int]
    """First chunk not offered for storing yet, for each group."""
    start: int = 0
    """Tokens in GPU memory, where a load would begin."""
    promised: int = 0
    """Tokens that the last lookup said can be loaded."""
    pending_since_s: float | None = None
    loads: set[LoadJob] = field(default_factory=set)
    """The jobs in flight that load for the request."""
    owner: Callable[[], OffloadRequest | None] = lambda: None
    """Returns the object that last stood for the request, while it is alive."""
    asked: Callable[[], OffloadRequest | None] = lambda: None
    """The same, of the last lookup."""
    outbid: list[Callable[[], OffloadRequest | None]] = field(default_factory=list)
    """The same, of lookups before, by other objects: what was promised last counts alone."""
    has_kv: bool = False
    """Whether it was admitted: it has computed or loaded some of its KV cache, or may have."""
    barred: bool = False
    """Its KV cache is older than a reset: it must not be stored any more."""
    refused: tuple[OffloadKey, ...] = ()
    """Chunks that found no room when they were last offered for storing."""


class RequestStates:
    """The states of all requests that have not ended.

    Args:
        groups: of the chunks.
    """

    def __init__(self, groups: ChunkGroups) -> None:
        self._groups = groups
        self._of_name: dict[str, list[RequestState]] = {}

    def __iter__(self) -> Iterator[RequestState]:
        return chain.from_iterable(self._of_name.values())

    def __len__(self) -> int:
        return sum(map(len, self._of_name.values()))

    def of(self, request: OffloadRequest) -> RequestState:
        """Return the state of a request; make it if there is none.

        Raises:
            UsageError: it is no request.
        """
        if (state := self.find(request)) is not None:
            return state
        check_request(request)
        params = getattr(request, "kv_transfer_params", None)
        tenant = tenant_id(getattr(request, "cache_salt", None))
        context, count = (
            ReqContext(request.request_id, params, tenant=tenant),
            len(self._groups.all),
        )
        state = RequestState(context, [[] for _ in range(count)], [0] * count)
        state.owner = reference(request)
        states = self._of_name.setdefault(request.request_id, [])
        # Its hashes may have changed, or a namesake had its prefix: its KV cache may be older.
        state.barred = any(each.barred for each in states)
        states.append(state)
        return state

    def find(self, request: OffloadRequest) -> RequestState | None:
        """Return the state of a request; None if it has none."""
        states = self._of_name.get(request.request_id, ())
        for state in states:
            if state.owner() is request:
                return state
        for state in states:
            if state.owner() is None or self._groups.are_of(state.keys, request.block_hashes):
                state.owner = reference(request)
                return state
        return None

    def find_to_end(self, request: OffloadRequest) -> RequestState | None:
        """Do as :meth:`find` for one that ends; its object may have fewer hashes, or none."""
        if (state := self.find(request)) is not None:
            return state
        states, hashes = self._of_name.get(request.request_id, ()), request.block_hashes
        return next((each for each in states if self._groups.agree(each.keys, hashes)), None)

    def remove(self, state: RequestState) -> None:
        """Forget the state of a request."""
        states = self._of_name[state.context.req_id]
        states.remove(state)
        if not states:
            del self._of_name[state.context.req_id]


def reference(request: OffloadRequest) -> Callable[[], OffloadRequest | None]:
    """Return what returns a request while it is alive."""
    try:
        return weakref.ref(request)
    except TypeError:  # a class with slots
        return lambda: request
