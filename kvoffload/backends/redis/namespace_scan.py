"""The namespaces of all servers, found by a bounded SCAN on a connection of its own.

An engine's user needs no right to SCAN: without it, nothing is found. Replies are bounded as those
of loads are, so a hostile value costs the description alone.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from msgspec import convert

from kvoffload.backends.base import Described
from kvoffload.backends.redis.channel import Address, open_socket
from kvoffload.backends.redis.connection import Connection
from kvoffload.backends.redis.discovery import masters
from kvoffload.backends.redis.handshake import handshake
from kvoffload.backends.redis.namespace_info import (
    PREFIX,
    is_info,
    is_ours,
    namespace_of,
    namespace_prefix,
    read_facts,
)
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import Fill, NestedArray, encode

LONGEST_S = 5.0
MOST_NAMES = 200_000
"""Names that the servers look at, all together."""
MOST_DESCRIBED = 256
"""Namespaces whose facts are read: those with the most chunks."""
MOST_FACTS_BYTES = 256 << 10
_STEP = 100
"""Names of one SCAN, which the loop's thread parses in less than a millisecond."""
_PAUSE_S = 0.001


class _Names:
    """What the names on servers tell."""

    def __init__(self) -> None:
        self.chunks: Counter[str] = Counter()
        """By namespace."""
        self.facts_at: dict[str, Address] = {}
        """The server that has the facts of a namespace."""

    def add(self, name: bytes, address: Address) -> None:
        if is_info(name):
            self.facts_at[namespace_of(name)] = address
        else:
            self.chunks[namespace_of(name)] += 1


async def described(access: Access, namespace: str) -> list[Described]:
    """Describe namespaces, the largest first: the own one alone if it has chunks.

    Raises:
        OSError: a server cannot be reached, or refuses.
        msgspec.ValidationError: a server's reply is malformed.
    """
    until_s = asyncio.get_running_loop().time() + LONGEST_S
    names, addresses = _Names(), await masters(access)
    for address in addresses:
        await _scan(address, access, MOST_NAMES // len(addresses), until_s, names, namespace)
        if count := names.chunks[namespace]:
            return [Described(namespace, {}, count)]
    return await _with_facts(access, names)


async def _scan(
    address: Address, access: Access, most: int, until_s: float, names: _Names, namespace: str
) -> None:
    """Note the names on one server, until so many were looked at or one is of the own namespace."""
    loop, cursor, pattern = asyncio.get_running_loop(), b"0", f"{PREFIX}:*".encode()
    async with _connected(address, access) as connection:
        for _ in range(0, most, _STEP):
            command = encode(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _STEP)
            reply = await connection.ask(command, NestedArray())
            if not isinstance(reply, list):
                return  # the user has no right to SCAN
            cursor, found = convert(reply, tuple[bytes, list[bytes]])
            for name in filter(is_ours, found):
                names.add(name, address)
            if cursor == b"0" or names.chunks[namespace] or loop.time() > until_s:
                return
            await asyncio.sleep(_PAUSE_S)


async def _with_facts(access: Access, names: _Names) -> list[Described]:
    """Read the facts of the namespaces with the most chunks."""
    found = []
    largest = [each for each, _ in names.chunks.most_common() if each in names.facts_at]
    wanted = largest[:MOST_DESCRIBED]
    for address in dict.fromkeys(names.facts_at[each] for each in wanted):
        async with _connected(address, access) as connection:
            for each in wanted:
                if connection.closed:
                    break  # a value was far too long
                if names.facts_at[each] == address:
                    facts = await _facts(connection, each)
                    found.append(Described(each, facts, names.chunks[each]))
    return found


async def _facts(connection: Connection, namespace: str) -> dict[str, str]:
    """Read the facts of a namespace, by the command with which engines load."""
    name = f"{namespace_prefix(namespace)}facts".encode()
    memory = memoryview(bytearray(MOST_FACTS_BYTES))
    # A value of another size than the memory fills its beginning. JSON has no zero bytes.
    await connection.ask(encode(b"GETEX", name), Fill([memory], memory))
    return read_facts(bytes(memory).rstrip(b"\0"))


@contextlib.asynccontextmanager
async def _connected(address: Address, access: Access) -> AsyncIterator[Connection]:
    options = access.options
    async with asyncio.timeout(options.connect_timeout_s):
        sock = await open_socket(address, access.tls)
    connection = Connection(
        sock, options.timeout_s, 0, on_progress=lambda: None, on_lost=lambda *lost: None
    )
    try:
        await handshake(connection, access)
        yield connection
    finally:
        connection.abort("done")
