"""Transfers under way: what each is for, which GPU blocks it uses, and what follows its end."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

from kvoffload.connectors.answers import split
from kvoffload.connectors.chunking import ChunkGroups
from kvoffload.connectors.load_backoff import LoadBackoff
from kvoffload.connectors.local_jobs import Load, LoadOutcome, RequestState, Store
from kvoffload.messages import TransferSpec
from kvoffload.offload.base import ReqContext, Transfer, TransferResult
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.transfer.engine import TransferEngine


class UnderWay:
    """Begins transfers and takes in their ends, for one connector, on the engine's thread.

    Args:
        manager: the ledger; told of every end.
        worker: carries the transfers out.
        groups: of the chunks.
        requests: the connector's, by id; here their loads are marked as ended.
        short_loads: told which loads brought less than promised.
    """

    def __init__(
        self,
        manager: TieredOffloadingManager,
        worker: TransferEngine,
        groups: ChunkGroups,
        requests: Mapping[str, RequestState],
        short_loads: LoadBackoff,
    ) -> None:
        self.loaded_tokens: Counter[str] = Counter()
        """By the medium they came from."""
        self._manager = manager
        self._worker = worker
        self._groups = groups
        self._requests = requests
        self._short_loads = short_loads
        self._job_ids = itertools.count()
        self._jobs: dict[int, Load | Store | Transfer] = {}
        self._unsettled: dict[int, tuple[int, ...]] = {}
        # GPU block → the jobs that still read it (stores) or write it (a load).
        self._busy_blocks: dict[int, list[int]] = {}
        # Loads that were under way at a reset and did not end in time.
        self._before_reset: set[int] = set()

    @property
    def count(self) -> int:
        """How many transfers have not been taken in."""
        return len(self._jobs)

    def begin(self, job: Load | Store, spec: TransferSpec) -> int:
        """Submit a load or a store; returns its id."""
        job_id = next(self._job_ids)
        self._jobs[job_id] = job
        for block in job.gpu_blocks:
            self._busy_blocks.setdefault(block, []).append(job_id)
        self._worker.submit(job_id, spec, len(job.keys))
        return job_id

    def begin_what_follows(self) -> None:
        """Submit what the manager wants moved by itself: write-through to tiers."""
        for transfer in self._manager.take_transfers():
            job_id = next(self._job_ids)
            self._jobs[job_id] = transfer
            self._worker.submit(job_id, (transfer.src, transfer.dst), len(transfer.keys))

    def wait_for_blocks(self, block_ids: Iterable[int]) -> None:
        """Block until no transfer uses these GPU blocks."""
        busy = self._busy_blocks
        if busy and (jobs := {job for block in block_ids for job in busy.get(block, ())}):
            self._worker.wait(jobs)

    def bar_loads(self) -> None:
        """Let loads under way bring nothing: what they load is of before a reset."""
        self._before_reset.update(i for i, job in self._jobs.items() if isinstance(job, Load))

    def note_short_load(self, request_id: str) -> None:
        """Remember that a load brought less than promised."""
        if self._short_loads.note(request_id):
            self._manager.counters["declined_after_short_load"] += 1

    def take_in(self) -> list[LoadOutcome]:
        """Tell the manager of all that has ended; returns the loads among it. Never blocks."""
        outcomes: list[LoadOutcome] = []
        # Read first: a job that settles while its result is taken in is settled at the next poll.
        settled = self._worker.get_settled()
        for result in self._worker.get_finished():
            job = self._jobs.pop(result.job_id)
            if isinstance(job, Load):
                outcomes.append(self._load_ended(job, result))
            elif isinstance(job, Store):
                self._store_ended(job, result)
            else:
                self._transfer_ended(job, result)
        for job_id in settled:
            self._manager.release_slots(self._unsettled.pop(job_id))
        return outcomes

    def _transfer_ended(self, transfer: Transfer, result: TransferResult) -> None:
        self._manager.complete_transfer(transfer, result.ok, result.settled)
        self._manager.figures.stored(
            transfer.tier.upper(),
            result.ok.count(True),
            result.transfer_bytes if result.success else 0,
            result.transfer_time_s,
        )
        if not result.settled:
            self._unsettled[result.job_id] = tuple(transfer.src.host_slots.tolist())

    def _end(self, job: Load | Store, job_id: int) -> None:
        for block in job.gpu_blocks:
            jobs = self._busy_blocks[block]
            jobs.remove(job_id)
            if not jobs:
                del self._busy_blocks[block]

    def _load_ended(self, load: Load, result: TransferResult) -> LoadOutcome:
        self._end(load, result.job_id)
        state = self._requests.get(load.request_id)
        still_waits = state is not None and state.loading == result.job_id
        if state is not None and still_waits:
            state.loading = None
        good, bad = split(load.keys, result.ok)
        # Forgotten before the outcome is told, or the next lookup would promise them again.
        context = ReqContext(load.request_id)
        if bad:
            self._manager.complete_load(
                bad, context, success=False, settled=result.settled, reason=result.reason
            )
        if good:
            self._manager.complete_load(good, context)
        if not result.settled:
            self._unsettled[result.job_id] = tuple(
                slot for slot, ok in zip(load.host_slots, result.ok, strict=True) if not ok
            )
        arrived = {
            (piece.group, piece.chunk): medium
            for piece, medium, ok in zip(load.pieces, load.media, result.ok, strict=True)
            if ok
        }
        end = self._groups.usable(load.start, load.end, arrived)
        by_medium = self._groups.tokens_by_medium(load.start, end, arrived)
        self.loaded_tokens.update(by_medium)
        self._measure(load, result, by_medium)
        loaded = end - load.start
        if still_waits and loaded < load.wanted_tokens:
            self.note_short_load(load.request_id)
        if result.job_id in self._before_reset:
            self._before_reset.remove(result.job_id)
            return LoadOutcome(load.request_id, 0, ok=False)
        return LoadOutcome(load.request_id, loaded, loaded == load.wanted_tokens, dict(by_medium))

    def _measure(self, load: Load, result: TransferResult, by_medium: Mapping[str, int]) -> None:
        """Tell the manager how fast each medium was; they are read side by side."""
        chunks = Counter(m for m, ok in zip(load.media, result.ok, strict=True) if ok)
        for medium, count in chunks.items():
            num_bytes = result.transfer_bytes * count // len(load.keys)
            # What came from host memory did not take as long as a load that waited for a tier.
            rated = medium != "CPU" or len(chunks) == 1
            tokens = by_medium.get(medium, 0)
            self._manager.figures.loaded(
                medium, tokens, count, num_bytes, result.transfer_time_s, rated
            )

    def _store_ended(self, store: Store, result: TransferResult) -> None:
        self._end(store, result.job_id)
        good, bad = split(store.keys, result.ok)
        if bad:
            self._manager.complete_store(bad, store.context, success=False, settled=result.settled)
        if good:
            self._manager.complete_store(good, store.context)
        num_bytes = result.transfer_bytes * len(good) // max(1, len(store.keys))
        self._manager.figures.stored("CPU", len(good), num_bytes, result.transfer_time_s)
        if not result.settled:
            self._unsettled[result.job_id] = tuple(
                slot for slot, ok in zip(store.host_slots, result.ok, strict=True) if not ok
            )
