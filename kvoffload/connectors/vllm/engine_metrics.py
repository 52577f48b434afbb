"""Statistics through vLLM's own channel: its Prometheus endpoint and its periodic log line.

The names are those of :data:`kvoffload.metrics.names.METRICS` after ``vllm:kvoffload_``. A step
publishes a part of the metrics; the last one before the engine is idle publishes all of them.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, takewhile
from operator import itemgetter
from typing import Any

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

from kvoffload.metrics import names
from kvoffload.metrics.names import METRICS, NAMESPACE, PREFIX
from kvoffload.metrics.samples import BUCKETS_S, Durations, Sample
from kvoffload.offload.base import LoadJob, make_offload_key

USAGE = CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC
"""A metric of vLLM's own host tier: the part of host slots that active transfers use."""
OURS = "vllm:" + PREFIX

PERIOD_S = 1.0
"""Time between two publications of all metrics of the list."""
SAMPLES_PER_STEP = 8
"""Series that one step looks at, so that a step takes less than 10 microseconds more."""
MAX_OBSERVED = 256
"""Durations of one bucket that one publication tells; vLLM takes each by itself."""
MAX_NAMESPACES = 100
"""Namespaces that are told in all: vLLM forgets no series, and each renewal makes one."""
_LOGGED = (
    names.EVENTS, names.EVICTIONS, names.HOST_CHUNKS, names.HOST_CHUNKS_BUSY, names.LOOKUPS,
    names.STORES_DROPPED, names.TRANSFER_FAILURES,
)  # fmt: skip
_KINDS: dict[str, Callable[[str, tuple[str, ...]], OffloadingMetricMetadata]] = {
    "gauge": OffloadingGaugeMetadata,
    "counter": OffloadingCounterMetadata,
    "histogram": lambda text, labels: OffloadingHistogramMetadata(text, labels, BUCKETS_S),
}
_PUBLISHED = {
    USAGE: (USAGE, "gauge"),
    **{name: (OURS + name, metric.kind) for name, metric in METRICS.items()},
}
"""Name of a sample → name on vLLM's page, and kind."""


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that :class:`StatsPublisher` may emit."""
    text = "Fraction of host slots that active transfers use (0 idle, 1 saturated)."
    ours = {OURS + name: _KINDS[m.kind](m.text, m.labels) for name, m in METRICS.items()}
    return {USAGE: OffloadingGaugeMetadata(text), **ours}


class EngineStats(OffloadingConnectorStats):  # type: ignore[misc]  # untyped base
    """vLLM's statistics, whose log line leaves out most metrics of the list."""

    def reduce(self) -> dict[str, int | float]:
        unlogged = tuple(OURS + name for name in METRICS if name not in _LOGGED)
        return {k: v for k, v in super().reduce().items() if not k.startswith(unlogged)}


def hit_tokens(job: LoadJob, ok: Sequence[bool], groups: Sequence[Any]) -> Counter[str]:
    """Count the tokens of an ended load up to its first failed chunk, by tier.

    The chunks of one group of the KV cache count: one that reads whole prompts, if there is one.
    """
    group = next((g for g in groups if not g.sliding_window_size_in_chunks), groups[0])
    of_group = make_offload_key(b"", group.group_idx)
    chunks = zip(job.keys, job.media(), ok, strict=True)
    mine = [(medium, fine) for key, medium, fine in chunks if key.endswith(of_group)]
    good = Counter([medium for medium, _ in takewhile(itemgetter(1), mine)])
    return Counter({name.lower(): n * group.tokens_per_chunk for name, n in good.items()})


class StatsPublisher:
    """Turns monotonic counters into what changed since the last report.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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

    def collect(self, samples: Callable[[], Iterable[Sample]]) -> Any:
        """Return vLLM's stats object, with the next few samples that changed; None for none.

        A last step publishes all of them.

        Args:
            samples: returns the samples of the list; called once in :data:`PERIOD_S`.
        """
        if self._samples is None:
            now_s = self._clock()
            if now_s < self._due_s:
                return None
            self._due_s = now_s + PERIOD_S
            self._samples = self._and_renewed(samples())
        stats = OffloadingConnectorStats()
        is_last, self._is_last = self._is_last, False
        for _ in repeat(None) if is_last else range(SAMPLES_PER_STEP):
            sample = next(self._samples, None)
            if sample is None:
                self._samples = None
                break
            self._add(stats, *sample)
        return None if stats.is_empty() else stats

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
