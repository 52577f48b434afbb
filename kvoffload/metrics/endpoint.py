"""The page of metrics that the setting ``metrics_port`` serves over HTTP."""

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from kvoffload.config import OffloadConfig
from kvoffload.errors import ConfigError
from kvoffload.extras import check_extra
from kvoffload.metrics.samples import Sample

log = logging.getLogger(__name__)

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


def serve_metrics(
    config: OffloadConfig, read: Callable[[], Iterable[Sample]], number: int = 0
) -> "MetricsServer | None":
    """Open an endpoint if the settings name a port.

    Args:
        config: the settings.
        read: returns the samples of a scrape, on any thread.
        number: of the worker among all; added to the port.

    Raises:
        ConfigError: nothing can listen there, or the extra ``metrics`` is not installed.
    """
    if config.metrics_port is None:
        return None
    check_extra("metrics_port", config.metrics_port)
    return MetricsServer(config.metrics_host, config.metrics_port + number, read)


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
        from prometheus_client import CollectorRegistry, generate_latest

        from kvoffload.metrics.exporter import Exporter

        registry = CollectorRegistry()
        registry.register(Exporter(read))
        self._new_page = partial(generate_latest, registry)
        self._page, self._fresh_until_s = b"", 0.0
        try:
            self._listening = _listening(host, port)
        except (OSError, OverflowError) as error:  # a rank's port may be past the last one
            reason = getattr(error, "strerror", None) or error
            remedy = f"cannot be listened on at {host}: {reason}; take another"
            if getattr(error, "errno", None) == errno.EADDRINUSE:  # as by an engine that was killed
                remedy += ", or end what has it: ss -ltnp names it"
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
            self._page = self._new_page()
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
