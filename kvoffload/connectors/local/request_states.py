"""What is remembered of an engine's requests; two of them may have one name.

An engine may pass another object for its request in each call. So an object stands for the request
of its name, unless an object with other content still does.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from kvoffload.connectors.local.chunking import ChunkGroups
from kvoffload.connectors.local.engine_arguments import token_count, wrong
from kvoffload.offload.base import LoadJob, OffloadKey, ReqContext, tenant_id

MAX_REMEMBERED = 1024
"""Requests; more only if an engine never admits those again whose loads were short."""
MOST_HASH_BYTES = 4000
"""The I/O server takes no longer key: it ends the session of an engine that sends one."""


class OffloadRequest(Protocol):
    """The attributes of an engine's request that the connector reads.

    A request may also have ``kv_transfer_params``, with hints: see ``docs/guides/vllm.md``. Its
    ``cache_salt``, if it has one, names its tenant.
    """

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated so far."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks."""
        ...


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
        _check(request)
        params = getattr(request, "kv_transfer_params", None)
        tenant = tenant_id(getattr(request, "cache_salt", None))
        context = ReqContext(request.request_id, params, tenant=tenant)
        count = len(self._groups.all)
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


def _check(request: OffloadRequest) -> None:
    """Raise UsageError unless an engine's request has a name, a length and hashes.

    Called once a request, when it is seen first.
    """
    hashes = request.block_hashes
    if not isinstance(request.request_id, str):
        raise wrong("request_id", request.request_id, "must be a text that no other request has")
    token_count("num_tokens", request.num_tokens)
    try:
        first: object = hashes[0] if len(hashes) else b""
    except TypeError:  # it is no sequence
        first = hashes
    if not isinstance(first, bytes) or len(first) > MOST_HASH_BYTES:
        remedy = f"must be bytes, at most {MOST_HASH_BYTES:,}, as a SHA-256 of all tokens so far"
        raise wrong("block_hashes", first, remedy)


class LoadBackoff:
    """Counts the short loads of each request since it last computed something.

    An engine that cannot use a part of a load admits the request again. With the same promise and
    the same short load each time, the engine would never begin to compute. So a request is promised
    nothing more after some short loads.

    Args:
        tolerated: short loads in a row after which the next is still promised.
    """

    def __init__(self, tolerated: int) -> None:
        self._tolerated = tolerated
        self._noted: dict[str, tuple[int, bool]] = {}
        """Request → its short loads, and whether it was not admitted again since the last one."""

    def note(self, request_id: str) -> bool:
        """A load was short; return whether the request is declined from now on."""
        count = self._noted.pop(request_id, (0, False))[0] + 1
        self._noted[request_id] = count, True
        if len(self._noted) > MAX_REMEMBERED:
            del self._noted[next(iter(self._noted))]
        return count > self._tolerated

    def declined(self, request_id: str) -> bool:
        """Whether a request is to be promised nothing."""
        return self._noted.get(request_id, (0, False))[0] > self._tolerated

    def computed(self, request_id: str) -> None:
        """A request has got on: its loads may be tried again."""
        self._noted.pop(request_id, None)

    def gave_up(self, request_id: str) -> None:
        """Note that a request gave up its blocks; it is admitted again if its load just ended."""
        count, has_just_ended = self._noted.pop(request_id, (0, False))
        if has_just_ended:
            self._noted[request_id] = count, False
