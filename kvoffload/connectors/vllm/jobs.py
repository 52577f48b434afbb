"""Jobs on their way through the workers, and what the ledger is told when the last rank answers."""

from dataclasses import dataclass, field

from kvoffload.connectors.answers import split
from kvoffload.connectors.vllm.step_messages import WorkerReport, well_on_both
from kvoffload.offload.base import CPULoadStoreSpec, LoadStoreSpec, OffloadKey, ReqContext, Transfer
from kvoffload.offload.manager import TieredOffloadingManager


@dataclass
class Job:
    """One load, store or write-through, from the order to the last rank's answer."""

    kind: Transfer | str
    """``load``, ``store``, or the transfer it carries out."""
    keys: tuple[OffloadKey, ...]
    host_slots: tuple[int, ...]
    req_id: str = ""
    covers_all: bool = True
    """False: a load that was promised more chunks than it got slots for."""
    stale: bool = False
    """A reset came in between: what it moves no longer means anything."""
    ranks_left: int = 1
    ranks_unsettled: int = 0
    ok: tuple[bool, ...] | None = None
    reason: str = ""
    """Why chunks of it failed, on the last rank that said so."""


@dataclass(frozen=True)
class Ended:
    """A job all ranks have answered."""

    job: Job
    ok: tuple[bool, ...]


@dataclass
class JobTable:
    """Adds up the answers of all ranks. A chunk is well only if it is on every rank.

    Args:
        ledger: told how every chunk's transfer ended.
        num_ranks: workers that answer each job.
    """

    ledger: TieredOffloadingManager
    num_ranks: int
    _jobs: dict[int, Job] = field(default_factory=dict)
    # Job → slots that some rank may still touch though the job was answered; ranks left.
    _limbo: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, job_id: int, job: Job) -> None:
        """A job is on its way to every rank."""
        job.ranks_left = self.num_ranks
        self._jobs[job_id] = job

    def mark_stale(self) -> None:
        """A reset: what is in flight ends as if it had failed."""
        for job in self._jobs.values():
            job.stale = True

    def take_in(self, report: WorkerReport) -> list[Ended]:
        """Add a step's report; tell the ledger of the jobs that ended with it."""
        ended: list[Ended] = []
        for job_id, ranks in report.unsettled.items():
            self._jobs[job_id].ranks_unsettled += ranks
        for job_id, ranks in report.ended.items():
            job = self._jobs[job_id]
            job.ok = well_on_both(job.ok, report.ok[job_id])
            job.reason = report.reasons.get(job_id, job.reason)
            job.ranks_left -= ranks
        for job_id, ranks in report.settled.items():
            self._settle(job_id, ranks)
        for job_id in report.ended:
            if not self._jobs[job_id].ranks_left:
                ended.append(self._end(job_id))
        return ended

    def _settle(self, job_id: int, ranks: int) -> None:
        if job_id in self._jobs:
            self._jobs[job_id].ranks_unsettled -= ranks
            return
        slots, left = self._limbo.pop(job_id, ((), ranks))
        if left > ranks:
            self._limbo[job_id] = slots, left - ranks
        else:
            self.ledger.release_slots(slots)

    def _end(self, job_id: int) -> Ended:
        job = self._jobs.pop(job_id)
        ok = job.ok or ()
        if job.stale:
            ok = (False,) * len(job.keys)
        settled = job.ranks_unsettled == 0
        if isinstance(job.kind, Transfer):
            self.ledger.complete_transfer(job.kind, ok, settled)
            in_limbo = job.host_slots
        else:
            # Forgotten before anything else: the next lookup must not promise them again.
            self._complete(job, ok, settled)
            in_limbo = tuple(
                slot for slot, fine in zip(job.host_slots, ok, strict=True) if not fine
            )
        if not settled:
            self._limbo[job_id] = in_limbo, job.ranks_unsettled
        return Ended(job, ok)

    def _complete(self, job: Job, ok: tuple[bool, ...], settled: bool) -> None:
        context, ledger = ReqContext(job.req_id), self.ledger
        good, bad = split(job.keys, ok)
        if job.kind == "load":
            if bad:
                ledger.complete_load(bad, context, False, settled, job.reason)
            if good:
                ledger.complete_load(good, context)
        else:
            if bad:
                ledger.complete_store(bad, context, success=False, settled=settled)
            if good:
                ledger.complete_store(good, context)


def slots_of(spec: LoadStoreSpec) -> tuple[int, ...]:
    """Return a host spec's slots as plain numbers."""
    return tuple(spec.host_slots.tolist()) if isinstance(spec, CPULoadStoreSpec) else ()
