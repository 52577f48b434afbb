"""The handshake of a connection: authenticate, check the server, and probe one that failed."""

import asyncio
import os
from typing import NamedTuple

from kvoffload.backends.redis.connection import Connection, Outcome, RedisRequest
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import Fill, Line, ServerError, encode, sink

IN_STEP = frozenset({"OOM", "MISCONF", "NOREPLICAS", "WRONGTYPE", "MOVED", "ASK"})
"""Error replies of a healthy server: refusals of one request, and redirects."""
_PROBE_BYTES = 4 << 20
"""The largest probe after a failed store."""
_NOISE_BYTES = 64 << 10
INFO = encode(b"INFO")
ServerInfo = dict[str, str]
"""The reply to ``INFO``; empty where the user has no right to it."""


class CommandRefused(ConnectionError):
    """An error reply to a command of the handshake or of discovery."""

    def __init__(self, command: str, error: ServerError) -> None:
        self.command = command
        self.code = error.code
        # A server quotes an unknown command, so the text after AUTH may contain the password.
        text = error.code if command == "AUTH" else error.text
        super().__init__(f"{command} refused: {text}")


async def authenticate(connection: Connection, username: str, password: str) -> None:
    """Send AUTH if there is a password; raises OSError if the server refuses it."""
    if password:
        user = [username.encode()] if username else []
        await _expect(connection, b"OK", b"AUTH", *user, password.encode())


async def _expect(connection: Connection, answer: bytes, *command: bytes) -> None:
    reply = await connection.ask(encode(*command), Line())
    if isinstance(reply, ServerError):
        raise CommandRefused(command[0].decode(), reply)
    if reply != answer:
        raise ConnectionError(f"{command[0].decode()}: an unexpected reply")


async def handshake(connection: Connection, access: Access) -> ServerInfo:
    """Authenticate, select the database, check that the server serves; raises OSError."""
    await authenticate(connection, access.username, access.password())
    if access.target.db:
        await _expect(connection, b"OK", b"SELECT", b"%d" % access.target.db)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await _expect(connection, b"PONG", b"PING")
    if (took_s := loop.time() - began) > access.options.lookup_timeout_s:
        raise ConnectionError(f"a PING takes {took_s:.2f} s")
    server = info_of(await connection.ask(INFO, Line()))
    if server.get("role", "master") != "master":
        raise ConnectionError("a read-only replica")
    return server


def info_of(reply: Outcome) -> ServerInfo:
    """Parse a reply to INFO; empty for a refusal, or if there is no reply."""
    if not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, sep, value in lines if sep}


class HealthProbe(NamedTuple):
    """A failed request in a form that a probe can repeat without callers' memory.

    A network path may pass a PING and no chunk. After a failed load the probe loads the same value.
    After a failed store it sends as many bytes in a PING, which stores nothing. A value that is
    missing by then proves nothing and counts as a success; the circuit breaker probes less often if
    such successes are wrong.
    """

    command: bytes
    """Loads the value again; empty for a store."""
    nbytes: int

    @classmethod
    def of(cls, request: RedisRequest | None) -> "HealthProbe | None":
        """Return the probe for a failed request; None if a handshake is enough."""
        if request is None or not request.nbytes:
            return None
        if isinstance(request.expect, Fill):
            return cls(request.probe, request.expect.nbytes)
        return cls(b"", min(request.nbytes, _PROBE_BYTES))

    async def run(self, connection: Connection) -> None:
        """Repeat the request under the connection's watchdog; OSError: it fails again."""
        command = self.command
        if not command:
            # Random, so that no network device compresses it to a few bytes.
            noise = os.urandom(_NOISE_BYTES) * (self.nbytes // _NOISE_BYTES + 1)
            command = encode(b"PING", noise[: self.nbytes])
        reply = await connection.ask(command, Fill(sink(self.nbytes)))
        if isinstance(reply, ServerError) and reply.code not in IN_STEP:
            raise ConnectionError(reply.text)
