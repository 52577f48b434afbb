"""Statistics for a Prometheus client; needs the extra ``metrics``.

The setting ``metrics_port`` serves them over HTTP. An engine with an endpoint of its own registers
a collector, and passes the result of a connector's ``stats()`` as often as it likes::

    exporter = Exporter()
    prometheus_client.REGISTRY.register(exporter)
    ...
    exporter.update(connector.stats())
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "kvoffload.metrics needs its extra: pip install '/path/to/kvoffload[metrics]'"
    ) from error

import kvoffload
from kvoffload.metrics.names import PREFIX, metric_of
from kvoffload.metrics.samples import BUCKETS_S, Durations, Sample, samples_of

TRIES = 5
"""Readings of figures for one scrape: the engine's thread may change a dictionary meanwhile."""
_FAMILIES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Exporter(Collector):
    """A Prometheus collector; see :data:`kvoffload.metrics.names.METRICS`. No label is a request.

    Args:
        read: returns the samples of a scrape, on any thread; None: those of the last update.
    """

    def __init__(self, read: Callable[[], Iterable[Sample]] | None = None) -> None:
        self._read = read
        self._samples: tuple[Sample, ...] = ()

    def update(self, stats: Mapping[str, Any]) -> None:
        """Take a snapshot: the result of a connector's ``stats()``."""
        self._samples = tuple(samples_of(stats))

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("kvoffload_build_info", "Version.", labels=["version"])
        build.add_metric([kvoffload.__version__], 1)
        yield build
        families: dict[str, Any] = {}
        for name, labels, value in self._latest():
            family = families.get(name)
            if family is None:
                metric = metric_of(name)
                family = _FAMILIES[metric.kind](PREFIX + name, metric.text, labels=metric.labels)
                families[name] = family
            if isinstance(value, Durations):
                family.add_metric(labels, _buckets(value), sum(value.sums))
            else:
                family.add_metric(labels, value)
        yield from families.values()

    def _latest(self) -> tuple[Sample, ...]:
        for _ in range(TRIES if self._read else 0):
            try:
                self._samples = tuple(self._read()) if self._read else ()
                break
            except RuntimeError:  # a dictionary grew while it was read
                continue
        return self._samples


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*BUCKETS_S, "+Inf"), durations.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets
