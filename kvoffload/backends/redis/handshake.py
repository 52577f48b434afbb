"""What is said on a connection before it serves: who we are, who it is, whether it works again."""

import asyncio
import os
from typing import NamedTuple

from kvoffload.backends.redis.connection import Connection, Request
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import Fill, Line, ServerError, encode, sink

IN_STEP = frozenset({"OOM", "MISCONF", "NOREPLICAS", "WRONGTYPE", "MOVED", "ASK"})
"""Error replies after which the server is as good as before: refusals and redirects."""
_TRIAL_BYTES = 4 << 20
"""The largest trial of stores."""
_NOISE_BYTES = 64 << 10


class Greeting(NamedTuple):
    """What a server says about itself (``INFO``); empty where the user may not ask."""

    info: dict[str, str]

    @property
    def run_id(self) -> str:
        """Changes whenever the server process does."""
        return self.info.get("run_id", "")


class Refused(ConnectionError):
    """An error reply where an answer was due."""

    def __init__(self, command: str, error: ServerError) -> None:
        self.command = command
        self.code = error.code
        # Servers quote what they do not understand, so after AUTH the text may have the password.
        said = error.code if command == "AUTH" else error.text
        super().__init__(f"{command} refused: {said}")


async def introduce(connection: Connection, username: str, password: str) -> None:
    """Say who we are, if there is a password.

    Raises:
        OSError: the server does not know us by it, or the connection was lost.
    """
    if password:
        await _expect(
            connection, b"OK", b"AUTH", *filter(None, [username.encode()]), password.encode()
        )


async def _expect(connection: Connection, answer: bytes, *command: bytes) -> None:
    reply = await connection.ask(encode(*command), Line())
    if isinstance(reply, ServerError):
        raise Refused(command[0].decode(), reply)
    if reply != answer:
        raise ConnectionError(f"{command[0].decode()}: an unexpected reply")


async def greet(connection: Connection, access: Access, ping_s: float) -> Greeting:
    """Introduce oneself, and see whether this is a server that can serve.

    Raises:
        OSError: it does not serve (now), or takes longer than ``ping_s`` to answer a PING.
    """
    await introduce(connection, access.username, access.password())
    if access.db:
        await _expect(connection, b"OK", b"SELECT", b"%d" % access.db)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await _expect(connection, b"PONG", b"PING")
    if (took_s := loop.time() - began) > ping_s:
        raise ConnectionError(f"a PING takes {took_s:.2f} s")
    info = await connection.ask(encode(b"INFO"), Line())
    if not isinstance(info, bytes):
        return Greeting({})  # not allowed to ask: nothing is known of its process then
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    greeting = Greeting({name: value for name, sep, value in lines if sep})
    if greeting.info.get("role", "master") != "master":
        raise ConnectionError("a read-only replica")
    return greeting


class Trial(NamedTuple):
    """What failed, in a form that a probe can try without anybody's memory.

    A line may pass a PING and no chunk, so a probe after a failed load loads the same value, and
    one after a failed store sends as many bytes (in a PING, which returns them, and stores
    nothing). A value that is gone by then proves nothing, and is taken for good: the breaker asks
    less often where that goes wrong.
    """

    command: bytes
    """What loads the value again; empty for a store."""
    nbytes: int

    @classmethod
    def of(cls, request: Request | None) -> "Trial | None":
        """The trial of a request that failed; None where a greeting is as good."""
        if request is None or not request.nbytes:
            return None
        if isinstance(request.expect, Fill):
            return cls(request.again, request.expect.nbytes)
        return cls(b"", min(request.nbytes, _TRIAL_BYTES))

    async def run(self, connection: Connection) -> None:
        """Try it, under the connection's own watch.

        Raises:
            OSError: it fails again.
        """
        command = self.command or encode(b"PING", _noise(self.nbytes))
        reply = await connection.ask(command, Fill(sink(self.nbytes)))
        if isinstance(reply, ServerError) and reply.code not in IN_STEP:
            raise ConnectionError(reply.text)


def _noise(nbytes: int) -> bytes:
    """Bytes that nothing on the way compresses to a few."""
    block = os.urandom(_NOISE_BYTES)
    return (block * (nbytes // _NOISE_BYTES + 1))[:nbytes]
