"""What passes between the scheduler's process and the workers', each step; plain data, pickled."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvoffload.backends.base import Removal
from kvoffload.messages import TransferResult
from kvoffload.offload.base import Transfer
from kvoffload.offload.namespace import Fact


@dataclass
class WorkerInfo(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler once, after its KV cache is registered."""

    num_slots: int
    """Host slots of this rank's slab that may be used, from the first."""
    slot_bytes: int
    facts: dict[str, Fact]
    """What decides the meaning of this rank's bytes; the scheduler opens its stores for looking
    up under the same namespace."""


@dataclass
class StepMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]
    """Scheduler → workers: loads and stores, and what vLLM's own message has no room for."""

    write_through: dict[int, Transfer] = field(default_factory=dict)
    """Follow-up transfers by job id (negative: vLLM's ids are not)."""
    generation: str | None = None
    """Set once after a reset: everything stored before no longer means the same."""


@dataclass
class WorkerReport(OffloadingWorkerMetadata):  # type: ignore[misc]
    """Workers → scheduler: how each job ended, chunk by chunk.

    Reports of several ranks are added up on their way; the scheduler adds up over steps.
    """

    ended: dict[int, int] = field(default_factory=dict)
    """Job id → ranks that answered it."""
    ok: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    """Job id → for each chunk, whether it is well on every rank that answered."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Job id → why chunks of it failed."""
    unsettled: dict[int, int] = field(default_factory=dict)
    """Job id → ranks on which something may still touch its host slots."""
    settled: dict[int, int] = field(default_factory=dict)
    """Job id → ranks on which that is over."""
    removals: dict[str, list[Removal]] = field(default_factory=dict)
    """Tier → what it gave up by itself."""
    counters: Counter[str] = field(default_factory=Counter)
    """What the workers counted since their last report."""

    def add(self, result: TransferResult) -> None:
        """Note this rank's answer to a job."""
        self.ended[result.job_id] = 1
        self.ok[result.job_id] = result.ok
        if result.reason:
            self.reasons[result.job_id] = result.reason
        if not result.settled:
            self.unsettled[result.job_id] = 1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (
            self.completed_jobs or self.ended or self.settled or self.removals or self.counters
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Add up two ranks' reports of one step; a chunk is well only if it is on both."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"cannot add {type(other).__name__} to a WorkerReport")
        both = OffloadingWorkerMetadata.aggregate(self, other)
        report = WorkerReport(both.completed_jobs, both.transfer_stats)
        for source in (self, other):
            for total, part in (
                (report.ended, source.ended),
                (report.unsettled, source.unsettled),
                (report.settled, source.settled),
            ):
                for job_id, ranks in part.items():
                    total[job_id] = total.get(job_id, 0) + ranks
            for job_id, ok in source.ok.items():
                report.ok[job_id] = well_on_both(report.ok.get(job_id), ok)
            report.reasons.update(source.reasons)
            for tier, removals in source.removals.items():
                report.removals.setdefault(tier, []).extend(removals)
            report.counters.update(source.counters)
        return report


def well_on_both(first: tuple[bool, ...] | None, second: tuple[bool, ...]) -> tuple[bool, ...]:
    """Join two ranks' verdicts on the chunks of a job."""
    if first is None:
        return second
    return tuple(a and b for a, b in zip(first, second, strict=True))
