"""The namespaces of all servers, found by a bounded SCAN on a connection of its own.

An engine's user needs no right to SCAN: without it, nothing is found.
"""

import time
from collections import Counter

from kvoffload.backends.base import Described
from kvoffload.backends.redis.admin import Operator, small_value
from kvoffload.backends.redis.connection import Address, Connection
from kvoffload.backends.redis.handshake import CommandRefused
from kvoffload.backends.redis.namespace_info import (
    PREFIX,
    is_info,
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


def described(operator: Operator, namespace: str) -> list[Described]:
    """Describe namespaces, the largest first: the own one alone if it has chunks.

    Raises:
        OSError: a server cannot be reached, or refuses.
    """
    until_s = time.monotonic() + LONGEST_S
    chunks, facts_at = Counter[str](), dict[str, Address]()

    def note(connection: Connection, names: list[bytes]) -> bool:
        for name in names:
            if is_info(name):
                facts_at[namespace_of(name)] = connection.address
            else:
                chunks[namespace_of(name)] += 1
        return bool(chunks[namespace]) or time.monotonic() > until_s

    try:
        operator.scan(f"{PREFIX}:", note, step=_STEP, most=MOST_NAMES, pause_s=_PAUSE_S)
    except ConnectionError as error:
        refused = error.__cause__
        if not (isinstance(refused, CommandRefused) and refused.command == "SCAN"):
            raise
    if count := chunks[namespace]:
        return [Described(namespace, {}, count)]
    largest = [each for each, _ in chunks.most_common() if each in facts_at]
    wanted, found = largest[:MOST_DESCRIBED], list[Described]()
    for address in dict.fromkeys(facts_at[each] for each in wanted):
        with operator.connected(address) as connection:
            for each in wanted:
                if facts_at[each] == address:
                    name = f"{namespace_prefix(each)}facts".encode()
                    # The command with which engines load, for which they have the right.
                    facts = read_facts(small_value(connection, b"GETEX", name))
                    found.append(Described(each, facts, chunks[each]))
                if connection.lost:
                    break  # a value was far too long
    return found
