"""One server: its connections, its queues and its circuit breaker.

Lookups and other small commands use a connection of their own, so that no chunk delays them. Loads
and stores wait in two queues, loads first, for a data connection with room. A bound on the bytes in
flight holds for all connections together. An opening circuit breaker drops every connection and
fails every queued request. A task then probes the server with the kind of request that failed.

All code here runs on the I/O loop's thread.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from kvoffload.backends.redis.channel import Address, open_socket
from kvoffload.backends.redis.circuit_breaker import CircuitBreaker
from kvoffload.backends.redis.connection import Connection, Kind, Lost, Outcome, RedisRequest
from kvoffload.backends.redis.handshake import (
    IN_STEP,
    INFO,
    HealthProbe,
    ServerInfo,
    handshake,
    info_of,
)
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import Line, ServerError

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 64
"""Requests in flight on one connection, of any size."""
_MIN_IN_FLIGHT = 2
"""Requests always allowed in flight to one server, so that it finds the next one waiting."""
_FORBIDDEN_S = 30.0
_FULL_S = 1.0
INFO_EVERY_S = 10.0
"""Time between two questions of how full a server is."""

Resolve = Callable[[], Awaitable[Address]]


class _Pool:
    """Open connections for one purpose, and the number of connects in progress."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.connecting = 0


class Node:
    """A server with its connections.

    Args:
        resolve: Returns the server's address; runs before each connect, because Sentinels may move
            the master.
        access: Credentials and options.
        counters: The backend's.
        on_trouble: Runs when the server may no longer be in charge of its keys.
    """

    def __init__(
        self,
        resolve: Resolve,
        access: Access,
        counters: Counter[str],
        on_trouble: Callable[[], None],
    ) -> None:
        self.breaker = CircuitBreaker()
        self.server: ServerInfo = {}
        """The latest reply to ``INFO``, at most :data:`INFO_EVERY_S` old while the server is up."""
        self._resolve = resolve
        self._access = access
        self._options = access.options
        self._counters = counters
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._probe_request: HealthProbe | None = None
        self._full_until = 0.0
        self._missing_rights: set[str] = set()
        self._address: Address | None = None
        self._label = "an unknown address"
        self._queues: dict[Kind, deque[RedisRequest]] = {
            "lookup": deque(), "load": deque(), "store": deque(),
        }  # fmt: skip
        self._data, self._lookup = _Pool(), _Pool()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._start(self._watch_fill())

    @property
    def is_open(self) -> bool:
        return self.breaker.is_open

    @property
    def full(self) -> bool:
        """True for a moment after the server refused a store for good reason."""
        return self._loop.time() < self._full_until

    @property
    def num_connections(self) -> int:
        return len(self._data.connections) + len(self._lookup.connections)

    def submit(self, requests: Iterable[RedisRequest]) -> None:
        if self._closed or self.is_open:
            for request in requests:
                request.end(Lost("shutdown" if self._closed else "breaker_open"))
            return
        for request in requests:
            self._queues[request.kind].append(request)
        self._pump()

    def judge(self, error: ServerError, request: RedisRequest, right: str) -> None:
        """Handle an error reply: keep the connection, or drop it and count a failure.

        The user needs ``right`` for the refused request.
        """
        self._counters[f"refused_{error.code.lower()}"] += 1
        if error.code == "NOPERM":
            if request.kind == "store":
                self._forbid_stores(error)
                return
            self._warn_missing_right(right, error)
            if request.kind == "lookup":
                return  # loads and stores work without this right
        if error.code in IN_STEP:
            if error.code in ("OOM", "MISCONF", "NOREPLICAS"):
                self._full_until = self._loop.time() + _FULL_S
            return
        connection = request.connection
        if connection is not None and not connection.closed:
            alone = not connection.num_in_flight  # else the abort counts the next request
            connection.abort(error.code)
            if alone:
                self._fail(request.kind, 0.0, error.code, request)

    def _warn_missing_right(self, right: str, error: ServerError) -> None:
        if right not in self._missing_rights:
            self._missing_rights.add(right)
            remedy = f"(ACL SETUSER <user> +{right} ~kvoffload:* allows it)"
            log.warning("redis at %s: %s %s", self._label, error.text, remedy)

    def _forbid_stores(self, error: ServerError) -> None:
        """Pause stores for a user without the right; loads and lookups continue."""
        if not self.full:
            log.warning(
                "redis at %s: no stores for %.0f s: %s (ACL SETUSER <user> +psetex allows them)",
                self._label,
                _FORBIDDEN_S,
                error.text,
            )
        self._full_until = self._loop.time() + _FORBIDDEN_S

    def answered(self, request: RedisRequest) -> None:
        """Count an answered lookup; a late answer is a failure."""
        took_s = self._loop.time() - request.submitted_at
        if took_s <= self._options.lookup_timeout_s:
            self.breaker.success("lookup")
        else:
            self._counters["lookup_late"] += 1
            self._fail("lookup", took_s, f"lookups take {took_s:.2f} s")

    async def _watch_fill(self) -> None:
        """Ask now and then how full the server is, behind its lookups, where it may be asked."""
        while True:
            await asyncio.sleep(INFO_EVERY_S)
            if self.server and not self.is_open:
                request = RedisRequest("lookup", lambda: [INFO], Line())
                request.done = partial(self._told_fill, request)
                self.submit([request])

    def _told_fill(self, request: RedisRequest, reply: Outcome) -> None:
        if server := info_of(reply):
            self.server = server
            self.answered(request)

    def close(self) -> list[asyncio.Task[None]]:
        """Drop every connection and request; return the tasks that still have to end."""
        self._closed = True
        self._drop("shutdown")
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    def _pump(self) -> None:
        """Submit queued requests to connections with room; connect more if that helps."""
        if self._closed:
            return
        lookups, loads, stores = self._queues.values()
        while lookups and self._lookup.connections:
            self._lookup.connections[0].submit(lookups.popleft())
        if lookups:
            self._connect(self._lookup, 1)
        for queue in (loads, stores):
            while queue and (connection := self._connection_with_room(queue[0])):
                connection.submit(queue.popleft())
        if waiting := len(loads) + len(stores):
            wanted = len(self._data.connections) + waiting
            self._connect(self._data, min(self._options.connections, wanted))

    def _connection_with_room(self, request: RedisRequest) -> Connection | None:
        """Return the least loaded data connection, if the bounds admit the request."""
        best, inflight_bytes, in_flight = None, request.nbytes, 0
        for connection in self._data.connections:
            inflight_bytes += connection.inflight_bytes
            in_flight += connection.num_in_flight
            if best is None or connection.inflight_bytes < best.inflight_bytes:
                best = connection
        if best is None or best.num_in_flight >= _MAX_IN_FLIGHT:
            return None
        fits = inflight_bytes <= self._options.max_inflight_bytes
        return best if fits or in_flight < _MIN_IN_FLIGHT else None

    def _connect(self, pool: _Pool, wanted: int) -> None:
        for _ in range(wanted - len(pool.connections) - pool.connecting):
            pool.connecting += 1
            self._start(self._grow(pool))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _grow(self, pool: _Pool) -> None:
        began = self._loop.time()
        failure: Exception | None = None
        try:
            connection = await self._open()
        except Exception as error:  # no error ends the node: the next request connects again
            failure = error
        finally:
            pool.connecting -= 1
        if failure is None:
            self._join(pool, connection)
        else:
            self._unreachable(failure, self._loop.time() - began)

    def _join(self, pool: _Pool, connection: Connection) -> None:
        if self._closed or self.is_open:
            connection.abort("shutdown")
        elif connection.closed:  # lost after its handshake
            self._unreachable(ConnectionError("closed at once"), 0.0)
        else:
            self.breaker.success("connect")
            pool.connections.append(connection)
            self._pump()

    def _unreachable(self, error: Exception, lasted_s: float) -> None:
        if self._closed:
            return
        reason = str(error) or type(error).__name__
        self._counters["connect_failed"] += 1
        log.debug("redis at %s: %s", self._label, reason)
        self._fail("connect", lasted_s, reason)
        if not self._data.connections:
            self._end_queued("unreachable", "load", "store")
        if not self._lookup.connections:
            self._end_queued("unreachable", "lookup")
        self._on_trouble()

    async def _open(self) -> Connection:
        """Connect and do the handshake; OSError, or ValueError for a bad host name or secret."""
        options = self._options
        async with asyncio.timeout(options.connect_timeout_s):
            address = await self._resolve()
            self._label = str(address)
            sock = await open_socket(address, self._access.tls)
            floor_bytes = int(options.min_bandwidth * options.timeout_s)
            connection = Connection(sock, options.timeout_s, floor_bytes, self._pump, self._lost)
            try:
                server = await handshake(connection, self._access)
            except BaseException:
                connection.abort("greeting")
                raise
        self._identify(address, server)
        self._counters["connected"] += 1
        return connection

    def _identify(self, address: Address, server: ServerInfo) -> None:
        """Notice a failover: the old connections lead to a server that is the master no more."""
        if self._address is not None and address != self._address:
            self._drop_connections("moved")
        self._address, self.server = address, server

    def _lost(
        self, connection: Connection, reason: str, silent_s: float, request: RedisRequest | None
    ) -> None:
        for pool in (self._data, self._lookup):
            if connection in pool.connections:
                pool.connections.remove(connection)
                break
        else:
            return  # still in its handshake: the code that awaits it handles the loss
        if reason in ("shutdown", "moved", "breaker_open"):
            return
        self._counters[f"connection_lost_{reason.partition(':')[0].lower()}"] += 1
        log.debug("redis at %s: connection lost: %s", self._label, reason)
        # No failure: an idle connection closed by the server, a cancel, one damaged value.
        if request is not None and reason not in ("cancelled", "oversize", "out_of_step"):
            self._fail(request.kind, silent_s, reason, request)
            self._on_trouble()
        self._loop.call_soon(self._pump)  # queued requests use another connection or a new one

    def _fail(
        self, kind: str, lasted_s: float, reason: str, request: RedisRequest | None = None
    ) -> None:
        nbytes = request.nbytes if request is not None else 0
        if self._closed or not self.breaker.failure(kind, lasted_s, nbytes):
            return
        self._probe_request = HealthProbe.of(request)
        self._counters["breaker_opened"] += 1
        log.warning("redis at %s is left alone until it answers again: %s", self._label, reason)
        self._drop("breaker_open")
        self._start(self._probe())

    async def _probe(self) -> None:
        """Probe until the server is back; keep the successful connection for lookups."""
        while True:
            await asyncio.sleep(self.breaker.probe_in())
            self._counters["probes"] += 1
            try:
                connection = await self._open_and_probe()
            except Exception as error:  # no error ends the probing
                log.debug("redis at %s: the probe failed: %s", self._label, error)
                self.breaker.probe_failed()
                self._on_trouble()
                continue
            self.breaker.probe_succeeded()
            self._counters["breaker_closed"] += 1
            log.warning("redis at %s is back", self._label)
            self._join(self._lookup, connection)
            return  # the breaker may be open again, with a probe of its own

    async def _open_and_probe(self) -> Connection:
        """Connect, and repeat the failed request. Raise as :meth:`_open` if it fails again."""
        connection = await self._open()
        try:
            if self._probe_request is not None:
                await self._probe_request.run(connection)
        except BaseException:
            connection.abort("probe")
            raise
        return connection

    def _drop(self, reason: str) -> None:
        self._drop_connections(reason)
        self._end_queued(reason, "load", "store", "lookup")

    def _drop_connections(self, reason: str) -> None:
        for connection in [*self._data.connections, *self._lookup.connections]:
            connection.abort(reason)

    def _end_queued(self, reason: str, *kinds: Kind) -> None:
        for kind in kinds:
            queue = self._queues[kind]
            while queue:
                queue.popleft().end(Lost(reason))
