"""Loads, stores and lookups of single chunks, and the batch that runs those of one call.

A value is ``header + chunk`` (see :mod:`kvoffload.backends.header`). An authenticated value ends
with 32 bytes of keyed BLAKE3. One value holds one whole chunk, so parts of different writes cannot
mix.

Each transfer is a generator that reads from top to bottom. It yields a request, or a slow
computation, and resumes with the outcome as soon as that arrives. A chunk is therefore verified
while it is still in the processor's cache. All code here runs on the I/O loop's thread, except slow
computations.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from kvoffload.backends.header import (
    COMPACT_BYTES,
    OTHER_VERSION,
    check_chunk,
    counted_as,
    pack_header,
    parse_header,
)
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.redis.connection import Frames, Lost, Outcome, RedisRequest
from kvoffload.backends.redis.node import Node
from kvoffload.backends.redis.resp import (
    FILLED,
    MISFIT,
    Fill,
    Integers,
    Line,
    ServerError,
    encode,
)
from kvoffload.backends.redis.topology import Topology

_failures = Throttle(logging.getLogger(__name__))

MAC_BYTES = 32
LARGEST_VALUE_BYTES = 512 << 20
"""The limit of a Redis string."""
INLINE_BYTES = 4 << 20
"""Largest chunk whose checksum the loop's thread computes: below a millisecond."""
LOOKUP_KEYS = 1000
"""Keys of one lookup request; other lookups run between two requests."""

Transfer = Generator[tuple[Node, RedisRequest] | Callable[[], object], Any, str]
"""Yields requests and slow computations; returns why it failed, empty if it succeeded."""
Exchange = Generator[tuple[Node, RedisRequest], Outcome, tuple[Node, RedisRequest, Outcome]]


class Sealer:
    """Makes and checks the header of values, and their authentication code if there is a secret."""

    def __init__(self, namespace: bytes, secret: bytes | None) -> None:
        self._namespace = namespace
        self._secret = secret
        self.scheme = _scheme(secret)
        """The check of values, as a part of their names."""
        self.tail_bytes = MAC_BYTES if secret else 0

    def slow(self, chunk: memoryview) -> bool:
        """Return True if the check takes too long for the loop's thread."""
        return chunk.nbytes > INLINE_BYTES or self._secret is not None

    def seal(self, key: bytes, chunk: memoryview) -> tuple[bytes, bytes]:
        """Return the bytes before and after the chunk."""
        header = pack_header(key, self._namespace, chunk)
        return header, self._mac(header, chunk)

    def broken(self, header: memoryview, tail: memoryview, key: bytes, chunk: memoryview) -> str:
        """Return why this value is not the wanted chunk; empty if it is."""
        if self._secret is not None and not hmac.compare_digest(self._mac(header, chunk), tail):
            # Another version may make it otherwise. No byte of such a value is used.
            return OTHER_VERSION if parse_header(header) == OTHER_VERSION else "mac"
        return check_chunk(header, chunk, key, self._namespace) or ""

    def _mac(self, header: bytes | memoryview, chunk: memoryview) -> bytes:
        if self._secret is None:
            return b""
        import blake3

        mac = blake3.blake3(key=self._secret)
        mac.update(header)
        mac.update(chunk)
        digest: bytes = mac.digest()
        return digest


def _scheme(secret: bytes | None) -> str:
    """Return ``xxh3``, or ``mac-`` with a fingerprint of the secret that does not reveal it."""
    if secret is None:
        return "xxh3"
    import blake3

    derived = blake3.blake3(secret, derive_key_context="kvoffload redis key id v1")
    return f"mac-{derived.hexdigest()[:16]}"


class TransferBatch:
    """Runs the transfers of one call at the same time and waits for all of them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: list[RedisRequest] = []
        self._computations: set[asyncio.Future[object]] = set()
        self._left = 0
        self._done: asyncio.Future[None] | None = None
        self._cancelled = False
        # Requests until wait() submits them, so that each node gets one list.
        self._unsent: dict[Node, list[RedisRequest]] = {}

    def start(self, transfer: Transfer, finish: Callable[[str], None]) -> None:
        self._left += 1
        self._resume(transfer, finish, None)

    async def wait(self) -> None:
        """Wait for every transfer. After a cancel, return when no code uses callers' memory."""
        self._done = self._loop.create_future()
        for node, requests in self._unsent.items():
            node.submit(requests)
        if not self._left:
            return
        try:
            await self._done
        except asyncio.CancelledError:
            self._cancelled = True
            for request in self._requests:
                # A lookup uses no memory of callers. Its late answer counts against the server.
                if request.kind != "lookup":
                    request.cancel()
            while self._computations:
                try:
                    await asyncio.wait(list(self._computations))
                except asyncio.CancelledError:
                    continue
            raise

    def _resume(self, transfer: Transfer, finish: Callable[[str], None], outcome: object) -> None:
        try:
            action = transfer.send(outcome)
        except StopIteration as end:
            finish(end.value)
            self._end_one()
            return
        resume = partial(self._resume, transfer, finish)
        if not isinstance(action, tuple):
            self._compute(action, resume, finish)
            return
        node, request = action
        request.done = resume
        self._requests.append(request)
        if self._done is None:
            self._unsent.setdefault(node, []).append(request)
        else:
            node.submit([request])

    def _compute(
        self,
        work: Callable[[], object],
        resume: Callable[[object], None],
        finish: Callable[[str], None],
    ) -> None:
        computation = self._loop.run_in_executor(None, work)
        self._computations.add(computation)

        def finished(computation: "asyncio.Future[object]") -> None:
            self._computations.discard(computation)
            if self._cancelled:
                self._end_one()
            elif error := computation.exception():
                _failures.warning("redis: the check of a chunk failed: %r", error)
                finish("failed")
                self._end_one()
            else:
                resume(computation.result())

        computation.add_done_callback(finished)

    def _end_one(self) -> None:
        self._left -= 1
        if not self._left and self._done is not None and not self._done.done():
            self._done.set_result(None)


class ChunkIO:
    """Makes transfers between callers' memory and the servers of a topology.

    Chunk names begin with ``prefix``. Every use sets a chunk's time to live to ``ttl_ms``, in
    decimal.
    """

    def __init__(self, topology: Topology, sealer: Sealer, prefix: bytes, ttl_ms: bytes) -> None:
        self._topology = topology
        self._sealer = sealer
        self._prefix = prefix
        self._ttl_ms = ttl_ms

    def _name(self, key: bytes) -> tuple[bytes, bytes]:
        """Return a key's name on the server, and the part of it that selects the cluster slot."""
        tag = key.hex().encode()
        return b"%b{%b}" % (self._prefix, tag), tag

    def load(self, key: bytes, chunk: memoryview) -> Transfer:
        name, tag = self._name(key)
        node = self._topology.node(tag)
        if node is None:
            return "no_server"
        sealer = self._sealer
        seal = memoryview(bytearray(COMPACT_BYTES + sealer.tail_bytes))
        header, tail = seal[:COMPACT_BYTES], seal[COMPACT_BYTES:]
        # One command reads the chunk and prolongs its life.
        command = encode(b"GETEX", name, b"PX", self._ttl_ms)
        fill = Fill([header, chunk, tail], header)

        def frames() -> Frames:
            return [command]

        request = RedisRequest("load", frames, fill, chunk.nbytes, probe=command)
        outcome = yield node, request
        if isinstance(outcome, ServerError):
            redirected = self._redirected(node, request, outcome, "getex", frames)
            node, request, outcome = yield from redirected
        if outcome is not FILLED:
            wrong_type = isinstance(outcome, ServerError) and outcome.code == "WRONGTYPE"
            if outcome is MISFIT and parse_header(header) == OTHER_VERSION:
                return OTHER_VERSION  # whose chunks may have other lengths
            if wrong_type or outcome is MISFIT:
                return "corrupt_type" if wrong_type else "corrupt_size"
            return _failure(outcome) or "missing"
        node.breaker.success("load", chunk.nbytes)
        if sealer.slow(chunk):
            broken = yield partial(sealer.broken, header, tail, key, chunk)
        else:
            broken = sealer.broken(header, tail, key, chunk)
        if broken in ("key", "namespace") and request.connection:
            # A whole chunk of another key: the later replies may belong to other keys too.
            request.connection.abort("out_of_step")
        return counted_as(broken) if broken else ""

    def store(self, key: bytes, chunk: memoryview) -> Transfer:
        name, tag = self._name(key)
        node = self._topology.node(tag)
        if node is None:
            return "no_server"
        if node.full:
            return "full"
        sealer, ttl_ms = self._sealer, self._ttl_ms
        size = COMPACT_BYTES + chunk.nbytes + sealer.tail_bytes
        if size > LARGEST_VALUE_BYTES:
            return "too_large"
        sealed: tuple[bytes, bytes] | None = None
        if sealer.slow(chunk):
            sealed = yield partial(sealer.seal, key, chunk)

        def frames() -> Frames:
            header, tail = sealed or sealer.seal(key, chunk)
            # PSETEX, not SET with PX: the value comes last, and with it the command is complete.
            head = b"*4\r\n$6\r\nPSETEX\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
                len(name), name, len(ttl_ms), ttl_ms, size, header,
            )  # fmt: skip
            return [head, chunk, tail + b"\r\n"]

        request = RedisRequest("store", frames, Line(), chunk.nbytes)
        outcome = yield node, request
        if isinstance(outcome, ServerError):
            node, _, outcome = yield from self._redirected(node, request, outcome, "psetex", frames)
        if outcome == b"OK":
            node.breaker.success("store", chunk.nbytes)
            return ""
        return _failure(outcome) or "unexpected"

    async def count(
        self, keys: Sequence[bytes], command: bytes, *arguments: bytes
    ) -> list[int | None]:
        """Send one command for each key; return the replied numbers, None without a reply."""
        answers: list[int | None] = [None] * len(keys)
        names = [self._name(key) for key in keys]
        by_node: dict[Node, list[int]] = {}
        for i, (_, tag) in enumerate(names):
            if node := self._topology.node(tag):
                by_node.setdefault(node, []).append(i)
        batch = TransferBatch()
        for node, indices in by_node.items():
            for start in range(0, len(indices), LOOKUP_KEYS):
                some = indices[start : start + LOOKUP_KEYS]
                commands = b"".join([encode(command, names[i][0], *arguments) for i in some])
                transfer = self._count_some(node, command, commands, some, answers)
                batch.start(transfer, lambda why: None)
        await batch.wait()
        return answers

    def _count_some(
        self,
        node: Node,
        command: bytes,
        commands: bytes,
        indices: Sequence[int],
        answers: list[int | None],
    ) -> Transfer:
        request = RedisRequest("lookup", lambda: [commands], Integers(len(indices)))
        outcome = yield node, request
        if not isinstance(outcome, list):
            return _failure(outcome)
        errors: dict[str, ServerError] = {}
        for i, value in zip(indices, outcome, strict=True):
            if isinstance(value, ServerError):
                errors[value.code] = value
            else:
                answers[i] = value
        for error in errors.values():
            node.judge(error, request, command.decode().lower())
            if error.code == "MOVED":
                self._topology.redirect(error)  # corrects the slot table for the next call
        if not errors:
            node.answered(request)
        return ""

    def _redirected(
        self,
        node: Node,
        request: RedisRequest,
        error: ServerError,
        right: str,
        frames: Callable[[], Frames],
    ) -> Exchange:
        """Handle an error reply; follow one redirect, because an unstable slot table is a miss."""
        node.judge(error, request, right)
        target = self._topology.redirect(error) if error.code in ("MOVED", "ASK") else None
        if target is None:
            return node, request, error
        node, asking = target
        request = RedisRequest(
            request.kind, frames, request.expect, request.nbytes, asking=asking, probe=request.probe
        )
        outcome = yield node, request
        if isinstance(outcome, ServerError):
            node.judge(outcome, request, right)
        return node, request, outcome


def _failure(outcome: Outcome) -> str:
    """Return the counter name of a lost or refused request; empty for a reply."""
    if isinstance(outcome, Lost):
        return f"lost_{outcome.reason.partition(':')[0].lower()}"
    return f"refused_{outcome.code.lower()}" if isinstance(outcome, ServerError) else ""
