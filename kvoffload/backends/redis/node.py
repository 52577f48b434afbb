"""One server: its connections, its bound on bytes in flight, and its circuit breaker.

Lookups and other small commands have a connection of their own, so that no chunk delays them. Loads
and stores wait, loads first, until the bounds admit them. An opening circuit breaker ends every
connection, and every command that waits. A thread then probes the server, with as many bytes as
the command that failed had. Any thread may call these methods.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvoffload.backends.flight_bounds import InFlight
from kvoffload.backends.redis.circuit_breaker import CircuitBreaker
from kvoffload.backends.redis.connection import Address, Connection, Lost
from kvoffload.backends.redis.handshake import ServerInfo, echo, handshake, info_of
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.refusals import Refusals
from kvoffload.backends.redis.resp import ProtocolError, Reply, ServerError
from kvoffload.backends.redis.server_request import Request

log = logging.getLogger(__name__)

_NEAR_S = 0.0005
"""A shorter round trip hides behind the transfer of another chunk."""
_NEAR_AT_ONCE = 2
"""Chunks of one call in flight to such a server: they keep its one thread busy."""
MIN_IN_FLIGHT = 2
"""Chunks always allowed in flight to one server, so that it finds the next one waiting."""
INFO_EVERY_S = 10.0
"""Time between two questions of how full a server is."""
_DELIBERATE = frozenset({"shutdown", "breaker_open"})
"""Reasons for the end of a connection that no counter needs."""
_HARMLESS = frozenset({"cancelled", "oversize", "out_of_step"})
"""Reasons for the end of a connection that are no failure of the server."""

Count = Callable[[str], None]
T = TypeVar("T")


class Node:
    """A server with its connections.

    Args:
        address: The server's.
        access: Credentials and options.
        count: Counts a word.
        on_trouble: Runs when the server may no longer be in charge of its keys.
    """

    def __init__(
        self,
        address: Address,
        access: Access,
        count: Count,
        on_trouble: Callable[[], None],
    ) -> None:
        self.breaker = CircuitBreaker()
        self.server: ServerInfo = {}
        """The latest reply to ``INFO``, at most :data:`INFO_EVERY_S` old while the server is up."""
        self._address = address
        self._access, self._options = access, access.options
        self._count = count
        self._on_trouble = on_trouble
        self._lock = threading.RLock()
        """Guards what follows."""
        self._idle: dict[bool, list[Connection]] = {False: [], True: []}
        """Connections without a command, for lookups (True) and for chunks. The lists stay the
        same: a request that is about to take a connection has one of them."""
        self._used: set[Connection] = set()
        self._bounds = InFlight(
            int(self._options.max_inflight_bytes),
            self._check,
            least=MIN_IN_FLIGHT,
            most=self._options.connections,
            lock=self._lock,
        )
        self._round_trip_s = math.inf
        """The shortest one."""
        self._refusals = Refusals(count)
        self._is_closed = threading.Event()
        self._probing: threading.Thread | None = None

    # ---- state ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.breaker.is_open

    @property
    def full(self) -> bool:
        """True for a moment after the server refused a store for good reason."""
        return self._refusals.is_full

    def at_once(self, nbytes: int) -> int:
        """Return how many chunks of this size one call should have in flight."""
        near = self._round_trip_s < _NEAR_S
        fit = max(MIN_IN_FLIGHT, self._options.max_inflight_bytes // max(1, nbytes))
        return min(fit, self._options.connections, _NEAR_AT_ONCE if near else fit)

    @property
    def num_connections(self) -> int:
        """Open ones; ends the idle ones that the server closed."""
        with self._lock:
            for idle in self._idle.values():
                usable = {connection for connection in idle if connection.is_usable()}
                self._end(each for each in idle if each not in usable)
                idle[:] = [each for each in idle if each in usable]
            return sum(map(len, self._idle.values())) + sum(each.is_open for each in self._used)

    def close(self) -> None:
        """End every connection and request; a probe ends soon."""
        self._is_closed.set()
        self._drop("shutdown")

    def join(self) -> None:
        """After :meth:`close`: wait for the probe."""
        if (thread := self._probing) is not None:
            thread.join()

    # ---- requests ------------------------------------------------------------------------------

    def run(self, request: Request, talk: Callable[[Connection], T]) -> T:
        """Call ``talk`` with a connection, to send a command and read its reply.

        Handles an error reply: keeps the connection, or ends it and counts a failure.

        Raises:
            Lost: no reply came.
        """
        request.on_cancel = self._end_request
        self._bounds.enter(request)
        try:
            connection = self._connected(request)
            if request.asking:
                self._announce(connection, request)
            reply = self._talk(connection, request, talk)
            if isinstance(reply, ServerError):
                self._judge(reply, connection, request)
            self._give_back(connection, is_lookup=request.kind == "lookup")
            return reply
        finally:
            request.is_busy = False
            self._bounds.leave(request)

    def ask(self, request: Request, commands: bytes, count: int) -> list[int | ServerError]:
        """Send commands at once; return the numbers replied. A late answer is a failure.

        Raises:
            Lost: not all replies came.
        """
        took_s = 0.0

        def talk(connection: Connection) -> list[int | ServerError]:
            nonlocal took_s
            began = time.monotonic()
            connection.send(commands)
            numbers = connection.reader.numbers(count)
            took_s = time.monotonic() - began
            return numbers

        replies = self.run(request, talk)
        errors = {each.code: each for each in replies if isinstance(each, ServerError)}
        for error in errors.values():
            self._judge(error, request.connection, request)
        if not errors:
            self._answered(took_s)
        return replies

    def command(self, *words: bytes) -> Reply:
        """Send a small command and return its reply; raises :class:`Lost`."""
        began = time.monotonic()
        replies: list[Reply] = []
        self.run(Request("lookup"), lambda connection: replies.append(connection.ask(*words)))
        (reply,) = replies
        if not isinstance(reply, ServerError):
            self._answered(time.monotonic() - began)
        return reply

    def watch_fill(self) -> None:
        """Ask how full the server is, where it may be asked; raises :class:`Lost`."""
        if self.server and not self.is_open and (server := info_of(self.command(b"INFO"))):
            self.server = server

    def succeeded(self, request: Request) -> None:
        """Count a chunk that moved."""
        if self.breaker.is_failing:
            with self._lock:
                self.breaker.success(request.kind, request.nbytes)

    def lose(self, connection: Connection | None, reason: str) -> None:
        """End a connection that is out of step, whether a request uses it or not."""
        with self._lock:
            for idle in self._idle.values():
                if connection is not None and connection in idle:
                    idle.remove(connection)
                    connection.lost = reason
                    self._end([connection])
                    return
            if connection is not None and connection in self._used:
                connection.abort(reason)

    def _end_request(self, request: Request) -> None:
        """End a cancelled request, whether it waits or has a connection."""
        with self._lock:
            if request.is_busy and request.connection is not None:
                request.connection.abort("cancelled")
            self._bounds.wake()

    def _check(self, request: Request) -> None:
        if self._is_closed.is_set():
            raise Lost("shutdown")
        if self.is_open:
            raise Lost("breaker_open")
        if request.is_cancelled:
            raise Lost("cancelled")

    # ---- connections ---------------------------------------------------------------------------

    def _connected(self, request: Request) -> Connection:
        """Return a connection for a request: an idle one, or a new one. Raises :class:`Lost`."""
        idle = self._idle[request.kind == "lookup"]
        while True:
            with self._lock:
                self._check(request)
                is_new = not idle
                connection = self._new() if is_new else idle.pop()
                self._used.add(connection)
                request.connection, request.is_busy = connection, True
            if is_new:
                self._open_for(connection, request)
                return connection
            if connection.is_usable(is_trusted=True):
                return connection
            with self._lock:
                self._end([connection])

    def _new(self) -> Connection:
        timeout_s = self._options.timeout_s
        return Connection(timeout_s, int(self._options.min_bandwidth * timeout_s))

    def _open_for(self, connection: Connection, request: Request) -> None:
        began = time.monotonic()
        reason = ""
        try:
            self._open(connection)
        except Exception as error:  # no error ends the node: the next request connects again
            reason = str(error) or type(error).__name__
        with self._lock:
            if not reason and not connection.lost:
                self.breaker.success("connect")
                return
            self._used.discard(connection)
            connection.close()
            self._check(request)
        self._count("connect_failed")
        log.debug("redis at %s: %s", self._address, reason)
        self._fail("connect", time.monotonic() - began, reason)
        self._on_trouble()
        raise Lost("unreachable")

    def _open(self, connection: Connection) -> None:
        """Connect and do the handshake; OSError, or ValueError for a bad host name or secret."""
        deadline = time.monotonic() + self._options.connect_timeout_s
        connection.open(self._address, self._access.tls, deadline, self._access.allowed.check_ip)
        self.server, took_s = handshake(connection, self._access)
        connection.opened()
        self._round_trip_s = min(self._round_trip_s, took_s)
        self._count("connected")

    def _announce(self, connection: Connection, request: Request) -> None:
        """Send ASKING; a user without the right to it is no failure of the server."""
        reply = self._talk(connection, request, lambda each: each.ask(b"ASKING"))
        if isinstance(reply, ServerError):
            self._judge(reply, connection, Request("lookup", right="asking"))
            self._give_back(connection, is_lookup=request.kind == "lookup")
            raise Lost(reply.code)

    def _talk(self, connection: Connection, request: Request, talk: Callable[[Connection], T]) -> T:
        began = time.monotonic()
        try:
            reply = talk(connection)
            connection.reader.finish()
            return reply
        except Lost as error:
            reason = text = error.reason
        except (ProtocolError, OSError) as error:
            reason, text = "protocol", f"protocol: {error}"
        except BaseException:
            self._lost(connection, request, "cancelled", "cancelled", 0.0)
            raise
        lasted_s = time.monotonic() - began if reason == "timeout" else 0.0
        self._lost(connection, request, reason, text, lasted_s)
        raise Lost(reason)

    def _give_back(self, connection: Connection, *, is_lookup: bool) -> None:
        with self._lock:
            if connection.lost or self._is_closed.is_set():
                self._end([connection])
            else:
                self._used.discard(connection)
                self._idle[is_lookup].append(connection)

    def _lost(
        self, connection: Connection, request: Request, reason: str, text: str, lasted_s: float
    ) -> None:
        connection.lost = connection.lost or reason
        with self._lock:
            self._end([connection])
        log.debug("redis at %s: connection lost: %s", self._address, text)
        if reason not in _DELIBERATE | _HARMLESS:
            self._fail(request.kind, lasted_s, text, request)
            self._on_trouble()

    def _end(self, connections: Iterable[Connection]) -> None:
        """Close connections that no request uses any more, and count why."""
        for connection in connections:
            self._used.discard(connection)
            connection.close()
            if connection.lost not in _DELIBERATE:
                self._count(f"connection_lost_{connection.lost.lower()}")

    def _drop(self, reason: str) -> None:
        """End every connection, and every request."""
        with self._lock:
            for connection in self._used:
                connection.abort(reason)
            for idle in self._idle.values():
                for connection in idle:
                    connection.close(reason)
                idle.clear()
            self._bounds.wake()

    # ---- errors and failures -------------------------------------------------------------------

    def _judge(self, error: ServerError, connection: Connection | None, request: Request) -> None:
        if self._refusals.is_failure(error, request, str(self._address)):
            self.lose(connection, error.code)
            self._fail(request.kind, 0.0, error.code, request)
            self._on_trouble()

    def _answered(self, took_s: float) -> None:
        """Count an answered lookup."""
        self._round_trip_s = min(self._round_trip_s, took_s)
        if took_s > self._options.lookup_timeout_s:
            self._count("lookup_late")
            self._fail("lookup", took_s, f"lookups take {took_s:.2f} s")
        else:
            self.succeeded(Request("lookup"))

    def _fail(
        self, kind: str, lasted_s: float, reason: str, request: Request | None = None
    ) -> None:
        nbytes = request.nbytes if request is not None else 0
        with self._lock:
            if self._is_closed.is_set() or not self.breaker.failure(kind, lasted_s, nbytes):
                return
            self._drop("breaker_open")
        self._count("breaker_opened")
        log.warning("redis at %s is left alone until it answers again: %s", self._address, reason)
        probing = threading.Thread(
            target=self._probe, args=(nbytes,), name="kvoffload-redis-probe", daemon=True
        )
        try:
            probing.start()
        except RuntimeError as error:  # the system has no more threads: requests probe instead
            log.warning("redis at %s cannot be probed: %s", self._address, error)
            with self._lock:
                self.breaker.probe_succeeded()
        else:
            self._probing = probing

    def _probe(self, nbytes: int) -> None:
        """Probe until the server is back; keep the successful connection for lookups."""
        while not self._is_closed.wait(self.breaker.probe_in()):
            self._count("probes")
            connection = self._new()
            with self._lock:
                self._used.add(connection)
            try:
                self._open(connection)
                if nbytes:
                    echo(connection, nbytes)
                connection.check_usable()
            except Exception as error:  # no error ends the probing
                log.debug("redis at %s: the probe failed: %s", self._address, error)
                connection.close()
                with self._lock:
                    self._used.discard(connection)
                    self.breaker.probe_failed()
                self._on_trouble()
                continue
            with self._lock:  # else a lookup that the breaker admits opens another connection
                self.breaker.probe_succeeded()
                self._give_back(connection, is_lookup=True)
            self._count("breaker_closed")
            log.warning("redis at %s is back", self._address)
            return  # the breaker may be open again, with a probe of its own
