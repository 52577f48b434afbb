"""The list of metrics. Its names are the same for every engine, and in ``stats()``.

On a page they begin with ``kvoffload_``, on vLLM's with ``vllm:kvoffload_``. Counters end in
``_total`` where Prometheus reads them.
"""

from functools import partial
from typing import Literal, NamedTuple

PREFIX = "kvoffload_"
HOST = "cpu"
"""The label ``tier`` of host memory."""
Kind = Literal["gauge", "counter", "histogram"]
Ranks = Literal["", "sum", "largest", "smallest"]


class Metric(NamedTuple):
    """One metric."""

    kind: Kind
    labels: tuple[str, ...]
    unit: str
    text: str
    of_ranks: Ranks
    """What several ranks have together. Ranks of a machine share a store."""


METRICS: dict[str, Metric] = {}
"""Every metric of an engine, by its name."""
SERVER_METRICS: dict[str, Metric] = {}
"""Those that the server of a host has instead: they tell its engines apart."""


def page_name(name: str) -> str:
    """Return the name of a gauge or counter on a page of Prometheus."""
    return PREFIX + name + ("_total" if metric_of(name).kind == "counter" else "")


def metric_of(name: str) -> Metric:
    """Return a metric of an engine or of the server of a host."""
    return METRICS.get(name) or SERVER_METRICS[name]


def _metric(
    table: dict[str, Metric],
    kind: Kind,
    name: str,
    labels: str,
    unit: str,
    text: str,
    of_ranks: Ranks = "sum",
) -> str:
    table[name] = Metric(kind, tuple(labels.split()), unit, text, of_ranks)
    return name


_gauge = partial(_metric, METRICS, "gauge", of_ranks="largest")
_counter, _histogram = partial(_metric, METRICS, "counter"), partial(_metric, METRICS, "histogram")
_server_metric = partial(_metric, SERVER_METRICS)


# fmt: off
NAMESPACE = _gauge("namespace_info", "namespace", "",
    "1 for the namespace of the tiers, by its first 16 digits.")
"""Its labels change where weights do: with each renewal."""
TIER_UP = _gauge("tier_up", "tier", "",
    "1 while the tier is open and can be reached, else 0.", of_ranks="smallest")
BREAKERS_OPEN = _gauge("breakers_open", "tier", "breakers",
    "Circuit breakers that are open: of servers, or of the kinds of requests to a bucket.")
RESIDENT_BYTES = _gauge("resident_bytes", "tier", "bytes",
    "Bytes of chunks that can be loaded; of Redis, the memory that all its data takes; absent for "
    "a bucket, which is not listed.")
INFLIGHT_BYTES = _gauge("inflight_bytes", "tier", "bytes",
    "Bytes being written, or held by a transfer.")
CAPACITY_BYTES = _gauge("capacity_bytes", "tier", "bytes",
    "Bytes that may be resident, of Redis its maxmemory; absent without a limit.")
HOST_CHUNKS = _gauge("host_chunks", "", "chunks",
    "Chunks that can be loaded from host memory.")
HOST_CHUNKS_BUSY = _gauge("host_chunks_busy", "", "chunks",
    "Slots of host memory that a transfer uses; rows, if chunks differ in size.")
SERVER_EVICTIONS = _counter("server_evictions", "tier", "values",
    "Values of any kind that the tier's servers evicted since they started.", of_ranks="largest")
TIER_GAUGES = _gauge("tier_gauges", "tier name", "",
    "What tiers measure besides, by name.")
WAITING_CHUNKS = _gauge("waiting_chunks", "tier", "chunks",
    "Chunks in host memory that wait to be written to the tier.")
QUEUE_REQUESTS = _gauge("queue_requests", "", "requests",
    "Requests in the engine's queue whose chunks may be kept.")
QUEUE_KEPT_BYTES = _gauge("queue_kept_bytes", "", "bytes",
    "Bytes of host memory that are kept for them.")
QUEUE_CHUNKS = _counter("queue_chunks", "result", "chunks",
    "Chunks that were kept for queued requests, read early, read early in vain, or given up.")
RETURN_CHUNKS = _counter("return_chunks", "result", "chunks",
    "Chunks of sessions that said when they return: told, there at the return, lost, or overdue.")
LOOKUPS = _counter("lookups", "tier result", "chunks, lookups",
    "Chunks found by tier; lookups that ended with a miss, or have no answer yet.")
HIT_TOKENS = _counter("hit_tokens", "tier", "tokens",
    "Tokens of prompts that were loaded, by their origin.")
SAVED_PREFILL_TOKENS = _counter("saved_prefill_tokens", "", "tokens",
    "Tokens loaded instead of computed.")
PREFILL_RATE = _gauge("prefill_tokens_per_second", "", "tokens a second",
    "Speed at which the engine computed its latest prompts; absent until it is known.")
LOAD_BYTES = _counter("load_bytes", "tier", "bytes",
    "Bytes copied to the KV cache, or read from the tier.")
LOAD_CHUNKS = _counter("load_chunks", "tier", "chunks",
    "Chunks copied to the KV cache, or read from the tier.")
LOAD_SECONDS = _histogram("load_seconds", "tier", "seconds",
    "Durations of these copies and reads, a batch each; of cpu, with the reads that it waited for.")
STORE_BYTES = _counter("store_bytes", "tier", "bytes",
    "Bytes copied from the KV cache, or stored on the tier; not what it had already.")
STORE_CHUNKS = _counter("store_chunks", "tier", "chunks",
    "Chunks copied from the KV cache, or stored on the tier; not what it had already.")
STORE_SECONDS = _histogram("store_seconds", "tier", "seconds",
    "Durations of these copies and writes, a batch each.")
EVICTIONS = _counter("evictions", "tier reason", "chunks",
    "Chunks that left a tier; of a server, what this engine removed.")
STORES_DROPPED = _counter("stores_dropped", "tier reason", "chunks",
    "Chunks that were not stored.")
CORRUPT_CHUNKS = _counter("corrupt_chunks", "tier kind", "chunks",
    "Chunks that failed verification, by the check.")
TRANSFER_FAILURES = _counter("transfer_failures", "reason", "chunks",
    "Chunks whose load or store failed.")
IO_RESTARTS = _counter("io_restarts", "", "restarts",
    "Ends of an I/O process, each followed by a start.")
IO_LOOP_DELAY = _histogram("io_loop_delay_seconds", "", "seconds",
    "Lateness of the I/O server's event loop, twice a second.")
TIER_EVENTS = _counter("tier_events", "tier reason", "events",
    "What tiers counted, by name.")
EVENTS = _counter("events", "event", "events",
    "What the connector and its manager counted besides, by name.")
ENGINES = _server_metric("gauge", "engines", "", "engines",
    "Engines, or ranks of them, that are attached to the server of the host.")
ENGINES_LEAVING = _server_metric("gauge", "engines_leaving", "", "engines",
    "Engines that have ended or left while a store's call still uses their memory.")
NAMESPACE_BYTES = _server_metric("gauge", "namespace_bytes", "namespace", "bytes",
    "Bytes of the server's memory that an attached namespace takes, where namespaces have shares.")
ENGINE_LOAD_BYTES = _server_metric("counter", "engine_load_bytes", "engine", "bytes",
    "Bytes that the server of the host has read for an engine, named by its process or host.")
ENGINE_LOAD_CHUNKS = _server_metric("counter", "engine_load_chunks", "engine", "chunks",
    "Chunks that it has read for an engine.")
ENGINE_LOAD_SECONDS = _server_metric("histogram", "engine_load_seconds", "engine", "seconds",
    "Durations of these reads, a batch each.")
ENGINE_STORE_BYTES = _server_metric("counter", "engine_store_bytes", "engine", "bytes",
    "Bytes that the server of the host has written for an engine.")
ENGINE_STORE_CHUNKS = _server_metric("counter", "engine_store_chunks", "engine", "chunks",
    "Chunks that it has written for an engine.")
ENGINE_STORE_SECONDS = _server_metric("histogram", "engine_store_seconds", "engine", "seconds",
    "Durations of these writes, a batch each.")
# fmt: on
