"""Transfers of the local connector: submits jobs to the worker and takes in their results."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvoffload.connectors.block_tables import BusyBlocks
from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.loads import LoadOutcome, LoadResults
from kvoffload.messages import TransferResult, TransferSpec
from kvoffload.offload.base import Job, LoadJob, Transfer
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.transfer.engine import TransferEngine


class Transfers:
    """Carries out the manager's jobs, for one connector, on the engine's thread.

    Args:
        manager: gets the answers.
        worker: moves the bytes.
        results: turns answers of loads into outcomes.
    """

    def __init__(
        self, manager: TieredOffloadingManager, worker: TransferEngine, results: LoadResults
    ) -> None:
        self.jobs = JobTable(manager)
        self._manager = manager
        self._worker = worker
        self._results = results
        self._busy = BusyBlocks()
        # Stores whose chunks are transferred in another order than the job's: that order.
        self._orders: dict[int, list[int]] = {}

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

    def wait_for_blocks(self, block_ids: Iterable[int]) -> None:
        """Block until no transfer uses these GPU blocks."""
        if jobs := self._busy.jobs(block_ids):
            self._worker.wait(jobs)

    def poll(self) -> list[LoadOutcome]:
        """Answer the jobs that have ended, begin write-through; return the ended loads."""
        outcomes: list[LoadOutcome] = []
        # Read first: a job that settles while its result is taken in is settled at the next poll.
        settled = self._worker.get_settled()
        for result in self._worker.get_finished():
            outcomes.extend(self._take_in(result))
        for job_id in settled:
            self.jobs.settle(job_id)
        for transfer in self._manager.take_transfers():
            self.begin(transfer, (transfer.spec, transfer.dst))
        return outcomes

    def _take_in(self, result: TransferResult) -> list[LoadOutcome]:
        self._busy.end(result.job_id)
        if order := self._orders.pop(result.job_id, None):
            moved = dict(zip(order, result.ok, strict=True))
            result = replace(result, ok=tuple(moved[i] for i in range(len(order))))
        # The manager forgets failed chunks before the engine can look them up again.
        ended = self.jobs.answer(
            result.job_id, result.ok, result.reason, unsettled=int(not result.settled)
        )
        if ended is None:
            return []
        job = ended.job
        if isinstance(job, LoadJob):
            return [self._results.ended(job, result, ended.stale)]
        good = result.ok.count(True)
        if isinstance(job, Transfer):
            medium, num_bytes = job.tier.upper(), result.transfer_bytes if result.success else 0
        else:
            medium, num_bytes = "CPU", result.transfer_bytes * good // len(job.keys)
        self._manager.figures.stored(medium, good, num_bytes, result.transfer_time_s)
        return []
