"""Loads and stores of single chunks, and the batch that one caller waits for.

A value is ``header + chunk`` (see :mod:`kvoffload.backends.header`), and 32 bytes of keyed BLAKE3
at the end where values are authenticated. One value a chunk: there are no parts, so no way to put
together parts of different writes.

Everything here runs on the I/O loop's thread, but for checksums that take long.
"""

import asyncio
import hmac
from collections.abc import Callable

from kvoffload.backends.header import COMPACT_BYTES, check_chunk, pack_header
from kvoffload.backends.redis.connection import Frames, Lost, Outcome, Request
from kvoffload.backends.redis.node import LOAD, STORE, Node
from kvoffload.backends.redis.resp import FILLED, MISFIT, Fill, Line, ServerError, encode
from kvoffload.backends.redis.topology import Topology

MAC_BYTES = 32
LARGEST_VALUE_BYTES = 512 << 20
"""What a Redis string may hold."""
INLINE_BYTES = 4 << 20
"""Checksums up to here are made on the loop itself: below a millisecond, and still in cache."""


class Sealer:
    """Makes and checks what stands around a chunk.

    Args:
        namespace: from :func:`~kvoffload.backends.header.namespace_digest`.
        secret: authenticates values if given (32 bytes).
    """

    def __init__(self, namespace: bytes, secret: bytes | None) -> None:
        self._namespace = namespace
        self._secret = secret
        self.scheme = _scheme(secret)
        """How values are checked, as a part of their names."""
        self.tail_bytes = MAC_BYTES if secret else 0

    def value_bytes(self, chunk: memoryview) -> int:
        """Size of the stored value."""
        return COMPACT_BYTES + chunk.nbytes + self.tail_bytes

    def slow(self, chunk: memoryview) -> bool:
        """Whether making or checking the seal takes too long for the loop's thread."""
        return chunk.nbytes > INLINE_BYTES or self._secret is not None

    def seal(self, key: bytes, chunk: memoryview) -> tuple[bytes, bytes]:
        """Return what comes before and after the chunk."""
        header = pack_header(key, self._namespace, chunk)
        return header, self._mac(header, chunk)

    def broken(self, header: memoryview, tail: memoryview, key: bytes, chunk: memoryview) -> str:
        """Say why this is not exactly the chunk wanted; empty if it is."""
        if self._secret is not None and not hmac.compare_digest(self._mac(header, chunk), tail):
            return "mac"
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
    """``xxh3``, or ``mac-`` and what tells this secret from others, without giving it away."""
    if secret is None:
        return "xxh3"
    import blake3

    derived = blake3.blake3(secret, derive_key_context="kvoffload redis key id v1")
    return f"mac-{derived.hexdigest()[:16]}"


class Batch:
    """What one call waits for: requests on their way, and checksums on other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: list[Request] = []
        self._jobs: set[asyncio.Future[None]] = set()
        self._left = 0
        self._idle: asyncio.Future[None] | None = None
        self._cancelled = False
        # Requests for each node's queue, until wait() hands them over: a queue is asked once.
        self._unsent: dict[Callable[[list[Request]], None], list[Request]] = {}

    def send(self, put: Callable[[list[Request]], None], request: Request) -> None:
        """Hand a request to a node's queue and wait for it; its ``done`` calls :meth:`ended`."""
        self._left += 1
        self._requests.append(request)
        if self._idle is None:
            self._unsent.setdefault(put, []).append(request)
        else:
            put([request])

    def ended(self) -> None:
        """One thing less to wait for."""
        self._left -= 1
        if not self._left and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def compute(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Do something slow on another thread, then go on with ``then`` on the loop."""
        self._left += 1
        job = self._loop.run_in_executor(None, work)
        self._jobs.add(job)

        def finished(job: "asyncio.Future[None]") -> None:
            self._jobs.discard(job)
            if not self._cancelled and job.exception() is None:
                then()
            self.ended()

        job.add_done_callback(finished)

    async def wait(self) -> None:
        """Wait for everything. Cancelled, it returns only when nothing uses the caller's memory."""
        self._idle = self._loop.create_future()
        for put, requests in self._unsent.items():
            put(requests)
        if not self._left:
            return
        try:
            await self._idle
        except asyncio.CancelledError:
            self._cancelled = True
            for request in self._requests:
                request.withdraw()
            while self._jobs:
                try:
                    await asyncio.wait(list(self._jobs))
                except asyncio.CancelledError:
                    continue
            raise


class Job:
    """What loads and stores share: routing, redirects, and one end.

    Subclasses set ``_right``, the right that their command needs.

    Args:
        topology: finds the server.
        sealer: makes and checks what stands around the chunk.
        ttl_ms: how long the server keeps the chunk from now on, in decimal.
        batch: waits for this.
        name: the key as the server knows it.
        tag: the part of it that the slot is computed from.
        key: the key as the caller knows it.
        chunk: the caller's memory, read or written until ``finish`` is called.
        finish: called once with the reason why not; empty if it was done.
    """

    _right: str

    def __init__(
        self,
        topology: Topology,
        sealer: Sealer,
        ttl_ms: bytes,
        batch: Batch,
        name: bytes,
        tag: bytes,
        key: bytes,
        chunk: memoryview,
        finish: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._sealer = sealer
        self._ttl_ms = ttl_ms
        self._batch = batch
        self._name = name
        self._key = key
        self._chunk = chunk
        self._finish = finish
        self._redirected = False
        self._node = topology.node(tag)
        self._request: Request | None = None

    def send(self) -> None:
        """Put the request on its way."""
        if self._node is None:
            self._finish("no_server")
        else:
            self._send_to(self._node, asking=False)

    def _send_to(self, node: Node, asking: bool) -> None:
        self._node = node
        self._request = request = self._make(asking)
        self._batch.send(self._queue(node), request)

    def _done(self, outcome: Outcome) -> None:
        node, request = self._node, self._request
        if node is not None and request is not None:
            if isinstance(outcome, Lost):
                self._finish(f"lost_{outcome.reason.partition(':')[0].lower()}")
            elif isinstance(outcome, ServerError):
                self._refused(node, request, outcome)
            else:
                self._answered(node, outcome)
        self._batch.ended()

    def _refused(self, node: Node, request: Request, error: ServerError) -> None:
        node.judge(error, request, self._right)
        if error.code in ("MOVED", "ASK") and not self._redirected:
            self._redirected = True  # once: a table in flux is a miss, not a chase
            target = self._topology.redirect(error)
            if target is not None:
                self._send_to(target[0], asking=target[1])
                return
        self._finish(f"refused_{error.code.lower()}")

    def _make(self, asking: bool) -> Request:
        raise NotImplementedError

    def _queue(self, node: Node) -> Callable[[list[Request]], None]:
        raise NotImplementedError

    def _answered(self, node: Node, outcome: Outcome) -> None:
        raise NotImplementedError


class Load(Job):
    """Bring one chunk into the caller's memory, and verify it there."""

    _right = "getex"
    _header = _tail = memoryview(b"")

    def _make(self, asking: bool) -> Request:
        seal = memoryview(bytearray(COMPACT_BYTES + self._sealer.tail_bytes))
        self._header, self._tail = seal[:COMPACT_BYTES], seal[COMPACT_BYTES:]
        # One command reads and prolongs the chunk's life.
        command = encode(b"GETEX", self._name, b"PX", self._ttl_ms)
        fill = Fill([self._header, self._chunk, self._tail])
        return Request(lambda: [command], fill, self._chunk.nbytes, self._done, asking, command)

    def _queue(self, node: Node) -> Callable[[list[Request]], None]:
        return node.load

    def _answered(self, node: Node, outcome: Outcome) -> None:
        if outcome is not FILLED:
            self._finish("corrupt_size" if outcome is MISFIT else "missing")
            return
        node.breaker.success(LOAD, self._chunk.nbytes)
        if not self._sealer.slow(self._chunk):
            self._conclude(self._broken())
        else:
            broken: list[str] = []
            self._batch.compute(
                lambda: broken.append(self._broken()), lambda: self._conclude(broken[0])
            )

    def _refused(self, node: Node, request: Request, error: ServerError) -> None:
        if error.code == "WRONGTYPE":
            node.judge(error, request, self._right)
            self._finish("corrupt_type")
        else:
            super()._refused(node, request, error)

    def _broken(self) -> str:
        return self._sealer.broken(self._header, self._tail, self._key, self._chunk)

    def _conclude(self, broken: str) -> None:
        if broken in ("key", "namespace") and self._request and self._request.connection:
            # Whole, but another's: perhaps the replies behind it are others' too.
            self._request.connection.abort("out_of_step")
        self._finish(f"corrupt_{broken}" if broken else "")


class Store(Job):
    """Send one chunk straight from the caller's memory."""

    _right = "psetex"
    _sealed: tuple[bytes, bytes] | None = None

    def send(self) -> None:
        """Put the request on its way, sealed first where that takes long."""
        if self._node is not None and self._node.full:
            self._finish("full")
        elif self._sealer.value_bytes(self._chunk) > LARGEST_VALUE_BYTES:
            self._finish("too_large")
        elif self._sealer.slow(self._chunk):
            self._batch.compute(self._seal, super().send)
        else:
            super().send()

    def _seal(self) -> None:
        self._sealed = self._sealer.seal(self._key, self._chunk)

    def _frames(self) -> Frames:
        if self._sealed is None:
            self._seal()
        header, tail = self._sealed or (b"", b"")
        name, ttl, size = self._name, self._ttl_ms, self._sealer.value_bytes(self._chunk)
        # Not SET with PX: the value comes last, so that the server has the whole command with it.
        head = b"*4\r\n$6\r\nPSETEX\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            len(name), name, len(ttl), ttl, size, header,
        )  # fmt: skip
        return [head, self._chunk, tail + b"\r\n"]

    def _make(self, asking: bool) -> Request:
        return Request(self._frames, Line(), self._chunk.nbytes, self._done, asking)

    def _queue(self, node: Node) -> Callable[[list[Request]], None]:
        return node.store

    def _answered(self, node: Node, outcome: Outcome) -> None:
        if outcome == b"OK":
            node.breaker.success(STORE, self._chunk.nbytes)
        self._finish("" if outcome == b"OK" else "unexpected")

    def _refused(self, node: Node, request: Request, error: ServerError) -> None:
        if error.code == "NOPERM":
            # In step, and no sign of trouble: a user may well have the right to load only.
            node.forbids_stores(error)
            self._finish("refused_noperm")
        else:
            super()._refused(node, request, error)
