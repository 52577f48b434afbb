"""Requests, as the local connector needs them from an engine and remembers them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffload.offload.base import OffloadKey, ReqContext


class OffloadRequest(Protocol):
    """The attributes of an engine's request that the connector reads.

    A request may also have ``kv_transfer_params``, with hints: see ``docs/guides/vllm.md``.
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


@dataclass
class RequestState:
    """The connector's state of a request."""

    context: ReqContext
    keys: list[list[OffloadKey]]
    """Keys of the full chunks, for each KV cache group."""
    next_store: list[int]
    """First chunk not offered for storing yet, for each group."""
    start: int = 0
    """Tokens in GPU memory, where a load would begin."""
    pending_since_s: float | None = None
    loading: int | None = None
    """The job in flight that loads for the request."""
    barred: bool = False
    """Its blocks were computed before a reset: they must not be stored any more."""
    refused: tuple[OffloadKey, ...] = ()
    """Chunks that found no room when they were last offered for storing."""


def new_state(request: OffloadRequest, num_groups: int) -> RequestState:
    """Make the state of a request that has no chunks yet."""
    context = ReqContext(request.request_id, getattr(request, "kv_transfer_params", None))
    return RequestState(context, [[] for _ in range(num_groups)], [0] * num_groups)
