"""What the local connector remembers of requests and of transfers under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvoffload.connectors.chunking import Piece
from kvoffload.offload.base import OffloadKey, ReqContext


class OffloadRequest(Protocol):
    """What the connector needs to know of a request."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and what was generated so far."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks."""
        ...


@dataclass(frozen=True)
class LoadOutcome:
    """How a load ended."""

    request_id: str
    num_loaded_tokens: int
    """The good prefix: tokens after those in GPU memory that need not be computed.

    With windows or recurrent states it is mostly all or nothing: a shorter prefix would need blocks
    that the engine did not even allocate. It then frees the request and admits it anew.
    """
    ok: bool
    """Whether that is all that was asked for."""
    tokens_by_medium: dict[str, int] = field(default_factory=dict)


@dataclass
class RequestState:
    """What the connector knows of a request."""

    keys: list[list[OffloadKey]]
    """Of the full chunks, for each KV cache group."""
    next_store: list[int]
    """First chunk not offered for storing yet, for each group."""
    start: int = 0
    """Where a load would begin: tokens that GPU memory has."""
    pending_since_s: float | None = None
    loading: int | None = None
    """The job that loads for it now."""
    barred: bool = False
    """Its blocks were computed before a reset: they are not to be stored any more."""
    refused: tuple[OffloadKey, ...] = ()
    """Chunks that found no room when they were last offered for storing."""


@dataclass(frozen=True)
class Load:
    """A load on its way."""

    request_id: str
    start: int
    end: int
    wanted_tokens: int
    pieces: tuple[Piece, ...]
    keys: tuple[OffloadKey, ...]
    host_slots: tuple[int, ...]
    media: tuple[str, ...]
    gpu_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Store:
    """A store on its way."""

    context: ReqContext
    keys: tuple[OffloadKey, ...]
    host_slots: tuple[int, ...]
    gpu_blocks: tuple[int, ...]
