"""Jobs in flight, from their order to the answer of the last rank."""

import time
from collections.abc import Iterable
from operator import and_

from kvoffload.connectors.spans import Spans
from kvoffload.messages import TransferResult
from kvoffload.offload.base import Job, Manager, StoreJob


class JobTable(dict[int, Job]):
    """Adds up the answers of all ranks, and answers the manager once for each job.

    Jobs are named by the id under which the workers carry them out.

    Args:
        manager: gets the answers.
        num_ranks: workers that answer each job.
        spans: gets each job's begin and end; None: no one asks for them.
    """

    def __init__(self, manager: Manager, num_ranks: int = 1, spans: Spans | None = None) -> None:
        self._manager = manager
        self._spans = spans
        self._num_ranks = num_ranks
        super().__init__()
        self._using: dict[int, list[int]] = {}
        """GPU block → jobs in flight that read it (stores) or write it (loads)."""
        self.unsettled: dict[int, Job] = {}
        """Answered jobs whose slots some ranks may still touch."""

    def begin(self, job_id: int, job: Job) -> None:
        """Expect every rank's answer to a job."""
        self[job_id] = job
        for block in job.blocks:
            self._using.setdefault(block, []).append(job_id)
        if self._spans is not None:
            job.began_ns = time.time_ns()

    def using(self, blocks: Iterable[int]) -> set[int]:
        """Return the jobs in flight that use one of these GPU blocks."""
        using = self._using
        return {job for block in blocks for job in using.get(block, ())} if using else set()

    def mark_stale(self) -> None:
        """Let jobs in flight end as failed: a reset has made their bytes meaningless."""
        for job in self.values():
            job.stale = True

    def fail_stores(self, job_ids: Iterable[int]) -> int:
        """Let the stores in flight among these jobs end as failed; return how many they are.

        For stores whose blocks may be written before they are copied.
        """
        jobs = [self[job_id] for job_id in job_ids if job_id in self]
        stores = [job for job in jobs if isinstance(job, StoreJob)]
        for job in stores:
            job.stale = True
        return len(stores)

    def answer(self, result: TransferResult) -> Job | None:
        """Add a rank's answer; return the job if it was the last one.

        An answer that fits no job is counted and changes nothing else. One of the wrong length
        fails all chunks of its job.
        """
        job_id, ok = result.job_id, result.ok
        job = self.get(job_id)
        if job is None:
            self._manager.unexpected(f"job {job_id}")
            return None
        if len(ok) != len(job.keys):
            self._manager.unexpected(f"{len(ok)} chunks of job {job_id}")
            ok = (False,) * len(job.keys)
        job.ok = tuple(map(and_, job.ok, ok)) if job.ranks else ok
        job.reason = result.reason or job.reason
        job.seconds = max(job.seconds, result.transfer_time_s)
        job.ranks_unsettled += not result.settled
        job.ranks += 1
        if job.ranks < self._num_ranks:
            return None
        del self[job_id]
        for block in job.blocks:
            self._using[block].remove(job_id)
            if not self._using[block]:
                del self._using[block]
        told = (False,) * len(job.keys) if job.stale else job.ok
        self._manager.complete(job, told, not job.ranks_unsettled, job.reason)
        job.ok = told
        if self._spans is not None:
            self._spans.job_ended(job)
        if job.ranks_unsettled:
            self.unsettled[job_id] = job
        return job

    def settle(self, job_id: int) -> None:
        """Note a rank on which nothing touches a job's host slots any more."""
        job = self.get(job_id) or self.unsettled.get(job_id)
        if job is None:
            return
        job.ranks_unsettled -= 1
        if job_id in self.unsettled and job.ranks_unsettled <= 0:
            del self.unsettled[job_id]
            self._manager.release_slots(job.unsettled_slots(job.ok), job.id)
