"""The handshake of a connection: authenticate, check the server, and probe one that failed."""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

from kvoffload.backends.redis.connection import Address, Connection
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import Reply, ServerError, encode

IN_STEP = frozenset({"OOM", "MISCONF", "NOREPLICAS", "WRONGTYPE", "MOVED", "ASK"})
"""Error replies of a healthy server: refusals of one command, and redirects."""
_PROBE_BYTES = 4 << 20
"""The largest probe after a failed load or store."""
_NOISE_BYTES = 64 << 10
ServerInfo = dict[str, str]
"""The reply to ``INFO``; empty where the user has no right to it."""


class CommandRefused(ConnectionError):
    """An error reply to a command that has to succeed."""

    def __init__(self, command: str, error: ServerError) -> None:
        self.command = command
        self.code = error.code
        # A server quotes an unknown command, so the text after AUTH may contain the password.
        text = error.code if command == "AUTH" else error.text
        super().__init__(f"{command} refused: {text}")


def expect(connection: Connection, *command: bytes) -> Reply:
    """Send a command and return its reply; raises OSError for an error reply, too."""
    reply = connection.ask(*command)
    if isinstance(reply, ServerError):
        raise CommandRefused(command[0].decode(), reply)
    return reply


def authenticate(connection: Connection, username: str, password: str) -> None:
    """Send AUTH if there is a password; raises OSError if the server refuses it."""
    if password:
        user = [username.encode()] if username else []
        _expect_word(b"OK", connection, b"AUTH", *user, password.encode())


def introduce(connection: Connection, access: Access) -> None:
    """Authenticate and select the database; raises OSError."""
    authenticate(connection, access.username, access.password())
    if access.target.db:
        _expect_word(b"OK", connection, b"SELECT", b"%d" % access.target.db)


def handshake(connection: Connection, access: Access) -> tuple[ServerInfo, float]:
    """Introduce the client, and check that the server serves; raises OSError.

    Returns:
        What the server tells, and the seconds of a round trip.
    """
    introduce(connection, access)
    began = time.monotonic()
    _expect_word(b"PONG", connection, b"PING")
    if (took_s := time.monotonic() - began) > access.options.lookup_timeout_s:
        raise ConnectionError(f"a PING takes {took_s:.2f} s")
    server = info_of(connection.ask(b"INFO"))
    if server.get("role", "master") != "master":
        raise ConnectionError("a read-only replica")
    return server, took_s


@contextmanager
def connected(
    address: Address, access: Access, timeout_s: float, user: tuple[str, str] | None = None
) -> Iterator[Connection]:
    """Open a connection outside the data path; raises OSError.

    Args:
        address: The server's.
        access: Has the credentials.
        timeout_s: For the connect with its handshake, and for each later command.
        user: A name and a password in place of the access' own, and no database. ``timeout_s`` is
            then for everything together.
    """
    with closing(Connection(timeout_s)) as connection:
        deadline = time.monotonic() + timeout_s
        connection.open(address, access.tls, deadline, access.allowed.check_ip)
        if user is None:
            introduce(connection, access)
            connection.opened()
        else:
            authenticate(connection, *user)
        yield connection


def info_of(reply: object) -> ServerInfo:
    """Parse a reply to INFO; empty for a refusal, or if there is no reply."""
    if not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, sep, value in lines if sep}


def echo(connection: Connection, nbytes: int) -> None:
    """Send so many bytes in a PING and receive them again; raises OSError.

    A network path may pass a PING and no chunk, in one direction or in both.
    """
    # Random, so that no network device compresses it to a few bytes.
    size = min(nbytes, _PROBE_BYTES)
    noise = os.urandom(_NOISE_BYTES) * (size // _NOISE_BYTES + 1)
    read = partial(connection.reader.value, size)
    (reply,) = connection.ask_all([encode(b"PING", noise[:size])], read)
    if isinstance(reply, ServerError) and reply.code not in IN_STEP:
        raise ConnectionError(reply.text)


def _expect_word(word: bytes, connection: Connection, *command: bytes) -> None:
    if expect(connection, *command) != word:
        raise ConnectionError(f"{command[0].decode()}: an unexpected reply")
