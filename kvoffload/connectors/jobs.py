"""What connectors tell the manager: answers of all ranks to its jobs, and uses of chunks."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import and_

from kvoffload.connectors.spans import Spans
from kvoffload.messages import TransferResult
from kvoffload.offload.base import Job, Manager, OffloadKey, ReqContext, StoreJob


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
        self._using: dict[int, tuple[int, ...]] = {}
        """GPU block → jobs in flight that read it (stores) or write it (loads)."""
        self.unsettled: dict[int, Job] = {}
        """Answered jobs whose slots some ranks may still touch."""

    def begin(self, job_id: int, job: Job) -> None:
        """Expect every rank's answer to a job."""
        self[job_id] = job
        if job.blocks:
            # Blocks are seldom in two jobs: then none of them takes a step of Python.
            using = self._using
            mine: dict[int, tuple[int, ...]] = dict.fromkeys(job.blocks, (job_id,))
            if using:
                mine |= {block: using[block] + mine[block] for block in using.keys() & mine.keys()}
            using.update(mine)
        if self._spans is not None:
            job.began_ns = time.time_ns()

    def using(self, blocks: Iterable[int]) -> set[int]:
        """Return the jobs in flight that use one of these GPU blocks."""
        using = self._using
        return set(chain.from_iterable(map(using.get, blocks, repeat(())))) if using else set()

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
        using, alone = self._using, (job_id,)
        jobs = list(map(using.pop, job.blocks, repeat(alone)))
        if jobs.count(alone) < len(jobs):
            for block, several in zip(job.blocks, jobs, strict=True):
                if others := tuple([other for other in several if other != job_id]):
                    using[block] = others
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
            self._manager.release_slots(job.unsettled_slots(), job)


class UseCounter:
    """Counts each request once as a use of its chunks, and retires the chunks when it ends.

    A request counts before room is made for it: when its load begins, or when its first chunks are
    offered for storing. Chunks of full attention count wherever they are, also in GPU memory alone.
    Chunks of windows and states count if the request loads them.

    Args:
        manager: gets the uses and ends.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._counted: set[str] = set()

    def count(self, context: ReqContext, used: Callable[[], Sequence[OffloadKey]]) -> bool:
        """Count a request, unless it was counted before; return whether this call counted it.

        Args:
            context: of the request.
            used: lists the chunks that it uses, head to tail; called only if the request counts.
        """
        if context.req_id in self._counted:
            return False
        self._counted.add(context.req_id)
        self._manager.touch(used(), context)
        return True

    def has_counted(self, req_id: str) -> bool:
        """Whether a request has counted, and not ended: it runs, or was preempted."""
        return req_id in self._counted

    def end(
        self,
        context: ReqContext,
        chunks: Callable[[], Sequence[OffloadKey]],
        *,
        again: bool = False,
    ) -> None:
        """Retire the chunks of an ended request: its tail leaves before its head.

        A request that was never admitted did not count. It leaves the order as it is.

        Args:
            context: of the request.
            chunks: lists its chunks, head to tail; called only if the request counted.
            again: it will be admitted again, and must not count again.
        """
        used = chunks() if context.req_id in self._counted else ()
        if again:  # it has not ended: what it says of its session's return counts later
            self._manager.request_admitted(context)
            self._manager.retire(used)
        else:
            self._manager.retire(used, context)
            self._counted.discard(context.req_id)
