"""Statistics through vLLM's own channel: its Prometheus endpoint and its periodic log line.

Where vLLM's host tier has a metric of equal meaning, its name is used. Ours are counters by reason:
``vllm:kvoffload_events`` (the ledger's) and ``vllm:kvoffload_worker_events`` (transfers and tiers).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

LEDGER_EVENTS = "vllm:kvoffload_events"
WORKER_EVENTS = "vllm:kvoffload_worker_events"
RESIDENT = "vllm:kvoffload_host_chunks"
BUSY = "vllm:kvoffload_host_chunks_busy"
USAGE = CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that :class:`StatsPublisher` may emit."""
    return {
        LEDGER_EVENTS: OffloadingCounterMetadata(
            documentation="Chunks by what happened to them in the ledger (hits, evicted...).",
            labelnames=("event",),
        ),
        WORKER_EVENTS: OffloadingCounterMetadata(
            documentation="Chunks by why a transfer of them failed; counters of the tiers.",
            labelnames=("event",),
        ),
        RESIDENT: OffloadingGaugeMetadata(documentation="Chunks loadable from host memory."),
        BUSY: OffloadingGaugeMetadata(
            documentation="Host slots that a transfer uses now; 0 when all is quiet."
        ),
        USAGE: OffloadingGaugeMetadata(
            documentation="Fraction of host slots that active transfers use (0 idle, 1 saturated)."
        ),
    }


class ManagerFigures(NamedTuple):
    """The ledger as it is now."""

    counters: Mapping[str, int]
    resident: int
    busy: int
    num_slots: int


class StatsPublisher:
    """Turns monotonic counters into what changed since the last report."""

    def __init__(self) -> None:
        self.worker_counters: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._gauges: tuple[int, int] | None = None

    def collect(self, figures: ManagerFigures) -> Any:
        """Return vLLM's stats object; None if nothing changed."""
        stats = OffloadingConnectorStats()
        for name, count in figures.counters.items():
            change = count - self._told[name]
            if change:
                self._told[name] = count
                stats.increase_counter(LEDGER_EVENTS, change, (name,))
        for name, count in self.worker_counters.items():
            if count:
                stats.increase_counter(WORKER_EVENTS, count, (name,))
        self.worker_counters.clear()
        gauges = figures.resident, figures.busy
        if gauges != self._gauges:
            self._gauges = gauges
            stats.set_gauge(RESIDENT, figures.resident)
            stats.set_gauge(BUSY, figures.busy)
            stats.set_gauge(USAGE, figures.busy / max(1, figures.num_slots))
        return None if stats.is_empty() else stats
