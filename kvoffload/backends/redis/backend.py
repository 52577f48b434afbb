"""Chunks in Redis or Valkey: the tier that many engines share.

One value a chunk, one command a chunk, several connections, straight from and to the caller's
memory; every value verified. A server that is down, slow or full costs misses, never time: see
:mod:`~kvoffload.backends.redis.circuit_breaker`. ``docs/redis.md`` is for operators.

Where things are: settings in ``redis_options`` and ``redis_secrets``, the wire format in
``redis_resp``, connections in ``redis_channel`` and ``redis_connection``, one server in
``redis_node``, several in ``redis_topology``, ``redis_discovery`` and ``redis_slots``, loads and
stores in ``redis_chunks``, presence in ``redis_presence``, namespaces' facts in ``redis_facts``.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from urllib.parse import quote

from kvoffload.backends.admin import Admin, Aged, Finding, Holding, ServerTotal
from kvoffload.backends.base import Observable, ReadResult, Usage
from kvoffload.backends.header import MAX_KEY_BYTES, namespace_digest
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.presence import PresenceCache
from kvoffload.backends.redis import admin as redis_admin
from kvoffload.backends.redis import doctor as redis_doctor
from kvoffload.backends.redis.chunk_io import Batch, Load, Sealer, Store
from kvoffload.backends.redis.connection import Outcome, Request
from kvoffload.backends.redis.namespace_info import NamespaceInfo
from kvoffload.backends.redis.node import Node
from kvoffload.backends.redis.options import (
    Access,
    RedisOptions,
    parse_url,
    redacted,
)
from kvoffload.backends.redis.resp import Integers, ServerError, encode
from kvoffload.backends.redis.secrets import value_key
from kvoffload.backends.redis.topology import Topology, open_topology

log = logging.getLogger(__name__)

PREFIX = redis_admin.PREFIX
_LOOKUP_KEYS = 1000
"""Keys asked for in one request: other lookups get their turn after so many."""
_MAX_SUSPECTS = 4
"""Values looked at again at once, each in memory of its own; others are at their next load."""


def chunk_prefix(namespace: str, scheme: str) -> bytes:
    """What the names of a namespace's chunks begin with.

    Values authenticated under one secret have names of their own: an engine without it, or with
    another, must not take them for damaged ones.
    """
    return f"{PREFIX}:{quote(namespace, safe='')}:{scheme}:".encode()


def facts_name(namespace: str) -> bytes:
    """The name of the value that keeps a namespace's facts readable."""
    return f"{PREFIX}:{quote(namespace, safe='')}:facts".encode()


class RedisBackend(Observable, Admin):
    """The backend; see the module. One instance belongs to one event loop.

    Args:
        options: see :class:`RedisOptions`.
        namespace: chunks of others are invisible.

    Raises:
        ConfigError: the URL is none, or a secret or certificate cannot be read.
    """

    Options = RedisOptions

    def __init__(self, options: RedisOptions, namespace: str) -> None:
        self._options = options
        self._namespace = namespace
        self._target = parse_url(options.url)
        self._access = Access(options, self._target)
        for weakness in self._access.weaknesses():
            log.warning("redis: %s; %s", weakness.problem, weakness.remedy)
        self._sealer = Sealer(namespace_digest(namespace), value_key(options.secret_file))
        self._prefix = chunk_prefix(namespace, self._sealer.scheme)
        self._ttl_ms = b"%d" % int(options.ttl_s * 1000)
        self._counters: Counter[str] = Counter()
        self._verdicts = PresenceCache(
            self._ask, options.lookup_timeout_s, options.present_s, options.absent_s
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._topology: Topology | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspects: set[bytes] = set()  # keys whose values are looked at again
        self._facts_name = facts_name(namespace)
        self._facts = NamespaceInfo(self._facts_name, options.ttl_s, self._send_facts)
        self._damaged = Throttle(log)

    def __repr__(self) -> str:
        return f"RedisBackend({redacted(self._options.url)!r}, {self._namespace!r})"

    # The five coroutines.

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See :meth:`Backend.contains`."""
        found = await self._integers(keys, b"EXISTS")
        return [answer == 1 for answer in found]

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[ReadResult]:
        """See :meth:`Backend.read`. A value that proves damaged, also a second time, is removed."""
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[ReadResult]:
        """See :class:`~kvoffload.backends.base.ReadsEach`."""
        _same_length(keys, into)
        topology = await self._ready()
        ok = [ReadResult.UNAVAILABLE] * len(keys)
        if topology is None:
            return ok
        self._facts.used()
        batch = Batch()

        def finish(i: int, why: str) -> None:
            ok[i] = ReadResult.of(why)
            if not why:
                self._counters["read_ok"] += 1
                arrived(i)
                return
            self._counters[f"read_{why}"] += 1
            if why == "missing":
                self._verdicts.set(keys[i], False)
            elif why.startswith("corrupt_"):
                self._damaged.warning("redis: a value is not the chunk asked for (%s)", why)
                self._verdicts.set(keys[i], False)
                self._suspect(keys[i], into[i].nbytes)

        load = partial(Load, topology, self._sealer, self._ttl_ms, batch)
        for i, (key, view) in enumerate(zip(keys, into, strict=True)):
            load(*self._name(key), key, _bytes(view), partial(finish, i)).send()
        await batch.wait()
        return ok

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """See :meth:`Backend.write`. Chunks already there only have their life prolonged."""
        _same_length(keys, chunks)
        for key in keys:
            if not 0 < len(key) <= MAX_KEY_BYTES:
                raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        prolonged = await self._integers(keys, b"PEXPIRE", self._ttl_ms)
        topology = await self._ready()
        ok = [answer == 1 for answer in prolonged]
        for key, there in zip(keys, ok, strict=True):
            if there:
                self._counters["write_present"] += 1
                self._verdicts.set(key, True)
        if topology is None:
            return ok
        self._facts.used()
        batch = Batch()

        def finish(i: int, why: str) -> None:
            self._counters[f"write_{why}" if why else "write_ok"] += 1
            if not why:
                ok[i] = True
                self._verdicts.set(keys[i], True)

        store = partial(Store, topology, self._sealer, self._ttl_ms, batch)
        for i, (key, view) in enumerate(zip(keys, chunks, strict=True)):
            if not ok[i]:
                store(*self._name(key), key, _bytes(view), partial(finish, i)).send()
        await batch.wait()
        return ok

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See :meth:`Backend.remove`."""
        for key in keys:
            self._verdicts.set(key, False)
        await self._integers(keys, b"UNLINK")

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        self._closed = True
        self._facts.close()
        ending = list(self._tasks)
        for task in ending:
            task.cancel()
        if self._topology is not None:
            ending += self._topology.close()
        await asyncio.gather(*ending, return_exceptions=True)

    # On the engine's thread.

    def holds(self, key: bytes) -> bool | None:
        """See :meth:`~kvoffload.backends.base.LocalIndex.holds`."""
        topology = self._topology
        if self._closed or (topology is not None and topology.shut(key.hex().encode())):
            return False
        return self._verdicts.holds(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See :meth:`~kvoffload.backends.base.LocalIndex.forget`."""
        self._verdicts.forget(keys)

    def usage(self) -> Usage:
        """What the servers said when they were last connected to: of everything they hold."""
        infos = [node.greeting.info for node in self._nodes()]
        return redis_admin.usage_of(infos, self._target.db)

    def counters(self) -> Mapping[str, int]:
        """See :meth:`~kvoffload.backends.base.Observable.counters`; docs/redis.md explains."""
        counts = dict(self._counters)
        counts["connections"] = sum(node.num_connections for node in self._nodes())
        counts["breakers_open"] = sum(node.is_open for node in self._nodes())
        counts["verdicts"] = len(self._verdicts)
        return counts

    async def describe(self, facts: Mapping[str, str]) -> None:
        """See :class:`~kvoffload.backends.base.Observable`. Kept alive as long as chunks are."""
        self._facts.set(facts)
        await self._ready()
        self._facts.used()

    # For operators.

    async def survey(self) -> list[Holding]:
        return await redis_admin.survey(self._target, self._options, self._access)

    async def totals(self) -> list[ServerTotal]:
        return await redis_admin.totals(self._target, self._options, self._access)

    async def purge(self, namespaces: Sequence[str]) -> int:
        prefixes = [f"{PREFIX}:{quote(namespace, safe='')}:" for namespace in namespaces]
        return await redis_admin.purge(self._target, self._options, self._access, prefixes)

    async def purge_unused(self, age_s: float, namespace: str | None, *, dry_run: bool) -> Aged:
        where = self._target, self._options, self._access
        return await redis_admin.purge_unused(*where, age_s, namespace, dry_run=dry_run)

    async def diagnose(self) -> list[Finding]:
        return await redis_doctor.diagnose(self._target, self._options, self._access, self)

    # On the loop's thread.

    def _start(self) -> None:
        if self._topology is None and not self._closed:
            self._topology = open_topology(
                self._target, self._options, self._access, self._counters, self._verdicts.clear
            )
            self._spawn(self._probe())  # what was asked before there was a loop

    async def _ready(self) -> Topology | None:
        if self._closed:
            return None
        if self._topology is None:
            self._loop = asyncio.get_running_loop()
            self._start()
        if self._topology is not None:
            await self._topology.ready()
        return None if self._closed else self._topology

    def _suspect(self, key: bytes, nbytes: int) -> None:
        if key not in self._suspects and len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.add(key)
            self._spawn(self._look_again(key, nbytes))

    async def _look_again(self, key: bytes, nbytes: int) -> None:
        """A value proved wrong: remove it, unless the way here was at fault and it is good."""
        found: list[str] = []
        try:
            if topology := await self._ready():
                batch, own = Batch(), memoryview(bytearray(nbytes))
                load = partial(Load, topology, self._sealer, self._ttl_ms, batch)
                load(*self._name(key), key, own, found.append).send()
                await batch.wait()
            if any(why.startswith("corrupt_") for why in found):
                self._counters["corrupt_removed"] += 1
                await self.remove([key])
        finally:
            self._suspects.discard(key)

    def _ask(self) -> None:
        """There are questions: answer them soon. Called on the engine's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed; the deadline answers
                self._loop.call_soon_threadsafe(lambda: self._spawn(self._probe()))

    async def _probe(self) -> None:
        if self._topology is None:
            return  # asked before the loop had its turn: _start() probes
        keys = self._verdicts.take_questions()
        if keys:
            self._verdicts.answer(keys, await self.contains(keys))

    async def _integers(
        self, keys: Sequence[bytes], command: bytes, *arguments: bytes
    ) -> list[int | None]:
        """Ask one command of each key's server, answered by a number; None where it was not."""
        answers: list[int | None] = [None] * len(keys)
        topology = await self._ready()  # also without keys: an engine's first call connects
        if topology is None:
            return answers
        by_node: dict[Node, list[int]] = {}
        names = [self._name(key) for key in keys]
        for i, (_, tag) in enumerate(names):
            if node := topology.node(tag):
                by_node.setdefault(node, []).append(i)
        batch = Batch()
        for node, indices in by_node.items():
            for start in range(0, len(indices), _LOOKUP_KEYS):
                some = indices[start : start + _LOOKUP_KEYS]
                words = [encode(command, names[i][0], *arguments) for i in some]
                right = command.decode().lower()
                request = _numbers(node, topology, batch, words, right, some, answers)
                batch.send(node.command, request)
        await batch.wait()
        return answers

    def _name(self, key: bytes) -> tuple[bytes, bytes]:
        """The key as the server knows it, and the part in it that decides the cluster slot."""
        tag = key.hex().encode()
        return b"%b{%b}" % (self._prefix, tag), tag

    def _nodes(self) -> list[Node]:
        return list(self._topology.nodes()) if self._topology is not None else []

    def _send_facts(self, request: Request) -> None:
        node = self._topology.node(self._facts_name) if self._topology is not None else None
        if node is not None:
            node.command([request])

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _numbers(
    node: Node,
    topology: Topology,
    batch: Batch,
    words: list[bytes],
    right: str,
    indices: list[int],
    answers: list[int | None],
) -> Request:
    """A pipeline of commands answered by numbers, as one request."""

    def done(outcome: Outcome) -> None:
        if isinstance(outcome, list):
            for i, value in zip(indices, outcome, strict=True):
                answers[i] = None if isinstance(value, ServerError) else value
            errors = {value.code: value for value in outcome if isinstance(value, ServerError)}
            for error in errors.values():
                node.judge(error, request, right)
                if error.code == "MOVED":
                    topology.redirect(error)  # corrects the table for the next time
            if not errors:
                node.answered(request)
        batch.ended()

    request = Request(lambda: [b"".join(words)], Integers(len(words)), 0, done)
    return request


def _bytes(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _same_length(keys: Sequence[bytes], memory: Sequence[memoryview]) -> None:
    if len(keys) != len(memory):
        raise ValueError(f"{len(keys)} keys, but {len(memory)} buffers")
