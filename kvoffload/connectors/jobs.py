"""Jobs in flight, from their order to the answer of the last rank."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.connectors.spans import Spans
from kvoffload.offload.base import Job, LoadJob, StoreJob
from kvoffload.offload.manager import TieredOffloadingManager


@dataclass
class _InFlight:
    job: Job
    ranks_left: int
    ranks_unsettled: int = 0
    ok: tuple[bool, ...] | None = None
    reason: str = ""
    seconds: float = 0.0
    stale: bool = False
    began_ns: int = 0


class Ended(NamedTuple):
    """A job that all ranks have answered."""

    job: Job
    ok: tuple[bool, ...]
    """For each chunk, whether its transfer succeeded on every rank."""
    reason: str
    """Why chunks failed, on the last rank that gave a reason."""
    stale: bool
    """Whether the bytes mean nothing: a reset came after the order, or blocks were overwritten."""


class JobTable:
    """Adds up the answers of all ranks, and answers the manager once for each job.

    Jobs are named by the id under which the workers carry them out.

    Args:
        manager: gets the answers.
        num_ranks: workers that answer each job.
        spans: gets each job's begin and end; None: no one asks for them.
    """

    def __init__(
        self, manager: TieredOffloadingManager, num_ranks: int = 1, spans: Spans | None = None
    ) -> None:
        self._manager = manager
        self._spans = spans
        self._num_ranks = num_ranks
        self._jobs: dict[int, _InFlight] = {}
        # Answered jobs, their slots that some ranks may still touch, and how many ranks.
        self._unsettled: dict[int, tuple[Job, list[int], int]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, job_id: int) -> Job:
        return self._jobs[job_id].job

    def begin(self, job_id: int, job: Job) -> None:
        """Expect every rank's answer to a job."""
        entry = self._jobs[job_id] = _InFlight(job, self._num_ranks)
        if self._spans is not None:
            entry.began_ns = time.time_ns()

    def mark_stale(self) -> None:
        """Let jobs in flight end as failed: a reset has made their bytes meaningless."""
        for entry in self._jobs.values():
            entry.stale = True

    def fail_stores(self, job_ids: Iterable[int]) -> int:
        """Let the stores in flight among these jobs end as failed; return how many they are.

        For stores whose blocks may be written before they are copied.
        """
        entries = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        stores = [entry for entry in entries if isinstance(entry.job, StoreJob)]
        for entry in stores:
            entry.stale = True
        return len(stores)

    def answer(
        self,
        job_id: int,
        ok: tuple[bool, ...],
        reason: str = "",
        *,
        ranks: int = 1,
        unsettled: int = 0,
        seconds: float = 0.0,
    ) -> Ended | None:
        """Add the answer of some ranks; return the job if it was the last one.

        An answer that fits no job is counted and changes nothing else. One of the wrong length
        fails all chunks of its job.

        Args:
            job_id: of the job.
            ok: for each chunk, whether its transfer succeeded on all these ranks.
            reason: why chunks failed.
            ranks: how many ranks answer.
            unsettled: ranks on which a late transfer may still touch the job's host slots.
            seconds: the transfer's own time, on the slowest of these ranks.
        """
        entry = self._jobs.get(job_id)
        if entry is None:
            self._manager.unexpected(f"job {job_id}")
            return None
        if len(ok) != len(entry.job.keys):
            self._manager.unexpected(f"{len(ok)} chunks of job {job_id}")
            ok = (False,) * len(entry.job.keys)
        entry.ok = ok if entry.ok is None else well_on_both(entry.ok, ok)
        entry.reason = reason or entry.reason
        entry.seconds = max(entry.seconds, seconds)
        entry.ranks_unsettled += unsettled
        entry.ranks_left -= ranks
        if entry.ranks_left > 0:
            return None
        del self._jobs[job_id]
        job, ok = entry.job, entry.ok
        if isinstance(job, LoadJob):
            self._manager.promises.measured(job, ok, entry.seconds, entry.reason)
        if entry.stale:
            ok = (False,) * len(job.keys)
        self._manager.complete(job, ok, not entry.ranks_unsettled, entry.reason)
        if self._spans is not None:
            self._spans.job_ended(job, entry.began_ns, ok, entry.reason)
        if entry.ranks_unsettled:
            self._unsettled[job_id] = job, job.unsettled_slots(ok), entry.ranks_unsettled
        return Ended(job, ok, entry.reason, entry.stale)

    def settle(self, job_id: int, ranks: int = 1) -> None:
        """Note ranks on which nothing touches a job's host slots any more."""
        if job_id in self._jobs:
            self._jobs[job_id].ranks_unsettled -= ranks
            return
        if job_id not in self._unsettled:
            return
        job, slots, left = self._unsettled.pop(job_id)
        if left > ranks:
            self._unsettled[job_id] = job, slots, left - ranks
        else:
            self._manager.release_slots(slots, job.id)


def well_on_both(first: Sequence[bool] | None, second: tuple[bool, ...]) -> tuple[bool, ...]:
    """Join two ranks' answers on the chunks of a job; those of different lengths fit no job."""
    if first is None:
        return second
    if len(first) != len(second):
        return ()
    return tuple(a and b for a, b in zip(first, second, strict=True))
