"""Transfers of the local connector: submits jobs, takes in results, says how loads ended."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvoffload.connectors.chunking import BlockTables, ChunkGroups, Piece, gpu_end
from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.offload_requests import LoadBackoff, RequestState
from kvoffload.connectors.spans import Spans
from kvoffload.messages import CPULoadStoreSpec, TransferResult, TransferSpec
from kvoffload.offload.base import Job, LoadJob, StoreJob, Transfer
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.transfer.engine import TransferEngine


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
    pieces: tuple[Piece, ...]
    """The parts of chunks that the job's keys stand for."""


class BusyBlocks:
    """GPU blocks that jobs in flight read (stores) or write (loads)."""

    def __init__(self) -> None:
        self._jobs_of: dict[int, list[int]] = {}
        self._blocks_of: dict[int, Sequence[int]] = {}

    def begin(self, job_id: int, blocks: Sequence[int]) -> None:
        """Note the blocks of a job."""
        self._blocks_of[job_id] = blocks
        for block in blocks:
            self._jobs_of.setdefault(block, []).append(job_id)

    def end(self, job_id: int) -> None:
        """Forget the blocks of a job, if it has any."""
        for block in self._blocks_of.pop(job_id, ()):
            jobs = self._jobs_of[block]
            jobs.remove(job_id)
            if not jobs:
                del self._jobs_of[block]

    def jobs(self, blocks: Iterable[int]) -> set[int]:
        """Return the jobs in flight that use one of these blocks."""
        busy = self._jobs_of
        return {job for block in blocks for job in busy.get(block, ())} if busy else set()


class Transfers:
    """Carries out the manager's jobs, for one connector, on the engine's thread.

    Args:
        manager: gets the answers, the totals and the rates.
        worker: moves the bytes.
        groups: of the chunks.
        requests: the connector's requests by id; their loads are marked as ended here.
        short_loads: counts the loads that brought less than promised.
        spans: gets each job's begin and end.
    """

    def __init__(
        self,
        manager: TieredOffloadingManager,
        worker: TransferEngine,
        groups: ChunkGroups,
        requests: Mapping[str, RequestState],
        short_loads: LoadBackoff,
        spans: Spans | None = None,
    ) -> None:
        self.jobs = JobTable(manager, spans=spans)
        self.loaded_tokens: Counter[str] = Counter()
        """Tokens loaded so far, by medium."""
        self._manager = manager
        self._worker = worker
        self._groups = groups
        self._requests = requests
        self._short_loads = short_loads
        self._busy = BusyBlocks()
        self._loads: dict[int, Load] = {}
        # Stores whose chunks are transferred in another order than the job's: that order.
        self._orders: dict[int, list[int]] = {}
        # Of loads that ended and were not polled.
        self._outcomes: list[LoadOutcome] = []
        # Requests that ended in a load, which poll has yet to name.
        self._ended: set[str] = set()

    def begin(
        self,
        job: Job,
        ends: TransferSpec,
        gpu_blocks: Sequence[int] = (),
        order: list[int] | None = None,
    ) -> None:
        """Submit a job; ``order`` lists the job's chunks in the order of the transfer's ends."""
        self.jobs.begin(job.id, job)
        self._busy.begin(job.id, gpu_blocks)
        if order is not None:
            self._orders[job.id] = order
        self._worker.submit(job.id, ends, len(job.keys))

    def begin_store(self, job: StoreJob, pieces: Sequence[Piece], tables: BlockTables) -> None:
        """Submit a store of these chunks, in the order of the job's keys."""
        target, order = job.spec, None
        if len(self._groups.offloaded) > 1:  # transfers list group after group
            order = sorted(range(len(pieces)), key=lambda i: pieces[i].group)
            pieces = [pieces[i] for i in order]
            target = CPULoadStoreSpec(target.host_slots[order])
        source = gpu_end(self._groups, pieces, tables)
        self.begin(job, (source, target), source.block_ids.tolist(), order)

    def begin_load(self, job: LoadJob, load: Load, tables: BlockTables) -> None:
        """Submit a load into blocks that an earlier store may still read."""
        target = gpu_end(self._groups, load.pieces, tables)
        blocks = target.block_ids.tolist()
        # A store of the blocks' last owner that still reads them would store what is loaded.
        self.wait_for_blocks(blocks)
        self._loads[job.id] = load
        self.begin(job, (job.spec, target), blocks)

    def wait_for_blocks(self, block_ids: Iterable[int]) -> None:
        """Block until no transfer uses these GPU blocks."""
        if jobs := self._busy.jobs(block_ids):
            self._worker.wait(jobs)

    def poll(self) -> list[LoadOutcome]:
        """Answer the jobs that have ended, begin write-through; return the ended loads."""
        self.take_in()
        outcomes, self._outcomes = self._outcomes, []
        if self._ended:
            self._ended.difference_update(outcome.request_id for outcome in outcomes)
        return outcomes

    def take_in(self) -> None:
        """Do as :meth:`poll`, and keep the ended loads for the next poll."""
        # Read first: a job that settles while its result is taken in is settled at the next poll.
        settled = self._worker.get_settled()
        for result in self._worker.get_finished():
            self._take_in(result)
        for job_id in settled:
            self.jobs.settle(job_id)
        for transfer in self._manager.take_transfers():
            self.begin(transfer, (transfer.spec, transfer.dst))

    def _take_in(self, result: TransferResult) -> None:
        self._busy.end(result.job_id)
        if order := self._orders.pop(result.job_id, None):
            moved = dict(zip(order, result.ok, strict=True))
            result = replace(result, ok=tuple(moved[i] for i in range(len(order))))
        # The manager forgets failed chunks before the engine can look them up again.
        ended = self.jobs.answer(
            result.job_id,
            result.ok,
            result.reason,
            unsettled=int(not result.settled),
            seconds=result.transfer_time_s,
        )
        if ended is None:
            return
        job = ended.job
        if isinstance(job, LoadJob):
            self._outcomes.append(self._load_ended(job, result, ended.stale))
            return
        good = result.ok.count(True)
        if isinstance(job, Transfer):
            medium, num_bytes = job.tier.upper(), result.transfer_bytes if result.success else 0
        else:
            medium, num_bytes = "CPU", result.transfer_bytes * good // len(job.keys)
        self._manager.figures.stored(medium, good, num_bytes, result.transfer_time_s)

    # ---- loads ----

    def refuse(self, request_id: str) -> None:
        """End a load at once that found no room in host memory."""
        self._note_short_load(request_id)
        self._outcomes.append(LoadOutcome(request_id, 0, ok=False))

    def request_ended(self, request_id: str, is_loading: bool) -> bool:
        """Return whether :meth:`poll` will name a request that gives up its blocks.

        If not, no outcome may remain: the next owner of its name would take it for its own.
        """
        if is_loading:
            self._ended.add(request_id)
        will_name = self.will_name(request_id)
        if self._outcomes and not will_name:
            self._outcomes = [each for each in self._outcomes if each.request_id != request_id]
        return will_name

    def will_name(self, request_id: str) -> bool:
        """Whether a request ended in a load that :meth:`poll` has yet to name."""
        return request_id in self._ended

    def mark_stale(self) -> None:
        """Let loads and stores from before a reset bring nothing; requests store no more."""
        self.jobs.mark_stale()
        for state in self._requests.values():
            state.barred |= state.has_kv
        self._outcomes = [LoadOutcome(each.request_id, 0, ok=False) for each in self._outcomes]

    def _load_ended(self, job: LoadJob, result: TransferResult, stale: bool) -> LoadOutcome:
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
        return LoadOutcome(load.request_id, end - load.start, end == load.end, dict(tokens))

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
