"""A request in the engine, and one step's work on it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvoffload.core.block_pool import NULL_BLOCK
from kvoffload.core.hashing import HashChain
from kvoffload.core.request import Request
from kvoffload.demo.sampling import SamplingParams


class State(Enum):
    """Where a request is between its arrival and its last token."""

    WAITING = auto()
    LOADING = auto()
    """Its prefix is on the way from a tier below, into blocks it already holds."""
    RUNNING = auto()
    FINISHED = auto()


class EngineRequest(Request):
    """One prompt and its growing answer, with what became of it."""

    def __init__(
        self, request_id: str, chain: HashChain, params: SamplingParams, arrival: int
    ) -> None:
        super().__init__(request_id, chain)
        self.params = params
        self.arrival = arrival
        self.state = State.WAITING
        self.num_prompt_tokens = len(chain)
        self.cached_tokens: dict[str, int] = {}
        """Prompt tokens that needed no computing, by medium, when it was first admitted."""
        self.num_promised_tokens = 0
        """Tokens that the load in flight is to bring."""
        self.num_undelivered_tokens = 0
        """Tokens loads promised and did not bring; they were computed instead."""
        self.num_preemptions = 0
        self.finish_reason = ""
        self.arrived_at = time.perf_counter()
        self.first_token_at: float | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


@dataclass(frozen=True)
class Work:
    """Compute tokens ``start`` to ``end`` of a request."""

    request: EngineRequest
    start: int
    end: int
    block_ids: tuple[tuple[int, ...], ...]
    """All blocks of the request so far, in order, for each KV cache group."""

    @property
    def samples(self) -> bool:
        """Whether a new token is to be chosen: every known one is computed then."""
        return self.end == self.request.num_tokens

    def written_blocks(self, block_sizes: Sequence[int]) -> list[int]:
        """Blocks this work may write into: those of its tokens, in each group."""
        return [
            block
            for table, size in zip(self.block_ids, block_sizes, strict=True)
            for block in table[self.start // size : -(-self.end // size)]
            if block != NULL_BLOCK
        ]


@dataclass(frozen=True)
class RequestResult:
    """A finished request."""

    request_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    ttft_s: float
    """From arrival to the first token; NaN if there was none."""
    cached_tokens: Mapping[str, int]
    """Prompt tokens that needed no computing, by medium: ``GPU``, ``CPU``, ``DISK``..."""
    undelivered_tokens: int
    preemptions: int

    @property
    def computed_prompt_tokens(self) -> int:
        return self.prompt_tokens - sum(self.cached_tokens.values())

    @classmethod
    def of(cls, request: EngineRequest) -> "RequestResult":
        first = request.first_token_at
        return cls(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            ttft_s=float("nan") if first is None else first - request.arrived_at,
            cached_tokens=dict(request.cached_tokens),
            undelivered_tokens=request.num_undelivered_tokens,
            preemptions=request.num_preemptions,
        )
