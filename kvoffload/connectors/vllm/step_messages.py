"""Messages of a step between the scheduler's process and the workers': plain data, pickled."""

from dataclasses import dataclass, field, fields

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvoffload.backends.base import Removal
from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.vllm.kv_caches import Write
from kvoffload.connectors.vllm.worker_presence import IndexPart, PresenceQuery, PresenceReply
from kvoffload.identity import Fact
from kvoffload.messages import BackendLoadStoreSpec, CPULoadStoreSpec, TransferResult
from kvoffload.offload.base import Job
from kvoffload.policies.told_return import ToldReturn


@dataclass
class WorkerInfo:
    """What a worker tells the scheduler of itself after its KV cache is registered.

    It travels in a report, not in vLLM's handshake. ``MultiConnector`` gives the handshake of one
    of its connectors to all of them, and vLLM repeats the handshake at each wake-up.
    """

    num_slots: int
    """Host slots of this rank's slab."""
    slot_bytes: int
    facts: dict[str, Fact]
    """The facts that decide the meaning of this rank's bytes."""
    rank: int = 0
    """This worker's number; no other worker of the engine has it."""
    listed: frozenset[str] = frozenset()
    """The tiers whose chunks this worker's reports list."""
    first_slot: int = 0
    """The first slot that may be used: a tier may still touch those before it."""
    payload_bytes: tuple[int, ...] = ()
    """Bytes of a chunk of each KV cache group, if slots differ in size; a slot is then a row."""


@dataclass
class StepMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]  # untyped base
    """Scheduler → workers: loads, stores, and the orders that vLLM's own message lacks."""

    write_through: dict[int, Write] = field(default_factory=dict)
    """Follow-up transfers by job id (negative: vLLM's ids are not)."""
    early_reads: dict[int, tuple[BackendLoadStoreSpec, CPULoadStoreSpec]] = field(
        default_factory=dict
    )
    """Reads of tiers into host memory for requests that wait, by job id (negative)."""
    awaited: list[tuple[int, list[bytes]]] = field(default_factory=list)
    """What requests in the queue need, for the stores; see :class:`kvoffload.io.protocol.Await`."""
    returns: list[ToldReturn] = field(default_factory=list)
    """What ended requests said of their sessions, for the stores."""
    generation: str | None = None
    """Set once after a reset: everything stored before no longer means the same."""
    emptied: tuple[str, str] | None = None
    """Set once after an operator's order: its name, which reports of the stores opened then have;
    and the tier that is emptied, "" for all."""
    questions: dict[str, PresenceQuery] = field(default_factory=dict)
    """Tier → chunks that each worker asks its store for."""
    asks_workers: bool = False
    """Set until the scheduler knows all workers: each answers with its :class:`WorkerInfo`."""
    asks_figures: bool = False
    """Set in the last step before the engine is idle: each worker tells its figures at once."""


class _IdleStep(StepMetadata):
    """The message of a step without orders; there is one in each process."""

    def __reduce__(self) -> str:
        return "IDLE_STEP"


IDLE_STEP = _IdleStep({}, {})


@dataclass
class WorkerReport(OffloadingWorkerMetadata):  # type: ignore[misc]  # untyped base
    """Workers → scheduler: how each job ended, chunk by chunk.

    vLLM adds up the reports of several ranks in one step; the scheduler adds up over steps.
    """

    ended: list[TransferResult] = field(default_factory=list)
    """Each rank's answers to jobs."""
    settled: list[int] = field(default_factory=list)
    """Job ids, once for each rank on which a late transfer no more touches the host slots."""
    removals: list[tuple[str, list[Removal]]] = field(default_factory=list)
    """A tier, and chunks that it removed by itself."""
    presence: list[IndexPart] = field(default_factory=list)
    """What appeared in the stores of each rank and what left them."""
    down: dict[int, frozenset[str]] = field(default_factory=dict)
    """Rank → its tiers that cannot be asked, where these have changed."""
    answers: list[PresenceReply] = field(default_factory=list)
    """Each rank's answers to the scheduler's questions."""
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    """Rank → what it tells of itself, where the scheduler asked."""
    emptied: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rank → name of the order to empty stores, and what is wrong with them, "" for nothing."""
    has_new_weights: bool = False
    """Whether a rank's model has loaded weights that no order for a generation has followed."""
    figures: dict[int, bytes] = field(default_factory=dict)
    """Rank → what it has measured since its start (:mod:`kvoffload.metrics.samples`)."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        # No generator: each step of each worker asks.
        return not (self.completed_jobs or any(map(vars(self).get, _OF_REPORTS)))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Add up two ranks' reports of one step; a chunk is good only if it is good on both."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"cannot add {type(other).__name__} to a WorkerReport")
        both = OffloadingWorkerMetadata.aggregate(self, other)
        report = WorkerReport(both.completed_jobs, both.transfer_stats)
        for name in _OF_REPORTS:
            ours, theirs = getattr(self, name), getattr(other, name)
            setattr(report, name, ours + theirs if isinstance(ours, list) else ours | theirs)
        return report

    def answer(self, jobs: JobTable) -> list[Job]:
        """Add the report to the jobs in flight; return those that the last rank has answered."""
        # First: a job whose last answer is in this report then ends settled.
        for job_id in self.settled:
            jobs.settle(job_id)
        answered = map(jobs.answer, self.ended)
        return [job for job in answered if job is not None]


_OF_REPORTS = tuple(
    each.name for each in fields(WorkerReport) if each not in fields(OffloadingWorkerMetadata)
)
"""The fields that vLLM's report lacks: lists, dictionaries by rank, and a flag."""
