"""Asking servers who serves what: a cluster's slot table, the master that Sentinels name.

Each question has a connection of its own, of the kind that the data path uses: its replies are
bounded in size, whatever a server sends.
"""

import asyncio

from kvoffload.backends.redis.channel import Address, open_channel
from kvoffload.backends.redis.connection import Connection, Request
from kvoffload.backends.redis.handshake import Refused, introduce
from kvoffload.backends.redis.options import Access, RedisOptions, Target
from kvoffload.backends.redis.resp import Reply, ServerError, Table, encode, printable
from kvoffload.backends.redis.slots import Slots, parse_masters, parse_slots

REFRESH_EVERY_S = 0.5
"""Seconds between two questions to the same servers, at least."""
_SHOWN_SERVICES = 5


async def ask(
    address: Address, access: Access, timeout_s: float, user: tuple[str, str], *command: bytes
) -> Reply:
    """Connect to a server, send one command, return its reply.

    Args:
        address: of the server.
        access: says whether to use TLS.
        timeout_s: for everything together.
        user: name and password, both empty to send none.
        command: its words.

    Raises:
        OSError: no reply, or (as :class:`Refused`) an error reply.
    """
    async with asyncio.timeout(timeout_s):
        sock, channel = await open_channel(address, access.tls)
        connection = Connection(sock, channel, timeout_s, 0, _ignore, _ignore_loss)
        try:
            await introduce(connection, *user)
            reply = await connection.ask(encode(*command), Table())
        finally:
            connection.abort("done")
    if isinstance(reply, ServerError):
        raise Refused(command[0].decode(), reply)
    return reply


async def fetch_slots(address: Address, options: RedisOptions, access: Access) -> Slots:
    """Ask one server for the slot table.

    Raises:
        OSError: it gives none.
        ValueError: a secret is gone, or what came is no table.
    """
    timeout_s = 2 * options.connect_timeout_s
    user = access.username, access.password()
    rows = await ask(address, access, timeout_s, user, b"CLUSTER", b"SLOTS")
    return parse_slots(rows, address)


class SentinelResolver:
    """Asks Sentinels for the master's address, and remembers it for a moment."""

    def __init__(self, target: Target, options: RedisOptions, access: Access) -> None:
        self._target = target
        self._options = options
        self._access = access
        self._known: tuple[Address, float] | None = None

    async def __call__(self) -> Address:
        """Return the master's address.

        Raises:
            OSError: no Sentinel answers, or none knows a master; its cause is the first failure.
        """
        now = asyncio.get_running_loop().time()
        if self._known and now < self._known[1]:
            return self._known[0]
        service = self._target.service
        said: list[str] = []
        cause: Exception | None = None
        for sentinel in self._target.addresses:
            try:
                masters = await self._masters(sentinel)
            except (OSError, ValueError) as error:
                said.append(f"{sentinel}: {str(error) or type(error).__name__}")
                cause = cause or error
                continue
            if address := masters.get(service):
                self._known = address, now + REFRESH_EVERY_S
                return address
            known = printable(str(sorted(masters)[:_SHOWN_SERVICES]))
            verb = "counts it as down" if service in masters else f"knows only {known}"
            said.append(f"{sentinel} {verb}")
        raise ConnectionError(
            f"no Sentinel names a master {service!r}: {'; '.join(said)}"
        ) from cause

    async def _masters(self, sentinel: Address) -> dict[str, Address | None]:
        access = self._access
        # A share of the time for each, so that one that hangs leaves time to ask the next.
        each_s = self._options.connect_timeout_s / len(self._target.addresses)
        user = access.sentinel_username, access.sentinel_password()
        return parse_masters(await ask(sentinel, access, each_s, user, b"SENTINEL", b"MASTERS"))


def _ignore(connection: Connection) -> None:
    """There is nothing more to send."""


def _ignore_loss(
    connection: Connection, reason: str, silent_s: float, owed: Request | None
) -> None:
    """The request's outcome says it."""
