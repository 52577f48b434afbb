"""The list of metrics, and the samples of each. Its names are the same for every engine.

Counters end in ``_total`` where Prometheus reads them. Under vLLM the names begin with ``vllm:``.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from kvoffload.figures import Durations, Traffic, WorkerFigures
from kvoffload.offload.stats import ManagerStats

Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """One metric."""

    kind: Kind
    labels: tuple[str, ...]
    unit: str
    text: str


NAMESPACE = "kvoffload_namespace_info"
"""Its labels change where weights do: with each renewal."""
METRICS = {
    NAMESPACE: Metric(
        "gauge", ("namespace",), "", "1 for the namespace of the tiers, by its first 16 digits."
    ),
    "kvoffload_tier_up": Metric(
        "gauge", ("tier",), "", "1 while the tier is open and can be reached, else 0."
    ),
    "kvoffload_breakers_open": Metric(
        "gauge", ("tier",), "breakers", "Circuit breakers of the tier's servers that are open."
    ),
    "kvoffload_resident_bytes": Metric(
        "gauge",
        ("tier",),
        "bytes",
        "Bytes of chunks that can be loaded; of Redis, the memory that all its data takes.",
    ),
    "kvoffload_inflight_bytes": Metric(
        "gauge", ("tier",), "bytes", "Bytes being written, or held by a transfer."
    ),
    "kvoffload_capacity_bytes": Metric(
        "gauge",
        ("tier",),
        "bytes",
        "Bytes that may be resident, of Redis its maxmemory; absent without a limit.",
    ),
    "kvoffload_server_evictions": Metric(
        "counter",
        ("tier",),
        "values",
        "Values of any kind that the tier's servers evicted since they started.",
    ),
    "kvoffload_waiting_chunks": Metric(
        "gauge", ("tier",), "chunks", "Chunks in host memory that wait to be written to the tier."
    ),
    "kvoffload_lookups": Metric(
        "counter",
        ("tier", "result"),
        "chunks, lookups",
        "Chunks found by tier; lookups that ended with a miss, or have no answer yet.",
    ),
    "kvoffload_hit_tokens": Metric(
        "counter", ("tier",), "tokens", "Tokens of prompts that were loaded, by their origin."
    ),
    "kvoffload_saved_prefill_tokens": Metric(
        "counter", (), "tokens", "Tokens loaded instead of computed."
    ),
    "kvoffload_load_bytes": Metric(
        "counter", ("tier",), "bytes", "Bytes copied to the KV cache, or read from the tier."
    ),
    "kvoffload_load_chunks": Metric(
        "counter", ("tier",), "chunks", "Chunks copied to the KV cache, or read from the tier."
    ),
    "kvoffload_load_seconds": Metric(
        "histogram", ("tier",), "seconds", "Durations of these copies and reads, a batch each."
    ),
    "kvoffload_store_bytes": Metric(
        "counter", ("tier",), "bytes", "Bytes copied from the KV cache, or written to the tier."
    ),
    "kvoffload_store_chunks": Metric(
        "counter", ("tier",), "chunks", "Chunks copied from the KV cache, or written to the tier."
    ),
    "kvoffload_store_seconds": Metric(
        "histogram", ("tier",), "seconds", "Durations of these copies and writes, a batch each."
    ),
    "kvoffload_evictions": Metric(
        "counter",
        ("tier", "reason"),
        "chunks",
        "Chunks that left a tier; of a server, what this engine removed.",
    ),
    "kvoffload_stores_dropped": Metric(
        "counter", ("tier", "reason"), "chunks", "Chunks that were not stored."
    ),
    "kvoffload_corrupt_chunks": Metric(
        "counter", ("tier", "kind"), "chunks", "Chunks that failed verification, by the check."
    ),
    "kvoffload_transfer_failures": Metric(
        "counter", ("reason",), "chunks", "Chunks whose load or store failed."
    ),
    "kvoffload_io_restarts": Metric(
        "counter", (), "restarts", "Ends of an I/O process, each followed by a start."
    ),
    "kvoffload_io_loop_delay_seconds": Metric(
        "histogram", (), "seconds", "Lateness of the I/O server's event loop, twice a second."
    ),
    "kvoffload_tier_events": Metric(
        "counter", ("tier", "reason"), "events", "What tiers counted, by name."
    ),
}
"""Every metric, by its name."""
CORRUPT_KINDS = ("payload", "header", "key", "namespace", "size")
"""Checks whose counters begin at 0; the rest appear with the first chunk that fails them."""
FAILURES = ("missing", "corrupt", "late", "unavailable", "deadline", "io_died", "error")
"""Reasons of failed transfers whose counters begin at 0."""
_CORRUPT = ("corrupt_", "read_corrupt_")
_NO_KIND = "corrupt_removed"

Value = int | float | Durations
Sample = tuple[str, tuple[str, ...], Value]
"""Name, label values and value."""


def samples_of_manager(stats: ManagerStats, hit_tokens: Mapping[str, int]) -> Iterator[Sample]:
    """Yield what the engine's process decides and counts; ``hit_tokens`` are by medium."""
    media = ("CPU", *stats.write_through)
    host = stats.host
    yield "kvoffload_resident_bytes", ("cpu",), host.resident_bytes
    yield "kvoffload_inflight_bytes", ("cpu",), host.inflight_bytes
    yield "kvoffload_capacity_bytes", ("cpu",), host.capacity_bytes
    for medium, lane in stats.write_through.items():
        yield "kvoffload_inflight_bytes", (medium.lower(),), lane.inflight_bytes
        yield "kvoffload_waiting_chunks", (medium.lower(),), lane.waiting_chunks
    for medium in media:
        tier = medium.lower()
        yield "kvoffload_lookups", (tier, "hit"), stats.lookups.hits.get(medium, 0)
        yield "kvoffload_hit_tokens", (tier,), hit_tokens.get(medium, 0)
        removed = {"evicted": 0, **stats.removed.get(medium, {})}
        for reason, count in removed.items():
            yield "kvoffload_evictions", (tier, reason), count
        for reason, count in stats.not_stored.get(medium, {}).items():
            yield "kvoffload_stores_dropped", (tier, reason), count
    for medium, count in stats.lookups.declined.items():
        yield "kvoffload_lookups", (medium.lower(), "declined"), count
    yield "kvoffload_lookups", ("", "miss"), stats.lookups.misses
    yield "kvoffload_lookups", ("", "pending"), stats.lookups.pending
    yield "kvoffload_saved_prefill_tokens", (), sum(hit_tokens.values())


def samples_of_worker(figures: WorkerFigures) -> Iterator[Sample]:
    """Yield what the processes that move bytes measure."""
    yield from _traffic("cpu", figures.loads, figures.stores)
    for reason, count in {**dict.fromkeys(FAILURES, 0), **_failed(figures.failed)}.items():
        yield "kvoffload_transfer_failures", (reason,), count
    for name in figures.namespaces:
        yield NAMESPACE, (name,), 1
    if figures.tiers:
        yield "kvoffload_io_restarts", (), figures.io_restarts
        yield "kvoffload_io_loop_delay_seconds", (), figures.loop_delays
    for name, tier in figures.tiers.items():
        yield "kvoffload_tier_up", (name,), int(tier.up)
        yield "kvoffload_breakers_open", (name,), tier.gauges.get("breakers_open", 0)
        if tier.resident_bytes is not None:
            yield "kvoffload_resident_bytes", (name,), tier.resident_bytes
        if tier.capacity_bytes is not None:
            yield "kvoffload_capacity_bytes", (name,), tier.capacity_bytes
        yield "kvoffload_server_evictions", (name,), tier.gauges.get("server_evictions", 0)
        yield from _traffic(name, tier.loads, tier.stores)
        for kind, count in {**dict.fromkeys(CORRUPT_KINDS, 0), **_corrupt(tier.counters)}.items():
            yield "kvoffload_corrupt_chunks", (name, kind), count
        for reason, count in tier.counters.items():
            yield "kvoffload_tier_events", (name, reason), count


def _traffic(tier: str, loads: Traffic, stores: Traffic) -> Iterator[Sample]:
    for verb, traffic in (("load", loads), ("store", stores)):
        yield f"kvoffload_{verb}_bytes", (tier,), traffic.bytes
        yield f"kvoffload_{verb}_chunks", (tier,), traffic.chunks
        yield f"kvoffload_{verb}_seconds", (tier,), traffic.seconds


def _failed(counters: Mapping[str, int]) -> dict[str, int]:
    return {name.removeprefix("failed_"): count for name, count in counters.items()}


def _corrupt(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of failed verifications, by the check that failed."""
    found: dict[str, int] = {}
    for name, count in counters.items():
        for start in _CORRUPT:
            if name.startswith(start) and name != _NO_KIND:
                kind = name.removeprefix(start)
                found[kind] = found.get(kind, 0) + count
    return found
