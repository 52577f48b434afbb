"""Fake servers that speak Redis' wire format and reply with the words of a test."""

import asyncio
import contextlib
from collections.abc import Callable

from kvoffload.backends.redis.resp import encode

Answer = Callable[[list[bytes]], bytes]


class FakeRedis:
    """An asyncio server on a loopback port; ``answer`` makes the reply to each command.

    ``commands`` has every command received, ``accepted`` counts connections.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.accepted = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "FakeRedis":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._writers:  # the client may still be connected
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def sent(self, command: bytes) -> int:
        """Return how often clients have sent this command."""
        return sum(words[0].upper() == command for words in self.commands)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readline():
                words = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                self.commands.append(words)
                writer.write(self.answer(words))
                await writer.drain()
        writer.close()


def polite(words: list[bytes]) -> bytes:
    """Answer as an empty server with one user."""
    match words[0].upper():
        case b"PING":
            return b"+PONG\r\n"
        case b"INFO":
            return bulk(b"run_id:abc\r\nrole:master\r\n")
        case b"EXISTS" | b"PEXPIRE" | b"UNLINK":
            return b":0\r\n"
        case b"GETEX":
            return b"$-1\r\n"
    return b"+OK\r\n"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def table(*rows: tuple[int, int, str, int]) -> bytes:
    """The reply to CLUSTER SLOTS: rows of first slot, last slot, host, port."""
    head = b"*%d\r\n" % len(rows)
    return head + b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n%b:%d\r\n%b"
        % (start, stop, bulk(host.encode()), port, bulk(b"id"))
        for start, stop, host, port in rows
    )


def masters_of(service: str, host: str, port: str) -> bytes:
    """The reply to SENTINEL MASTERS: one master, up."""
    fields = {
        "name": service, "ip": host, "port": port, "flags": "master",
        "num-other-sentinels": "0", "num-slaves": "0", "quorum": "1",
    }  # fmt: skip
    words = [word.encode() for pair in fields.items() for word in pair]
    return b"*1\r\n" + encode(*words)
