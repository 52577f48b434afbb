"""Loads of the local connector: what a request expects of a load, and how it ended."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.connectors.chunking import ChunkGroups, Piece
from kvoffload.connectors.load_backoff import LoadBackoff
from kvoffload.connectors.request_state import RequestState
from kvoffload.messages import TransferResult
from kvoffload.offload.base import LoadJob
from kvoffload.offload.manager import TieredOffloadingManager


@dataclass(frozen=True)
class LoadOutcome:
    """How a load ended."""

    request_id: str
    num_loaded_tokens: int
    """The good prefix: tokens after those in GPU memory that need not be computed.

    With windows or recurrent states a load is mostly all or nothing: a shorter prefix would need
    blocks that the engine did not allocate. The engine then frees the request and admits it again.
    """
    ok: bool
    """Whether all tokens asked for were loaded."""
    tokens_by_medium: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """What a request expects of a load job."""

    request_id: str
    start: int
    end: int
    wanted_tokens: int
    pieces: tuple[Piece, ...]
    """The parts of chunks that the job's keys stand for."""


class LoadResults:
    """Turns the answers of load jobs into outcomes, and measures the media.

    Args:
        groups: of the chunks.
        requests: the connector's requests by id; their loads are marked as ended here.
        short_loads: counts the loads that brought less than promised.
        manager: gets the totals and rates.
    """

    def __init__(
        self,
        groups: ChunkGroups,
        requests: Mapping[str, RequestState],
        short_loads: LoadBackoff,
        manager: TieredOffloadingManager,
    ) -> None:
        self._groups = groups
        self._requests = requests
        self._short_loads = short_loads
        self._manager = manager
        self._loads: dict[int, Load] = {}
        self.loaded_tokens: Counter[str] = Counter()
        """Tokens loaded so far, by medium."""

    def expect(self, job_id: int, load: Load) -> None:
        """Remember what a request expects of a job."""
        self._loads[job_id] = load

    def refused(self, request_id: str) -> LoadOutcome:
        """Return the outcome of a load that found no room in host memory."""
        self._note_short_load(request_id)
        return LoadOutcome(request_id, 0, ok=False)

    def ended(self, job: LoadJob, result: TransferResult, stale: bool) -> LoadOutcome:
        """Return the outcome of an answered job; a stale job brings nothing."""
        load = self._loads.pop(job.id)
        state = self._requests.get(load.request_id)
        waits = state is not None and state.loading == job.id
        if state is not None and waits:
            state.loading = None
        if stale:
            return LoadOutcome(load.request_id, 0, ok=False)
        outcome = self._outcome(load, job, result)
        if waits and not outcome.ok:
            self._note_short_load(load.request_id)
        return outcome

    def _note_short_load(self, request_id: str) -> None:
        if self._short_loads.note(request_id):
            self._manager.counters["declined_after_short_load"] += 1

    def _outcome(self, load: Load, job: LoadJob, result: TransferResult) -> LoadOutcome:
        arrived: dict[tuple[int, int], str] = {}
        chunks: Counter[str] = Counter()
        for piece, medium, ok in zip(load.pieces, job.media(), result.ok, strict=True):
            if ok:
                arrived[piece.group, piece.chunk] = medium
                chunks[medium] += 1
        end = self._groups.usable(load.start, load.end, arrived)
        tokens = self._groups.tokens_by_medium(load.start, end, arrived)
        self.loaded_tokens.update(tokens)
        self._measure(chunks, tokens, len(job.keys), result)
        loaded = end - load.start
        return LoadOutcome(load.request_id, loaded, loaded == load.wanted_tokens, dict(tokens))

    def _measure(
        self,
        chunks: Mapping[str, int],
        tokens: Mapping[str, int],
        num_chunks: int,
        result: TransferResult,
    ) -> None:
        for medium, count in chunks.items():
            num_bytes = result.transfer_bytes * count // num_chunks
            # Chunks from host memory waited for the tiers' chunks of the same load.
            rated = medium != "CPU" or len(chunks) == 1
            self._manager.figures.loaded(
                medium, tokens.get(medium, 0), count, num_bytes, result.transfer_time_s, rated
            )
