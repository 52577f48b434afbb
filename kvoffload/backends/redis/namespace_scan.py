"""The namespaces of all servers, found by a bounded SCAN on a connection of its own.

An engine's user needs no right to SCAN: without it, nothing is found.
"""

import time
from collections import Counter

from kvoffload.backends.base import Described
from kvoffload.backends.redis.admin import Operator, scan_step, small_value
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.discovery import masters
from kvoffload.backends.redis.handshake import CommandRefused
from kvoffload.backends.redis.namespace_info import (
    PREFIX,
    is_info,
    is_ours,
    namespace_of,
    namespace_prefix,
    read_facts,
)

LONGEST_S = 5.0
MOST_NAMES = 200_000
"""Names that the servers look at, all together."""
MOST_DESCRIBED = 256
"""Namespaces whose facts are read: those with the most chunks."""
_STEP = 100
"""Names of one SCAN, which take less than a millisecond to parse."""
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


def described(operator: Operator, namespace: str) -> list[Described]:
    """Describe namespaces, the largest first: the own one alone if it has chunks.

    Raises:
        OSError: a server cannot be reached, or refuses.
    """
    until_s = time.monotonic() + LONGEST_S
    names, addresses = _Names(), masters(operator.access)
    for address in addresses:
        _scan(operator, address, MOST_NAMES // len(addresses), until_s, names, namespace)
        if count := names.chunks[namespace]:
            return [Described(namespace, {}, count)]
    return _with_facts(operator, names)


def _scan(
    operator: Operator,
    address: Address,
    most: int,
    until_s: float,
    names: _Names,
    namespace: str,
) -> None:
    """Note the names on one server, until so many were looked at or one is of the own namespace."""
    cursor = b"0"
    with operator.connected(address) as connection:
        for _ in range(0, most, _STEP):
            try:
                cursor, found = scan_step(connection, cursor, f"{PREFIX}:*", _STEP)
            except CommandRefused:
                return  # the user has no right to SCAN
            for name in filter(is_ours, found):
                names.add(name, address)
            if cursor == b"0" or names.chunks[namespace] or time.monotonic() > until_s:
                return
            operator.pause(_PAUSE_S)


def _with_facts(operator: Operator, names: _Names) -> list[Described]:
    """Read the facts of the namespaces with the most chunks."""
    found = []
    largest = [each for each, _ in names.chunks.most_common() if each in names.facts_at]
    wanted = largest[:MOST_DESCRIBED]
    for address in dict.fromkeys(names.facts_at[each] for each in wanted):
        with operator.connected(address) as connection:
            for each in wanted:
                if names.facts_at[each] == address:
                    name = f"{namespace_prefix(each)}facts".encode()
                    # The command with which engines load, for which they have the right.
                    facts = read_facts(small_value(connection, b"GETEX", name))
                    found.append(Described(each, facts, names.chunks[each]))
                if connection.lost:
                    break  # a value was far too long
    return found
