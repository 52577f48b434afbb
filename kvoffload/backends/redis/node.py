"""One server: its connections, its queues, its breaker, and what it said about itself.

Requests wait in two queues, loads before everything else, and go to whichever data connection has
room; lookups and other small commands have a connection of their own, so that they never stand
behind chunks. All connections together hold requests up to the bound on bytes in flight. When the
breaker opens, every connection is dropped, what waits is answered as lost, and a task probes, with
what failed, until the server is back.

Everything here runs on the I/O loop's thread; ``is_open`` may be read from any.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from operator import attrgetter

from kvoffload.backends.redis.channel import Address, open_channel
from kvoffload.backends.redis.circuit_breaker import CircuitBreaker
from kvoffload.backends.redis.connection import Connection, Lost, Request
from kvoffload.backends.redis.handshake import IN_STEP, Greeting, Trial, greet
from kvoffload.backends.redis.options import Access, RedisOptions
from kvoffload.backends.redis.resp import Fill, ServerError

log = logging.getLogger(__name__)

_INFLIGHT = attrgetter("inflight_bytes")
_OWED = attrgetter("owed")
_MAX_OWED = 64
"""Requests in flight on a connection, however small."""
_FORBIDDEN_S = 30.0
_CONNECT, _LOOKUP, LOAD, STORE = "connect", "lookup", "load", "store"
"""Kinds of work whose failures the breaker counts apart."""
_ALWAYS = 2
"""Requests in flight to a server, however large."""


Resolve = Callable[[], Awaitable[Address]]


class Node:
    """A server and everything that is open to it.

    Args:
        resolve: where the server is now; asked before each connect (a Sentinel moves it).
        access: how to introduce oneself.
        options: the backend's.
        counters: the backend's.
        restarted: called when the server may have lost what it held (another process, or back
            after an outage).
        troubled: called when the server refused as one does that is no longer in charge; the
            topology may have changed.
    """

    def __init__(
        self,
        resolve: Resolve,
        access: Access,
        options: RedisOptions,
        counters: Counter[str],
        restarted: Callable[[], None],
        troubled: Callable[[], None],
    ) -> None:
        self.breaker = CircuitBreaker()
        self._trial: Trial | None = None
        self.greeting = Greeting({})
        self.full_until = 0.0
        self._lacking: set[str] = set()
        self._resolve = resolve
        self._access = access
        self._options = options
        self._counters = counters
        self._restarted = restarted
        self._troubled = troubled
        self._loop = asyncio.get_running_loop()
        self._address: Address | None = None
        self._where = "an address not known yet"
        self._window = int(options.max_inflight_bytes)
        self._loads: deque[Request] = deque()
        self._stores: deque[Request] = deque()
        self._smalls: deque[Request] = deque()
        self._data: list[Connection] = []
        self._lookup: list[Connection] = []
        self._connecting = {id(self._data): 0, id(self._lookup): 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the server is being left alone."""
        return self.breaker.is_open

    @property
    def full(self) -> bool:
        """Whether the server said a moment ago that it takes nothing more, or not from us."""
        return self._loop.time() < self.full_until

    @property
    def num_connections(self) -> int:
        """Connections open now."""
        return len(self._data) + len(self._lookup)

    def load(self, requests: Iterable[Request]) -> None:
        """Queue requests that bring chunks."""
        self._queue(self._loads, requests)

    def store(self, requests: Iterable[Request]) -> None:
        """Queue requests that take chunks away."""
        self._queue(self._stores, requests)

    def command(self, requests: Iterable[Request]) -> None:
        """Queue small commands; they go past all chunks."""
        self._queue(self._smalls, requests)

    def judge(self, error: ServerError, request: Request, right: str) -> None:
        """Act on an error reply: keep the connection, or drop it and count a failure.

        Args:
            error: the reply.
            request: what was refused.
            right: what the user needs for it.
        """
        self._counters[f"refused_{error.code.lower()}"] += 1
        if error.code == "NOPERM":
            self._lacks(right, error)
            if not request.nbytes:
                return  # in step; without this right chunks still come and go
        if error.code in IN_STEP:
            if error.code in ("OOM", "MISCONF", "NOREPLICAS"):
                self.full_until = self._loop.time() + 1.0
            return
        connection = request.connection
        if connection is not None and not connection.closed:
            alone = not connection.owed  # otherwise the next in line is counted
            connection.abort(error.code)
            if alone:
                self._fail(_work(request), 0.0, error.code, request)

    def _lacks(self, right: str, error: ServerError) -> None:
        if right not in self._lacking:
            self._lacking.add(right)
            log.warning(
                "redis at %s: %s (ACL SETUSER <user> +%s ~kvoffload:* allows it)",
                self._where,
                error.text,
                right,
            )

    def forbids_stores(self, error: ServerError) -> None:
        """This user may not store: do not try for a while. Loads and lookups are not affected."""
        self._counters[f"refused_{error.code.lower()}"] += 1
        if not self.full:
            log.warning(
                "redis at %s: no stores for %.0f s: %s (ACL SETUSER <user> +psetex allows them)",
                self._where,
                _FORBIDDEN_S,
                error.text,
            )
        self.full_until = self._loop.time() + _FORBIDDEN_S

    def answered(self, request: Request) -> None:
        """A small command was answered as it should; too late counts as a failure all the same."""
        took_s = self._loop.time() - request.begun
        if took_s <= self._options.lookup_timeout_s:
            self.breaker.success(_LOOKUP)
        else:
            self._counters["lookup_late"] += 1
            self._fail(_LOOKUP, took_s, f"lookups take {took_s:.2f} s")

    def close(self) -> list[asyncio.Task[None]]:
        """Drop everything; what waits is lost. Returns what still has to come to its end."""
        self._closed = True
        self._drop("shutdown")
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    def _queue(self, queue: deque[Request], requests: Iterable[Request]) -> None:
        if self._closed or self.breaker.is_open:
            for request in requests:
                request.end(Lost("shutdown" if self._closed else "breaker_open"))
            return
        queue.extend(requests)
        self._pump()

    def _pump(self) -> None:
        """Give waiting requests to connections with room; open more where they would help."""
        if self._closed:
            return
        while self._smalls and self._lookup:
            self._lookup[0].submit(self._smalls.popleft())
        if self._smalls and not self._lookup:
            self._connect(self._lookup, 1)
        for queue in (self._loads, self._stores):
            while queue and (connection := self._roomy(queue[0])):
                connection.submit(queue.popleft())
        if waiting := len(self._loads) + len(self._stores):
            self._connect(self._data, min(self._options.connections, len(self._data) + waiting))

    def _roomy(self, request: Request) -> Connection | None:
        """The data connection with the least on its way, if there is room for the request.

        Two requests are let through whatever their size: the server should find the next one
        waiting when it is done with the first.
        """
        best = min(self._data, key=_INFLIGHT, default=None)
        if best is None or best.owed >= _MAX_OWED:
            return None
        fits = request.nbytes + sum(map(_INFLIGHT, self._data)) <= self._window
        return best if fits or sum(map(_OWED, self._data)) < _ALWAYS else None

    def _connect(self, pool: list[Connection], wanted: int) -> None:
        for _ in range(wanted - len(pool) - self._connecting[id(pool)]):
            self._connecting[id(pool)] += 1
            self._start(self._grow(pool))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _grow(self, pool: list[Connection]) -> None:
        began = self._loop.time()
        try:
            connection = await self._open()
        except Exception as error:  # whatever it is, the next request connects again
            self._connecting[id(pool)] -= 1
            self._unreachable(error, self._loop.time() - began)
            return
        except asyncio.CancelledError:
            self._connecting[id(pool)] -= 1
            raise
        self._connecting[id(pool)] -= 1
        self._join(pool, connection)

    def _join(self, pool: list[Connection], connection: Connection) -> None:
        if self._closed or self.breaker.is_open:
            connection.abort("shutdown")
            return
        if connection.closed:  # lost between its greeting and now
            self._unreachable(ConnectionError("closed at once"), 0.0)
            return
        self.breaker.success(_CONNECT)
        pool.append(connection)
        self._pump()

    def _unreachable(self, error: Exception, lasted_s: float) -> None:
        if self._closed:
            return
        self._counters["connect_failed"] += 1
        log.debug("redis at %s: %s", self._where, str(error) or type(error).__name__)
        self._fail(_CONNECT, lasted_s, str(error) or type(error).__name__)
        if not self._data:
            self._lose((self._loads, self._stores), "unreachable")
        if not self._lookup:
            self._lose((self._smalls,), "unreachable")
        self._troubled()

    async def _open(self) -> Connection:
        """Connect, introduce oneself, and see whether this is a server that can serve.

        Raises:
            OSError: it cannot be reached, or does not serve (now).
            ValueError: its name is none, or a secret is gone.
        """
        options = self._options
        async with asyncio.timeout(options.connect_timeout_s):
            address = await self._resolve()
            self._where = str(address)
            sock, channel = await open_channel(address, self._access.tls)
            connection = Connection(
                sock,
                channel,
                options.timeout_s,
                int(options.min_bandwidth * options.timeout_s),
                lambda _: self._pump(),
                self._lost,
            )
            try:
                greeting = await greet(connection, self._access, options.lookup_timeout_s)
            except BaseException:
                connection.abort("greeting")
                raise
        self._known_as(address, greeting)
        self._counters["connected"] += 1
        return connection

    def _known_as(self, address: Address, greeting: Greeting) -> None:
        """Notice another process behind the name: nothing known of the old one holds."""
        moved = self._address is not None and address != self._address
        if moved:  # a failover: the connections left lead to a server no longer in charge
            self._drop_connections("moved")
        if moved or not greeting.run_id or greeting.run_id != self.greeting.run_id:
            self._restarted()
        self._address, self.greeting = address, greeting

    def _lost(
        self, connection: Connection, reason: str, silent_s: float, owed: Request | None
    ) -> None:
        pool = next((p for p in (self._data, self._lookup) if connection in p), None)
        if pool is None:
            return  # it never came to serve; whoever opened it hears of it
        pool.remove(connection)
        if reason in ("shutdown", "moved", "breaker_open"):
            return
        if reason == "closed" and not self.greeting.run_id:
            self._restarted()  # perhaps; where it says who it is, the next greeting tells
        self._counters[f"connection_lost_{reason.partition(':')[0].lower()}"] += 1
        log.debug("redis at %s: connection lost: %s", self._where, reason)
        # Closing an idle connection is a server's right, giving one up may be the caller's wish,
        # and one odd value says nothing about the server.
        if owed is not None and reason not in ("cancelled", "oversize", "out_of_step"):
            self._fail(_work(owed), silent_s, reason, owed)
            self._troubled()
        self._loop.call_soon(self._pump)  # what waits goes to the others, or to a new one

    def _fail(
        self, work: str, lasted_s: float, reason: str, request: Request | None = None
    ) -> None:
        nbytes = request.nbytes if request is not None else 0
        if self._closed or not self.breaker.failure(work, lasted_s, nbytes):
            return
        self._trial = Trial.of(request)
        self._counters["breaker_opened"] += 1
        log.warning("redis at %s is left alone until it answers again: %s", self._where, reason)
        self._drop("breaker_open")
        self._start(self._probe())

    async def _probe(self) -> None:
        """Ask until the server is back; the connection that found it so becomes the first one."""
        while self.breaker.is_open:
            await asyncio.sleep(self.breaker.probe_in())
            self._counters["probes"] += 1
            try:
                connection = await self._open_as_before()
            except Exception as error:  # whatever it is, probing goes on
                log.debug("redis at %s: still away: %s", self._where, error)
                self.breaker.probe_failed()
                self._troubled()
                continue
            self.breaker.probe_succeeded()
            self._restarted()  # verdicts of the outage are no longer true
            self._counters["breaker_closed"] += 1
            log.warning("redis at %s is back", self._where)
            self._join(self._lookup, connection)

    async def _open_as_before(self) -> Connection:
        """Connect, and try what failed.

        Raises:
            OSError, ValueError: as :meth:`_open`; or it fails again.
        """
        connection = await self._open()
        try:
            if self._trial is not None:
                await self._trial.run(connection)
        except BaseException:
            connection.abort("probe")
            raise
        return connection

    def _drop(self, reason: str) -> None:
        self._drop_connections(reason)
        self._lose((self._loads, self._stores, self._smalls), reason)

    def _drop_connections(self, reason: str) -> None:
        for connection in [*self._data, *self._lookup]:
            connection.abort(reason)

    def _lose(self, queues: Iterable[deque[Request]], reason: str) -> None:
        for queue in queues:
            while queue:
                queue.popleft().end(Lost(reason))


def _work(request: Request) -> str:
    if isinstance(request.expect, Fill):
        return LOAD
    return STORE if request.nbytes else _LOOKUP
