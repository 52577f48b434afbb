"""Statistics through vLLM's own channel: its Prometheus endpoint and its periodic log line.

The names are those of :data:`kvoffload.metric_list.METRICS` after ``vllm:``. Where vLLM's host tier
has a metric of equal meaning, that one is set too. A step publishes a part of the metrics; the last
one before the engine is idle publishes all of them.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

from kvoffload.figures import BUCKETS_S, Durations
from kvoffload.metric_list import METRICS, NAMESPACE, Sample
from kvoffload.offload.base import LoadJob, get_offload_group_idx

LEDGER_EVENTS = "vllm:kvoffload_events"
WORKER_EVENTS = "vllm:kvoffload_worker_events"
RESIDENT = "vllm:kvoffload_host_chunks"
BUSY = "vllm:kvoffload_host_chunks_busy"
USAGE = CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC
PREFIX = "vllm:"

PERIOD_S = 1.0
"""Time between two publications of all metrics of the list."""
SAMPLES_PER_STEP = 8
"""Series that one step looks at, so that a step takes less than 10 microseconds more."""
MAX_OBSERVED = 256
"""Durations of one bucket that one publication tells; vLLM takes each by itself."""
MAX_NAMESPACES = 100
"""Namespaces that are told in all: vLLM forgets no series, and each renewal makes one."""
_KINDS = {"gauge": OffloadingGaugeMetadata, "counter": OffloadingCounterMetadata}
_PUBLISHED = {name: (PREFIX + name, metric.kind) for name, metric in METRICS.items()}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that :class:`StatsPublisher` may emit."""
    definitions: dict[str, OffloadingMetricMetadata] = {
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
    for name, metric in METRICS.items():
        if metric.kind == "histogram":
            definitions[PREFIX + name] = OffloadingHistogramMetadata(
                metric.text, metric.labels, BUCKETS_S
            )
        else:
            definitions[PREFIX + name] = _KINDS[metric.kind](metric.text, metric.labels)
    return definitions


class EngineStats(OffloadingConnectorStats):  # type: ignore[misc]  # untyped base
    """vLLM's statistics, whose log line leaves out the metrics of the list."""

    def reduce(self) -> dict[str, int | float]:
        listed = tuple(PREFIX + name for name in METRICS)
        return {k: v for k, v in super().reduce().items() if not k.startswith(listed)}


def hit_tokens(job: LoadJob, ok: Sequence[bool], groups: Sequence[Any]) -> Counter[str]:
    """Count the tokens of an ended load up to its first failed chunk, by medium.

    The chunks of one group of the KV cache count: one that reads whole prompts, if there is one.
    """
    group = next((g for g in groups if not g.sliding_window_size_in_chunks), groups[0])
    tokens: Counter[str] = Counter()
    for key, medium, fine in zip(job.keys, job.media(), ok, strict=True):
        if get_offload_group_idx(key) == group.group_idx:
            if not fine:
                break
            tokens[medium] += group.tokens_per_chunk
    return tokens


class ManagerFigures(NamedTuple):
    """The ledger as it is now."""

    counters: Mapping[str, int]
    resident: int
    busy: int
    num_slots: int


class StatsPublisher:
    """Turns monotonic counters into what changed since the last report.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker_counters: Counter[str] = Counter()
        self._clock = clock
        self._told: Counter[str] = Counter()
        self._gauges: tuple[int, int] | None = None
        self._due_s = 0.0
        self._samples: Iterator[Sample] | None = None
        """The rest of the publication that has begun."""
        self._published: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._namespaces: dict[tuple[str, ...], int] = {}
        """Those that were told, as labels; 1 for those in use."""
        self._is_last = False
        """Whether the next step publishes all metrics."""

    def publish_all(self) -> None:
        """Let the next step publish all metrics: it is the last one before the engine is idle."""
        self._is_last, self._samples, self._due_s = True, None, -math.inf

    @property
    def is_midway(self) -> bool:
        """Whether a publication has begun and not ended."""
        return self._samples is not None

    def collect(self, figures: ManagerFigures, samples: Callable[[], Iterable[Sample]]) -> Any:
        """Return vLLM's stats object; None if nothing changed.

        Args:
            figures: what each step tells.
            samples: returns the samples of the list; called once in :data:`PERIOD_S`.
        """
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
        self._publish(stats, samples)
        return None if stats.is_empty() else stats

    def _publish(self, stats: Any, samples: Callable[[], Iterable[Sample]]) -> None:
        """Add the next few samples of the list that changed; in a last step all of them."""
        if self._samples is None:
            now_s = self._clock()
            if now_s < self._due_s:
                return
            self._due_s = now_s + PERIOD_S
            self._samples = self._and_renewed(samples())
        is_last, self._is_last = self._is_last, False
        for _ in repeat(None) if is_last else range(SAMPLES_PER_STEP):
            sample = next(self._samples, None)
            if sample is None:
                self._samples = None
                return
            self._add(stats, *sample)

    def _and_renewed(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples, and 0 for each namespace that was told and is no longer in use."""
        told = self._namespaces
        renewed = dict.fromkeys(told, 0)
        for sample in samples:
            if sample[0] == NAMESPACE:
                if sample[1] not in told and len(told) >= MAX_NAMESPACES:
                    continue
                renewed[sample[1]] = 1
            yield sample
        self._namespaces = renewed
        yield from ((NAMESPACE, labels, 0) for labels, value in renewed.items() if not value)

    def _add(self, stats: Any, name: str, labels: tuple[str, ...], value: Any) -> None:
        told = self._published.get((name, labels))
        if value == told:
            return
        self._published[name, labels] = value
        name, kind = _PUBLISHED[name]
        if kind == "gauge":
            stats.set_gauge(name, value, labels)
        elif kind == "counter":  # the first 0 makes the series
            stats.increase_counter(name, max(0, value - (told or 0)), labels)
        else:
            # The empty list makes the series. One call for each duration would take too long.
            stats.observe_histogram(name, 0.0, labels)
            stats.data["data"][name][labels] = _added(value, told or Durations())


def _added(now: Durations, told: Durations) -> list[float]:
    """Return the durations that were added, each as the mean of those of its bucket."""
    added: list[float] = []
    for i, bound_s in enumerate((*BUCKETS_S, math.inf)):
        if new := now.counts[i] - told.counts[i]:
            mean_s = (now.sums[i] - told.sums[i]) / new
            added += [min(mean_s, bound_s)] * min(new, MAX_OBSERVED)
    return added
