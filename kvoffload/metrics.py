"""Statistics for Prometheus; needs the extra ``metrics``.

The setting ``metrics_port`` serves them over HTTP. An engine with an endpoint of its own registers
a collector, and passes the result of a connector's ``stats()`` as often as it likes::

    exporter = Exporter()
    prometheus_client.REGISTRY.register(exporter)
    ...
    exporter.update(connector.stats())
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

try:
    from prometheus_client import CollectorRegistry, generate_latest
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
from kvoffload.errors import ConfigError
from kvoffload.figures import BUCKETS_S, Durations, WorkerFigures
from kvoffload.metric_list import METRICS, Sample, samples_of_manager, samples_of_worker
from kvoffload.offload.stats import ManagerStats

log = logging.getLogger(__name__)

TRIES = 5
"""Readings of figures for one scrape: the engine's thread may change a dictionary meanwhile."""
MOST_CONNECTIONS = 8
"""Of the endpoint at once: each takes a descriptor of the engine's process."""
CONNECTION_S = 5.0
"""A connection is closed after so long, whatever it does."""
FRESH_S = 1.0
"""A page is computed once in so long, for all who ask."""
LONGEST_REQUEST = 8192
_HEAD = (
    b"HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    b"Connection: close\r\n\r\n"
)
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
    """An HTTP endpoint with the path ``/metrics``, on a thread of its own.

    Every user of the host can reach it. So its connections, their time and the pages computed for
    them are bounded, and more wait in the kernel.

    Args:
        host: the address to listen on.
        port: the port.
        read: returns the samples of a scrape, on any thread.

    Raises:
        ConfigError: nothing can listen there.
    """

    def __init__(self, host: str, port: int, read: Callable[[], Iterable[Sample]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(Exporter(read))
        self._page, self._fresh_until_s = b"", 0.0
        try:
            self._listening = _listening(host, port)
        except (OSError, OverflowError) as error:  # a rank's port may be past the last one
            reason = getattr(error, "strerror", None) or error
            remedy = f"cannot be listened on at {host}: {reason}; take another"
            raise ConfigError("metrics_port", port, remedy) from error
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-metrics", daemon=True)
        self._thread.start()
        log.info("metrics at http://%s:%d/metrics", host, port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with self._listening, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._closing.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        free, answers = asyncio.Semaphore(MOST_CONNECTIONS), set()
        while True:
            await free.acquire()
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError:  # no descriptor is left, or the other end has gone
                free.release()
                await asyncio.sleep(FRESH_S)
                continue
            answer = asyncio.create_task(self._answer(connection))
            answers.add(answer)
            answer.add_done_callback(answers.discard)
            answer.add_done_callback(lambda _: free.release())

    async def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # a timeout is one
            connection.setblocking(False)
            async with asyncio.timeout(CONNECTION_S):
                asked = b""
                while b"\r\n\r\n" not in asked:
                    piece = await self._loop.sock_recv(connection, LONGEST_REQUEST)
                    asked += piece
                    if not piece or len(asked) > LONGEST_REQUEST:
                        return
                await self._loop.sock_sendall(connection, _HEAD + self._latest())

    def _latest(self) -> bytes:
        if time.monotonic() > self._fresh_until_s:
            self._fresh_until_s = time.monotonic() + FRESH_S
            self._page = generate_latest(self._registry)
        return self._page


def _listening(host: str, port: int) -> socket.socket:
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    family, _, _, _, address = socket.getaddrinfo(host, None, type=kind, flags=flags)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    if port > 65535:
        raise OverflowError("the last port is 65535")
    found = socket.create_server(
        (address[0], port), family=family, backlog=MOST_CONNECTIONS, dualstack_ipv6=both
    )
    found.setblocking(False)
    return found
