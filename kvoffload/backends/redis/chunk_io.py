"""Loads, stores and lookups of chunks: one command a chunk, to the server of its key.

All functions block, and run on threads of the backend.
"""

from collections.abc import Callable, Sequence

from kvoffload.backends.header import COMPACT_BYTES, OTHER_VERSION, counted_as, parse_header
from kvoffload.backends.redis.connection import Connection, Lost
from kvoffload.backends.redis.discovery import REDIRECTS
from kvoffload.backends.redis.node import Node
from kvoffload.backends.redis.resp import MAX_VALUE_BYTES, Filled, ServerError, encode
from kvoffload.backends.redis.sealer import Sealer
from kvoffload.backends.redis.server_request import Request
from kvoffload.backends.redis.topology import Topology

LOOKUP_KEYS = 1000
"""Keys of one lookup; other lookups run between two."""

Talk = Callable[[Connection], Filled | bytes | ServerError | None]


class ChunkIO:
    """Moves chunks between callers' memory and the servers of a topology.

    Chunk names begin with ``prefix``. Every use sets a chunk's time to live to ``ttl_ms``, in
    decimal.
    """

    def __init__(self, topology: Topology, sealer: Sealer, prefix: bytes, ttl_ms: bytes) -> None:
        self._topology = topology
        self._sealer = sealer
        self._prefix = prefix
        self._ttl_ms = ttl_ms

    def load(self, key: bytes, chunk: memoryview, started: Callable[[Request], None]) -> str:
        """Load and verify a chunk; return why that failed, or empty.

        ``started`` receives the request, which another thread may cancel.
        """
        # One command reads the chunk and prolongs its life.
        tag = _tag(key)
        command = encode(b"GETEX", self._name(tag), b"PX", self._ttl_ms)
        seal = memoryview(bytearray(COMPACT_BYTES + self._sealer.tail_bytes))
        header, tail = seal[:COMPACT_BYTES], seal[COMPACT_BYTES:]

        def talk(connection: Connection) -> Filled | ServerError | None:
            connection.send(command)
            filled = connection.reader.chunk(header, [chunk, tail])
            if filled is Filled.OVERSIZE:
                connection.close("oversize")
            return filled

        request = Request("load", chunk.nbytes, "getex")
        started(request)
        try:
            node, reply = self._exchange(tag, request, talk)
        except Lost as lost:
            return _lost(lost)
        if reply is None:
            return "missing"
        if isinstance(reply, ServerError):
            return "corrupt_type" if reply.code == "WRONGTYPE" else _refused(reply)
        if reply is not Filled.WHOLE:  # chunks of another version may have other lengths
            is_other = parse_header(header) == OTHER_VERSION
            return OTHER_VERSION if is_other else "corrupt_size"
        node.succeeded(request)
        broken = self._sealer.broken(header, tail, key, chunk)
        if broken in ("key", "namespace"):
            # A whole chunk of another key: the later replies may belong to other keys too.
            node.lose(request.connection, "out_of_step")
        return counted_as(broken) if broken else ""

    def store(
        self,
        key: bytes,
        chunk: memoryview,
        started: Callable[[Request], None],
        tenant: bytes = b"",
    ) -> str:
        """Store a chunk; return why that failed, or empty. ``started`` is that of :meth:`load`."""
        size = COMPACT_BYTES + chunk.nbytes + self._sealer.tail_bytes
        if size > MAX_VALUE_BYTES:
            return "too_large"
        tag = _tag(key)
        if (node := self._topology.node(tag)) is not None:
            if node.full:
                return "full"
            if node.is_open:
                return "lost_breaker_open"  # without the checksum of a chunk that stays here
        header, stored, tail = self._sealer.seal(key, chunk, tenant)
        name, ttl_ms = self._name(tag), self._ttl_ms
        # PSETEX, not SET with PX: the value comes last, and with it the command is complete.
        head = b"*4\r\n$6\r\nPSETEX\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            len(name), name, len(ttl_ms), ttl_ms, size, header,
        )  # fmt: skip

        def talk(connection: Connection) -> bytes | ServerError | None:
            connection.send(head, stored, tail + b"\r\n")
            reply = connection.reader.reply()
            return reply if isinstance(reply, bytes | ServerError) else b""

        request = Request("store", chunk.nbytes, "psetex")
        try:
            started(request)
            node, reply = self._exchange(tag, request, talk)
        except Lost as lost:
            return _lost(lost)
        finally:
            self._sealer.done(stored)
        if isinstance(reply, ServerError):
            return _refused(reply)
        if reply != b"OK":
            return "unexpected"
        node.succeeded(request)
        return ""

    def parts(self, keys: Sequence[bytes]) -> list[tuple[Node, list[int]]]:
        """Return the servers of keys, each with the indices of some of its keys."""
        by_node: dict[Node, list[int]] = {}
        for i, key in enumerate(keys):
            if node := self._topology.node(_tag(key)):
                by_node.setdefault(node, []).append(i)
        return [
            (node, indices[start : start + LOOKUP_KEYS])
            for node, indices in by_node.items()
            for start in range(0, len(indices), LOOKUP_KEYS)
        ]

    def count(
        self, node: Node, keys: Sequence[bytes], command: bytes, *arguments: bytes
    ) -> list[int | None]:
        """Send one command for each key to a server; return the numbers, None without one.

        It follows one redirect of each key: a slot that moves is no miss.
        """
        if node.is_open:
            return [None] * len(keys)
        commands = [encode(command, self._name(_tag(key)), *arguments) for key in keys]
        right = command.decode().lower()
        replies = _ask(node, Request("lookup", right=right), commands)
        followed: dict[tuple[Node, int | None], list[int]] = {}
        for i, reply in enumerate(replies):
            if isinstance(reply, ServerError) and (target := self._redirect(reply)):
                to, asking = target
                # ASKING is for one command.
                followed.setdefault((to, i if asking else None), []).append(i)
        for (to, one), indices in followed.items():
            request = Request("lookup", right=right, asking=one is not None)
            some = _ask(to, request, [commands[i] for i in indices])
            for i, reply in zip(indices, some, strict=True):
                replies[i] = reply
        return [None if isinstance(reply, ServerError) else reply for reply in replies]

    def _exchange(
        self, tag: bytes, request: Request, talk: Talk
    ) -> tuple[Node, Filled | bytes | ServerError | None]:
        """Talk to the server of a key; follow one redirect, because an unstable table is a miss."""
        node = self._topology.node(tag)
        if node is None:
            raise Lost("no_server")
        reply = node.run(request, talk)
        if isinstance(reply, ServerError) and (target := self._redirect(reply)):
            node, request.asking = target
            reply = node.run(request, talk)
        return node, reply

    def _redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """Return where an error leads, and whether ASKING goes first; None: nowhere."""
        return self._topology.redirect(error) if error.code in REDIRECTS else None

    def _name(self, tag: bytes) -> bytes:
        return b"%b{%b}" % (self._prefix, tag)


def _ask(node: Node, request: Request, commands: list[bytes]) -> list[int | ServerError | None]:
    """Return a server's answers; None for each if it gives none."""
    try:
        return [*node.ask(request, b"".join(commands), len(commands))]
    except Lost:
        return [None] * len(commands)


def _tag(key: bytes) -> bytes:
    """Return the part of a key's name that selects the slot in a cluster."""
    return key.hex().encode()


def _lost(lost: Lost) -> str:
    """Return the counter name of a command without a reply."""
    return lost.reason if lost.reason == "no_server" else f"lost_{lost.reason.lower()}"


def _refused(error: ServerError) -> str:
    return f"refused_{error.code.lower()}"
