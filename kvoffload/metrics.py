"""Statistics for Prometheus; needs the extra ``metrics``.

The setting ``metrics_port`` serves them over HTTP. An engine with an endpoint of its own registers
a collector, and passes the result of a connector's ``stats()`` as often as it likes::

    exporter = Exporter()
    prometheus_client.REGISTRY.register(exporter)
    ...
    exporter.update(connector.stats())
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "kvoffload.metrics needs its extra: pip install 'kvoffload[metrics]'"
    ) from error

import kvoffload
from kvoffload.errors import ConfigError
from kvoffload.figures import BUCKETS_S, Durations, WorkerFigures
from kvoffload.metric_list import METRICS, Sample, samples_of_manager, samples_of_worker
from kvoffload.offload.stats import ManagerStats

log = logging.getLogger(__name__)

TRIES = 5
"""Readings of figures for one scrape: the engine's thread may change a dictionary meanwhile."""
_FAMILIES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Snapshot(ManagerStats, frozen=True):
    """The statistics of a connector."""

    loaded_tokens: dict[str, int]
    """By medium."""
    worker: WorkerFigures


class Exporter(Collector):
    """A Prometheus collector; see :data:`kvoffload.metric_list.METRICS`. No label is a request.

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
                metric = METRICS[name]
                family = _FAMILIES[metric.kind](name, metric.text, labels=metric.labels)
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


def samples_of(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a connector's ``stats()``."""
    snapshot = msgspec.convert({**stats, "counters": stats["manager"]}, Snapshot)
    yield from samples_of_manager(snapshot, snapshot.loaded_tokens)
    yield from samples_of_worker(snapshot.worker)


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*BUCKETS_S, "+Inf"), durations.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets


class MetricsServer:
    """An HTTP endpoint with the path ``/metrics``, on threads of its own.

    Args:
        host: the address to listen on.
        port: the port.
        read: returns the samples of a scrape, on any thread.

    Raises:
        ConfigError: nothing can listen there.
    """

    def __init__(self, host: str, port: int, read: Callable[[], Iterable[Sample]]) -> None:
        registry = CollectorRegistry()
        registry.register(Exporter(read))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:  # a rank's port may be past the last one
            reason = getattr(error, "strerror", None) or error
            remedy = f"cannot be listened on at {host}: {reason}; take another"
            raise ConfigError("metrics_port", port, remedy) from error
        log.info("metrics at http://%s:%d/metrics", host, self._server.server_port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
