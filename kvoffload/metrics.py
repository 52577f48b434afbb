"""Statistics for Prometheus; needs the extra ``metrics``.

The engine's thread passes the result of a connector's ``stats()``, as often as it likes. The thread
that answers scrapes sees the last of these::

    exporter = Exporter()
    prometheus_client.REGISTRY.register(exporter)
    ...
    exporter.update(connector.stats())
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "kvoffload.metrics needs its extra: pip install 'kvoffload[metrics]'"
    ) from error

import kvoffload
from kvoffload.offload.stats import LookupFigures, ManagerStats


class Snapshot(ManagerStats, frozen=True):
    """The statistics of a connector."""

    tiers: dict[str, dict[str, Any]]
    """Usage and ``counters`` of each tier, by name."""


class Exporter(Collector):
    """A Prometheus collector over the last snapshot of figures.

    Labels are tier, result and reason; the metric's name has the direction. No label is a key or a
    request.
    """

    def __init__(self) -> None:
        self._stats: Snapshot | None = None

    def update(self, stats: Mapping[str, Any]) -> None:
        """Take a snapshot: the result of a connector's ``stats()``."""
        self._stats = msgspec.convert({**stats, "counters": stats["manager"]}, Snapshot)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        build = GaugeMetricFamily("kvoffload_build_info", "Version.", labels=["version"])
        build.add_metric([kvoffload.__version__], 1)
        yield build
        stats = self._stats
        if stats is None:
            return
        yield from _occupancy(stats)
        yield from _lookups(stats.lookups)
        yield from _movements(stats)
        yield _reasons("evictions", "Chunks that left a tier.", stats.removed)
        yield _reasons("stores_dropped", "Chunks that were not stored.", stats.not_stored)
        saved = CounterMetricFamily(
            "kvoffload_saved_prefill_tokens", "Tokens loaded instead of computed."
        )
        saved.add_metric([], stats.saved_prefill_tokens)
        yield saved
        yield _reasons("tier_events", "What tiers counted, by name.", _tier_counters(stats))


def _occupancy(stats: Snapshot) -> Iterator[Metric]:
    figures: dict[str, dict[str, float | None]] = {"CPU": msgspec.structs.asdict(stats.host)}
    for name, usage in stats.tiers.items():
        figures[name.upper()] = dict(usage)
    for medium, lane in stats.write_through.items():
        figures.setdefault(medium, {})["inflight_bytes"] = lane.inflight_bytes
    for name, text in (
        ("resident_bytes", "Bytes of chunks that can be loaded."),
        ("inflight_bytes", "Bytes being written, or held by a transfer."),
        ("capacity_bytes", "Bytes that may be resident."),
    ):
        gauge = GaugeMetricFamily(f"kvoffload_{name}", text, labels=["tier"])
        for medium, values in figures.items():
            if (value := values.get(name)) is not None:
                gauge.add_metric([medium.lower()], value)
        yield gauge


def _lookups(lookups: LookupFigures) -> Iterator[Metric]:
    total = CounterMetricFamily(
        "kvoffload_lookups",
        "Chunks found by tier; lookups that ended with a miss, or have no answer yet.",
        labels=["tier", "result"],
    )
    for medium, hits in lookups.hits.items():
        total.add_metric([medium.lower(), "hit"], hits)
    for medium, declined in lookups.declined.items():
        total.add_metric([medium.lower(), "declined"], declined)
    total.add_metric(["", "miss"], lookups.misses)
    total.add_metric(["", "pending"], lookups.pending)
    yield total


def _movements(stats: Snapshot) -> Iterator[Metric]:
    for verb, moves in (("load", stats.loads), ("store", stats.stores)):
        for unit, name, text in (
            ("bytes", f"kvoffload_{verb}_bytes", "Bytes moved."),
            ("seconds", f"kvoffload_{verb}_seconds", "Durations of transfers, added up."),
            ("chunks", f"kvoffload_{verb}_chunks", "Chunks moved."),
        ):
            family = CounterMetricFamily(name, text, labels=["tier"])
            for medium, moved in moves.items():
                family.add_metric([medium.lower()], getattr(moved, unit))
            yield family


def _reasons(name: str, text: str, table: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(f"kvoffload_{name}", text, labels=["tier", "reason"])
    for medium, reasons in table.items():
        for reason, count in reasons.items():
            family.add_metric([medium.lower(), reason], count)
    return family


def _tier_counters(stats: Snapshot) -> dict[str, Mapping[str, int]]:
    return {name: usage["counters"] for name, usage in stats.tiers.items()}
