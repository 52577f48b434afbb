"""Transfers of the local connector: submits jobs, takes in results, says how loads ended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.local.chunking import BlockTables, ChunkGroups, Piece, Span, cut_store
from kvoffload.connectors.local.request_states import LoadBackoff, RequestState
from kvoffload.connectors.spans import Spans
from kvoffload.offload.base import Job, LoadJob, Manager
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import Moves


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
class LoadRange:
    """The tokens that a request expects of a load job."""

    state: RequestState
    start: int
    end: int
    spans: Sequence[Span]
    """The blocks to load. The job's keys stand for the first chunks that they are in."""


class Transfers:
    """Carries out the manager's jobs, for one connector, on the engine's thread.

    Args:
        manager: gets the answers, and counts the tokens that were loaded.
        worker: moves the bytes.
        groups: of the chunks.
        requests: the states of the connector's requests.
        short_loads: counts the loads that brought less than promised.
        spans: gets each job's begin and end.
    """

    def __init__(
        self,
        manager: Manager,
        worker: TransferEngine,
        groups: ChunkGroups,
        requests: Iterable[RequestState],
        short_loads: LoadBackoff,
        spans: Spans | None = None,
    ) -> None:
        self.jobs = JobTable(manager, spans=spans)
        self._manager = manager
        self._worker = worker
        self._groups = groups
        self._requests = requests
        self._short_loads = short_loads
        # Of loads that ended and were not polled; None for one that was refused.
        self._outcomes: list[tuple[RequestState, LoadJob | None, LoadOutcome]] = []
        # Name of ended requests → their loads, which poll has yet to name.
        self._ended: dict[str, set[LoadJob]] = {}

    def begin_store(self, job: Job, pieces: Sequence[Piece], tables: BlockTables) -> None:
        """Submit a store of these chunks, which the job's keys stand for."""
        moves = cut_store(self._groups, pieces, tables, job.spec.block_ids)
        job.blocks = moves.block_ids.tolist()
        self.jobs.begin(job.id, job)
        self._worker.submit(job.id, (moves, job.spec), len(job.keys))

    def begin_load(self, job: LoadJob, load: LoadRange, moves: Moves) -> None:
        """Submit a load into blocks that an earlier store may still read."""
        job.blocks, job.waiter = moves.block_ids.tolist(), load
        # A store of the blocks' last owner that still reads them would store what is loaded.
        self.wait_for_blocks(job.blocks)
        load.state.loads.add(job)
        self.jobs.begin(job.id, job)
        self._worker.submit(job.id, (job.spec, moves), len(job.keys))

    def wait_for_blocks(self, block_ids: Iterable[int]) -> None:
        """Block until no transfer uses these GPU blocks."""
        if jobs := self.jobs.using(block_ids):
            self._worker.wait(jobs)

    def poll(self) -> list[LoadOutcome]:
        """Answer the jobs that have ended, begin write-through; return the ended loads."""
        self.take_in()
        ended, self._outcomes = self._outcomes, []
        for _, job, outcome in ended if self._ended else ():
            to_name = self._ended.get(outcome.request_id)
            if to_name is not None and job is not None:
                to_name.discard(job)
                if not to_name:
                    del self._ended[outcome.request_id]
        outcomes = [outcome for *_, outcome in ended]
        for outcome in outcomes:  # no reset voids them any more
            for medium, number in outcome.tokens_by_medium.items():
                self._manager.figures.hit_tokens[medium.lower()] += number
        return outcomes

    def take_in(self) -> None:
        """Do as :meth:`poll`, and keep the ended loads for the next poll."""
        # Read first: a job that settles while its result is taken in is settled at the next poll.
        settled = self._worker.get_settled()
        for result in self._worker.get_finished():
            # The manager forgets failed chunks before the engine can look them up again.
            job = self.jobs.answer(result)
            if isinstance(job, LoadJob):
                load: LoadRange = job.waiter
                self._outcomes.append((load.state, job, self._load_ended(job, load)))
        for job_id in settled:
            self.jobs.settle(job_id)
        for transfer in self._manager.take_transfers():
            self.jobs.begin(transfer.id, transfer)
            self._worker.submit(transfer.id, transfer.ends, len(transfer.keys))

    # ---- loads ----

    def refuse(self, state: RequestState) -> None:
        """End a load at once that found no room in host memory, or is not of its request."""
        self._note_short_load(state.context.req_id)
        self._outcomes.append((state, None, LoadOutcome(state.context.req_id, 0, ok=False)))

    def request_ended(self, state: RequestState) -> bool:
        """Return whether :meth:`poll` will name a request that gives up its blocks.

        If not, no outcome of it may remain: the next owner of its name would take it for its own.
        """
        name = state.context.req_id
        if state.loads:
            self._ended.setdefault(name, set()).update(state.loads)
            state.loads.clear()
        to_name = self._ended.get(name, ())
        self._outcomes = [
            each for each in self._outcomes if each[0] is not state or each[1] in to_name
        ]
        return bool(to_name)

    def will_name(self, request_id: str) -> bool:
        """Whether a request ended in a load that :meth:`poll` has yet to name."""
        return request_id in self._ended

    def mark_stale(self) -> None:
        """Let loads and stores from before a reset bring nothing; requests store no more."""
        self.jobs.mark_stale()
        for state in self._requests:
            state.barred |= state.has_kv
        self._outcomes = [
            (state, job, LoadOutcome(outcome.request_id, 0, ok=False))
            for state, job, outcome in self._outcomes
        ]

    def _load_ended(self, job: LoadJob, load: LoadRange) -> LoadOutcome:
        """Return the outcome of an answered job; a stale job brings nothing."""
        name, waits = load.state.context.req_id, job in load.state.loads
        load.state.loads.discard(job)
        if job.stale:
            return LoadOutcome(name, 0, ok=False)
        end, is_whole = load.end, len(job.keys) == job.num_asked and all(job.ok)
        media = job.media()
        if is_whole and len(set(media)) == 1:
            tokens = {media[0]: end - load.start}
        else:
            chunks = [(span.group.index, chunk) for span in load.spans for chunk in span.chunks]
            found = zip(chunks, media, job.ok, strict=False)  # chunks may have found no room
            arrived = {chunk: medium for chunk, medium, ok in found if ok}
            if not is_whole:
                blocks = [
                    (span.group.index, block)
                    for span in load.spans
                    for block in span.blocks
                    if (span.group.index, block // span.group.per_chunk) in arrived
                ]
                end = self._groups.usable(load.start, end, blocks)
            tokens = dict(self._groups.tokens_by_medium(load.start, end, arrived))
        if waits and end < load.end:
            self._note_short_load(name)
        return LoadOutcome(name, end - load.start, end == load.end, tokens)

    def _note_short_load(self, request_id: str) -> None:
        if self._short_loads.note(request_id):
            self._manager.counters["declined_after_short_load"] += 1
