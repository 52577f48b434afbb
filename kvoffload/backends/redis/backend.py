"""Chunks in Redis or Valkey: a tier that many engines share.

A value holds one chunk, and one command moves it over one of several connections, straight from or
to the caller's memory. Every load verifies its value. A server that is down, slow or full costs
misses and never time: see :mod:`~kvoffload.backends.redis.circuit_breaker`. Operators read
``docs/guides/redis.md``.

Modules from the wire up: ``resp`` is the wire format, ``channel`` and ``connection`` are sockets.
``handshake``, ``circuit_breaker`` and ``node`` are one server, ``discovery`` and ``topology`` are
several. ``chunk_io`` has loads, stores and lookups. ``options`` has the settings,
``namespace_info`` the names of values, ``admin`` and ``doctor`` operators' commands.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvoffload.backends.admin import Finding
from kvoffload.backends.base import Described, Observable, ReadResult, Usage, check_lengths
from kvoffload.backends.header import OTHER_VERSION, check_key, namespace_digest
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.redis.admin import RedisAdmin, count_of, usage_of
from kvoffload.backends.redis.chunk_io import ChunkIO, Sealer, TransferBatch
from kvoffload.backends.redis.connection import RedisRequest
from kvoffload.backends.redis.doctor import diagnose
from kvoffload.backends.redis.namespace_info import NamespaceInfo, namespace_prefix
from kvoffload.backends.redis.namespace_scan import described
from kvoffload.backends.redis.node import Node
from kvoffload.backends.redis.options import Access, RedisOptions, redacted, value_key
from kvoffload.backends.redis.topology import Topology, open_topology

log = logging.getLogger(__name__)

_MAX_SUSPECTS = 4
"""Damaged values checked again at the same time, each in memory of its own."""
_MAX_PASSED_OVER = 1 << 16
"""Keys with values of another version that are remembered: a few mebibytes."""


class RedisBackend(RedisAdmin, Observable):
    """The backend. One instance belongs to one event loop.

    Args:
        options: See :class:`RedisOptions`.
        namespace: Chunks of other namespaces are invisible.

    Raises:
        ConfigError: The URL is malformed, or a secret or certificate is unreadable.
    """

    Options = RedisOptions
    is_shared = True

    def __init__(self, options: RedisOptions, namespace: str) -> None:
        self._options = options
        self._namespace = namespace
        self._access = Access(options)
        for problem, remedy in self._access.weaknesses():
            log.warning("redis: %s; %s", problem, remedy)
        self._sealer = Sealer(namespace_digest(namespace), value_key(options.secret_file))
        self._counters: Counter[str] = Counter()
        self._topology: Topology | None = None
        self._io: ChunkIO | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspects: set[bytes] = set()  # keys whose values are checked again
        self._passed_over: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose values are of another version: absent here until this engine stores them."""
        self._info = NamespaceInfo(namespace, options.ttl_s, self._send)
        self._damaged = Throttle(log)

    def __repr__(self) -> str:
        return f"RedisBackend({redacted(self._options.url)!r}, {self._namespace!r})"

    # The five coroutines.

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = await self._count(keys, b"EXISTS")
        return [
            answer == 1 and key not in self._passed_over
            for key, answer in zip(keys, found, strict=True)
        ]

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[ReadResult]:
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[ReadResult]:
        """Load chunks; remove a value that is still damaged when it is read a second time."""
        check_lengths(keys, into)
        io = await self._ready()
        ok = [ReadResult.UNAVAILABLE] * len(keys)
        if io is None:
            return ok
        self._info.note_use()

        def finish(i: int, why: str) -> None:
            ok[i] = ReadResult.of(why)
            if not why:
                self._counters["read_ok"] += 1
                arrived(i)
                return
            self._counters[f"read_{why}"] += 1
            if why == OTHER_VERSION:
                self._pass_over(keys[i])
            elif why.startswith("corrupt_"):
                self._damaged.warning("redis: a value is not the chunk asked for (%s)", why)
                self._check_again(keys[i], into[i].nbytes)

        batch = TransferBatch()
        for i, (key, view) in enumerate(zip(keys, into, strict=True)):
            batch.start(io.load(key, _bytes(view)), partial(finish, i))
        await batch.wait()
        return ok

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Store chunks; only prolong the life of those that the server has.

        A value of another version is replaced: the tier would never serve its key otherwise.
        """
        check_lengths(keys, chunks)
        for key in keys:
            check_key(key)
        prolonged = await self._count(keys, b"PEXPIRE", self._ttl_ms)
        io = await self._ready()
        ok = [
            answer == 1 and key not in self._passed_over
            for key, answer in zip(keys, prolonged, strict=True)
        ]
        self._counters["write_present"] += sum(ok)
        if io is None:
            return ok
        self._info.note_use()

        def finish(i: int, why: str) -> None:
            self._counters[f"write_{why}" if why else "write_ok"] += 1
            if not why:
                ok[i] = True
                self._passed_over.pop(keys[i], None)

        batch = TransferBatch()
        for i, (key, view) in enumerate(zip(keys, chunks, strict=True)):
            if not ok[i]:
                batch.start(io.store(key, _bytes(view)), partial(finish, i))
        await batch.wait()
        return ok

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._count(keys, b"UNLINK")
        for key in keys:
            self._passed_over.pop(key, None)

    async def close(self) -> None:
        self._closed = True
        self._info.close()
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        if self._topology is not None:
            ending += self._topology.close()
        await asyncio.gather(*ending, return_exceptions=True)

    # What it tells of itself.

    def usage(self) -> Usage:
        """Return the servers' totals, for all their data, as they said a few seconds ago."""
        nodes = self._nodes()
        infos = [node.server for node in nodes]
        breakers_open = sum(node.is_open for node in nodes)
        gauges = {
            "connections": sum(node.num_connections for node in nodes),
            "breakers_open": breakers_open,
            "up": int(not nodes or breakers_open < len(nodes)),
            "server_evictions": sum(count_of(info.get("evicted_keys", "")) for info in infos),
        }
        return usage_of(infos, self._access.target.db)._replace(gauges=gauges)

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Store the description of the namespace; it lives as long as the chunks."""
        self._info.set(facts)
        await self._ready()
        self._info.note_use()

    async def described(self) -> list[Described]:
        """Look at a part of the servers' names, where the user may SCAN."""
        return [] if self._closed else await described(self._access, self._namespace)

    # For operators.

    async def diagnose(self) -> list[Finding]:
        return await diagnose(self._access, self)

    async def _ready(self) -> ChunkIO | None:
        """Connect at the first call; return None once closed."""
        if self._closed:
            return None
        if self._topology is None:
            self._topology = open_topology(self._access, self._counters)
            # A secret changes the names: an engine without it must not see damaged values.
            prefix = f"{namespace_prefix(self._namespace)}{self._sealer.scheme}:".encode()
            self._io = ChunkIO(self._topology, self._sealer, prefix, self._ttl_ms)
        await self._topology.ready()
        return None if self._closed else self._io

    @property
    def _ttl_ms(self) -> bytes:
        return b"%d" % int(self._options.ttl_s * 1000)

    def _pass_over(self, key: bytes) -> None:
        """Treat a value of another version as absent until this engine replaces it."""
        self._passed_over[key] = None
        if len(self._passed_over) > _MAX_PASSED_OVER:
            self._passed_over.popitem(last=False)

    def _check_again(self, key: bytes, nbytes: int) -> None:
        if key not in self._suspects and len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.add(key)
            self._spawn(self._remove_if_damaged(key, nbytes))

    async def _remove_if_damaged(self, key: bytes, nbytes: int) -> None:
        """Load a damaged value again; remove it unless only the transfer was at fault."""
        found: list[str] = []
        try:
            if io := await self._ready():
                batch = TransferBatch()
                batch.start(io.load(key, memoryview(bytearray(nbytes))), found.append)
                await batch.wait()
            if any(why.startswith("corrupt_") for why in found):
                self._counters["corrupt_removed"] += 1
                await self.remove([key])
        finally:
            self._suspects.discard(key)

    async def _count(
        self, keys: Sequence[bytes], command: bytes, *arguments: bytes
    ) -> list[int | None]:
        io = await self._ready()  # also without keys: an engine's first call connects
        return await io.count(keys, command, *arguments) if io else [None] * len(keys)

    def _nodes(self) -> list[Node]:
        return list(self._topology.nodes()) if self._topology is not None else []

    def _send(self, name: bytes, request: RedisRequest) -> None:
        node = self._topology.node(name) if self._topology is not None else None
        if node is not None:
            node.submit([request])

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _bytes(view: memoryview) -> memoryview:
    # The caller's own view if possible: a cast one would keep its memory after a cancelled call.
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
