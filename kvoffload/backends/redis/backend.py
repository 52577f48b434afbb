"""Chunks in Redis or Valkey: a tier that many engines share.

A value holds one chunk, and one command moves it over one of several connections, straight from or
to the caller's memory. Each connection is a blocking socket, used by one thread at a time. Every
load verifies its value. A server that is down, slow or full costs misses and never time: see
:mod:`~kvoffload.backends.redis.circuit_breaker`. Operators read ``docs/guides/redis.md``.

Modules from the wire up: ``resp`` is the wire format, ``connection`` a socket. ``handshake``,
``circuit_breaker``, ``server_request``, ``refusals`` and ``node`` are one server. ``discovery``,
``allowed`` and ``topology`` are several. ``sealer`` and ``chunk_io`` have values, loads, stores and
lookups. ``options`` has the settings, ``namespace_info`` the names of values, ``admin`` and
``doctor`` operators' commands.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvoffload.backends.admin import Finding, throughput
from kvoffload.backends.base import (
    Described,
    ReadResult,
    Usage,
    WriteResult,
    Written,
    check_lengths,
)
from kvoffload.backends.blocking_pool import BlockingPool, start_once
from kvoffload.backends.header import NOT_DAMAGED, check_key, namespace_digest
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.redis import node as nodes
from kvoffload.backends.redis.admin import RedisAdmin, count_of, described, usage_of
from kvoffload.backends.redis.background import Background
from kvoffload.backends.redis.chunk_io import ChunkIO
from kvoffload.backends.redis.connection import Lost
from kvoffload.backends.redis.doctor import IF_FAILED, IF_SLOW, examine
from kvoffload.backends.redis.namespace_info import NamespaceInfo, namespace_prefix
from kvoffload.backends.redis.options import KEY_CONTEXT, Access, RedisOptions, redacted
from kvoffload.backends.redis.sealer import Sealer
from kvoffload.backends.redis.server_request import Request
from kvoffload.backends.redis.topology import Topology
from kvoffload.backends.seals import Seal
from kvoffload.backends.secret_files import read_key, refuse_with_encryption
from kvoffload.backends.threaded import ThreadPoolBackend

log = logging.getLogger(__name__)

_MAX_SUSPECTS = 4
"""Damaged values checked again at the same time, each in memory of its own."""
_MAX_PASSED_OVER = 1 << 16
"""Keys with values of another version or key that are remembered: a few mebibytes."""
_NEVER_S = 86400.0
"""No thread counts as hung: every wait of a connection ends by a deadline of its own."""
_MAX_THREADS = 64
"""Threads for loads, and as many for stores."""
_SERVERS_AT_ONCE = 4
"""Servers of a cluster that one engine uses at the same time."""


class RedisBackend(ThreadPoolBackend, RedisAdmin):
    """The backend.

    Args:
        options: See :class:`RedisOptions`.
        namespace: Chunks of other namespaces are invisible.

    Raises:
        ConfigError: The URL is malformed, or a secret or certificate is unreadable.
    """

    Options = RedisOptions
    is_shared = True
    opens_apart = False

    def __init__(self, options: RedisOptions, namespace: str) -> None:
        self._options = options
        self._namespace = namespace
        self._access = Access(options)
        for problem, remedy in self._access.weaknesses():
            log.warning("redis: %s; %s", problem, remedy)
        secret = read_key(options.secret_file, KEY_CONTEXT)
        at_once = _SERVERS_AT_ONCE if self._access.target.kind == "cluster" else 1
        threads = min(_MAX_THREADS, at_once * options.connections)
        super().__init__(threads=threads, store_threads=threads, stall_s=_NEVER_S, name="redis")
        self._lookups = BlockingPool("kvoffload-RedisBackend-lookup", at_once, _NEVER_S)
        self._asking: set[asyncio.Task[None]] = set()
        self._topology = Topology(self._access, self.count)
        self._use(Sealer(namespace_digest(namespace), secret))
        self._chunk_bytes = 0
        """The length of the latest chunk."""
        self._in_flight: dict[int, Request] = {}
        """The request of each thread that has one."""
        self._changing = threading.Lock()
        self._suspects: set[bytes] = set()  # keys whose values are checked again
        self._passed_over: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose values are of another version or key: absent until this engine stores them."""
        self._info = NamespaceInfo(namespace, options.ttl_s, self._send)
        self._watch = Background(
            "kvoffload-redis-watch", self._watch_fill, lambda: nodes.INFO_EVERY_S
        )
        self._watch.wake()
        self._damaged = Throttle(log)

    def encrypt_with(self, seal: Seal) -> None:
        """Store chunks encrypted; called by :func:`kvoffload.open_backend`, before the first.

        Raises:
            ConfigError: there is a ``secret_file`` as well.
        """
        refuse_with_encryption(self._options.secret_file)
        self._use(Sealer(namespace_digest(self._namespace), None, seal))

    def _use(self, sealer: Sealer) -> None:
        # A secret changes the names: an engine without it sees no damaged values.
        prefix = f"{namespace_prefix(self._namespace)}{sealer.scheme}:".encode()
        self._sealer, self._ttl_ms = sealer, b"%d" % int(self._options.ttl_s * 1000)
        self._io = ChunkIO(self._topology, sealer, prefix, self._ttl_ms)

    def __repr__(self) -> str:
        return f"RedisBackend({redacted(self._options.url)!r}, {self._namespace!r})"

    # ---- chunks --------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = await self._count(keys, b"EXISTS")
        return [
            answer == 1 and key not in self._passed_over
            for key, answer in zip(keys, found, strict=True)
        ]

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        """Store chunks; only prolong the life of those that the server has.

        A value of another version or key is replaced: the tier would never serve its key otherwise.
        """
        check_lengths(keys, chunks)
        for key in keys:
            check_key(key)
        prolonged = await self._count(keys, b"PEXPIRE", self._ttl_ms)
        ok: list[Written] = [
            answer == 1 and key not in self._passed_over and WriteResult.PRESENT
            for key, answer in zip(keys, prolonged, strict=True)
        ]
        if any(ok):
            self.count("write_present", sum(map(bool, ok)))
            self._info.note_use()
        left = [i for i, is_present in enumerate(ok) if not is_present]
        whose = [tenants[i] for i in left] if tenants else ()
        stored = await self.store_each([keys[i] for i in left], [chunks[i] for i in left], whose)
        for i, good in zip(left, stored, strict=True):
            ok[i] = good
        return ok

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._count(keys, b"UNLINK")
        for key in keys:
            self._passed_over.pop(key, None)

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        """Load a chunk; remove a value that is still damaged when it is read a second time."""
        try:
            why = self._io.load(key, into, self._started)
        finally:
            self._in_flight.pop(threading.get_ident(), None)
        self.count(f"read_{why or 'ok'}")
        if why in NOT_DAMAGED:
            self._pass_over(key)
        elif why.startswith("corrupt_"):
            self._damaged.warning("redis: a value is not the chunk asked for (%s)", why)
            self._check_again(key, into.nbytes)
        return ReadResult.of(why)

    def store(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> bool:
        try:
            why = self._io.store(key, chunk, self._started, tenant)
        finally:
            self._in_flight.pop(threading.get_ident(), None)
        self.count(f"write_{why or 'ok'}")
        if not why:
            self._passed_over.pop(key, None)
        return not why

    def has(self, key: bytes) -> bool:
        nodes = (node for node, _ in self._io.parts([key]))
        return any(self._io.count(node, [key], b"EXISTS") == [1] for node in nodes)

    def at_once(self) -> int | None:
        # Threads that would only wait for the bounds of a server cost processor time.
        return sum(node.at_once(self._chunk_bytes) for node in self._topology.nodes()) or None

    def interrupt(self, thread: int) -> None:
        if request := self._in_flight.get(thread):
            request.cancel()

    async def closing(self) -> None:
        self._info.close()
        self._watch.close()
        self._topology.close()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def release(self) -> None:
        self._lookups.close()
        self._info.join()
        self._watch.join()
        self._topology.join()

    # ---- what it tells of itself ---------------------------------------------------------------

    def usage(self) -> Usage:
        """Return the servers' totals, for all their data, as they said a few seconds ago."""
        nodes = self._topology.nodes()
        infos = [node.server for node in nodes]
        breakers_open = sum(node.is_open for node in nodes)
        gauges = {
            "connections": sum(node.num_connections for node in nodes),
            "breakers_open": breakers_open,
            "up": int(breakers_open < len(nodes) if nodes else not self._topology.is_failing),
            "server_evictions": sum(count_of(info.get("evicted_keys", "")) for info in infos),
        }
        return usage_of(infos, self._access.target.db)._replace(gauges=gauges)

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Store the description of the namespace; it lives as long as the chunks."""
        if not self.is_closed:
            self._info.set(facts)

    async def described(self) -> list[Described]:
        """Look at a part of the servers' names, where the user may SCAN."""
        return [] if self.is_closed else await self._apart(described, self._namespace)

    async def diagnose(self) -> list[Finding]:
        """Examine the servers; then store and load, if nothing failed."""
        return await throughput(self, await self._apart(examine), IF_FAILED, IF_SLOW)

    # ---- servers -------------------------------------------------------------------------------

    def _started(self, request: Request) -> None:
        self._chunk_bytes = request.nbytes
        self._in_flight[threading.get_ident()] = request
        self._info.note_use()
        self._topology.wait()

    async def _count(
        self, keys: Sequence[bytes], command: bytes, *arguments: bytes
    ) -> list[int | None]:
        """Send one command for each key, on threads; a cancelled call leaves them at it."""
        counted: list[int | None] = [None] * len(keys)
        if self.is_closed:
            return counted
        if not self._topology.is_known:
            await self._ask(1, lambda i: self._topology.wait())
        parts = self._io.parts(keys)

        def work(i: int) -> None:
            node, indices = parts[i]
            some = self._io.count(node, [keys[j] for j in indices], command, *arguments)
            for j, number in zip(indices, some, strict=True):
                counted[j] = number

        if parts:
            await self._ask(len(parts), work)
        return counted

    async def _ask(self, items: int, work: Callable[[int], None]) -> None:
        answers: list[None] = [None] * items
        fill = self._lookups.fill(answers, work, lambda items, first: None)
        # A lookup uses no memory of callers, and its late answer counts against the server.
        task = asyncio.ensure_future(fill)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        await asyncio.shield(task)

    def _send(self, name: bytes, *command: bytes) -> object:
        """Send a small command to the server of a name; raises OSError."""
        self._topology.wait()
        node = self._topology.node(name)
        if node is None:
            raise Lost("no_server")
        return node.command(*command)

    def _watch_fill(self) -> float:
        for node in self._topology.nodes():
            try:
                node.watch_fill()
            except OSError as error:
                log.debug("redis: a server does not say how full it is: %s", error)
        return 0.0

    # ---- values that are no chunk --------------------------------------------------------------

    def _pass_over(self, key: bytes) -> None:
        """Treat a value of another version or key as absent until this engine replaces it."""
        with self._changing:
            self._passed_over[key] = None
            if len(self._passed_over) > _MAX_PASSED_OVER:
                self._passed_over.popitem(last=False)

    def _check_again(self, key: bytes, nbytes: int) -> None:
        with self._changing:
            if key in self._suspects or len(self._suspects) >= _MAX_SUSPECTS:
                return
            self._suspects.add(key)
        try:
            start_once(lambda: self._remove_if_damaged(key, nbytes))
        except RuntimeError:  # the system has no more threads: a later load of it tries again
            self._suspects.discard(key)

    def _remove_if_damaged(self, key: bytes, nbytes: int) -> None:
        """Load a damaged value again; remove it unless only the transfer was at fault."""
        try:
            why = self._io.load(key, memoryview(bytearray(nbytes)), lambda request: None)
            if why.startswith("corrupt_"):
                self.count("corrupt_removed")
                for node, _ in self._io.parts([key]):
                    self._io.count(node, [key], b"UNLINK")
        finally:
            self._suspects.discard(key)
