"""Discovery: ask servers for a cluster's slot table or for the master that Sentinels name.

Every question uses a connection of its own. Slot tables, redirects and Sentinels' replies come over
the network, so an attacker may choose every word. The reader bounds the size of a reply. The
parsers check it, and raise ValueError. :mod:`~kvoffload.backends.redis.allowed` checks the servers.
"""

import re
from binascii import crc_hqx
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeVar

from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.handshake import CommandRefused, connected
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import MAX_TEXT, Reply, ServerError, encode
from kvoffload.facts import escaped

REFRESH_EVERY_S = 0.5
"""Shortest time between two questions to the same servers."""
NUM_SLOTS = 16384
MAX_NODES = 1024
"""Masters in one table; Redis recommends at most 1,000 nodes."""
_HOST = re.compile(r"[0-9A-Za-z._:%-]{1,253}")
_SHOWN_SERVICES = 5
_SHOWN_SERVERS = 5
T = TypeVar("T")

REDIRECTS = frozenset({"MOVED", "ASK"})
"""Errors that name another server of a cluster."""
Slots = list[tuple[int, int, Address]]
"""Rows of a slot table: first slot, last slot, master."""


def key_slot(tag: bytes) -> int:
    """Return the slot of a key by its hash tag: the part between braces."""
    return crc_hqx(tag, 0) % NUM_SLOTS


def parse_address(host: str, port: str) -> Address:
    """Check an address that a server names."""
    if not _HOST.fullmatch(host):
        raise ValueError(f"not a host: {escaped(host, MAX_TEXT)}")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"not a port: {escaped(port, MAX_TEXT)}")
    return Address(host, int(port))


def parse_slots(rows: Any, asked: Address) -> Slots:
    """Parse the reply to ``CLUSTER SLOTS``; a row without a host means the server ``asked``."""
    slots: Slots = []
    for row in _rows(rows):
        match row:
            case [int(start), int(stop), [host, int(port), *_], *_] if (
                0 <= start <= stop < NUM_SLOTS and isinstance(host, bytes | None)
            ):
                if host == b"?" or not port:
                    continue  # the server asked does not know its announced name, or its address
                name = host.decode("utf-8", "replace") if host else asked.host
                slots.append((start, stop, parse_address(name, str(port))))
            case _:
                raise ValueError("not a row of a slot table")
    slots.sort()
    if any(row[1] >= following[0] for row, following in pairwise(slots)):
        raise ValueError("a slot table with a slot in two rows")
    if len({address for _, _, address in slots}) > MAX_NODES:
        raise ValueError(f"a slot table of more than {MAX_NODES} nodes")
    return slots


def parse_redirect(error: ServerError) -> tuple[int, Address]:
    """Return the slot and the server that a MOVED or ASK names."""
    words = error.text.split(" ")
    if len(words) != 3 or not (words[1].isascii() and words[1].isdecimal()) or len(words[1]) > 5:
        raise ValueError(f"not a redirect: {error.text}")
    slot = int(words[1])
    if slot >= NUM_SLOTS:
        raise ValueError(f"a redirect of slot {slot}")
    host, _, port = words[2].rpartition(":")
    return slot, parse_address(host.strip("[]"), port)


def parse_masters(rows: Any) -> dict[str, Address | None]:
    """Parse the reply to ``SENTINEL MASTERS``: masters by service, None for one that is down."""
    found: dict[str, Address | None] = {}
    for row in _rows(rows):
        if not all(isinstance(word, bytes) for word in _rows(row)):
            raise ValueError("not a description of a master")
        words = [word.decode("utf-8", "replace") for word in row]
        fields = dict(zip(words[::2], words[1::2], strict=False))
        flags = fields.get("flags", "").split(",")
        down = "master" not in flags or "s_down" in flags or "o_down" in flags
        address = parse_address(fields.get("ip", ""), fields.get("port", ""))
        found[fields.get("name", "")] = None if down else address
    return found


def _rows(reply: Any) -> list[Any]:
    if isinstance(reply, list):
        return reply
    raise ValueError(f"{type(reply).__name__} instead of an array")


def ask(
    address: Address, access: Access, timeout_s: float, user: tuple[str, str], *command: bytes
) -> Reply:
    """Send one command to a server as ``user``, a name and a password; raises OSError."""
    with connected(address, access, timeout_s, user) as connection:
        (reply,) = connection.ask_all([encode(*command)], connection.reader.table)
    if isinstance(reply, ServerError):
        raise CommandRefused(command[0].decode(), reply)
    return reply


def fetch_slots(address: Address, access: Access) -> Slots:
    """Ask one server for the slot table; raises OSError, or ValueError for a table of no use."""
    timeout_s = 2 * access.options.connect_timeout_s
    user = access.username, access.password()
    slots = parse_slots(ask(address, access, timeout_s, user, b"CLUSTER", b"SLOTS"), address)
    if not slots:  # as of a server that has left the cluster
        raise ValueError("a table without servers")
    for _, _, server in slots:
        access.allowed.check(server)
    return slots


def find_master(access: Access) -> Address:
    """Return the master that a Sentinel names; ConnectionError: none does."""
    service, sentinels = access.target.service, access.target.addresses
    # A share of the time for each Sentinel: one that hangs leaves time for the next.
    each_s = access.options.connect_timeout_s / len(sentinels)

    def master(sentinel: Address) -> Address:
        user = access.options.sentinel_username, access.sentinel_password()
        named = parse_masters(ask(sentinel, access, each_s, user, b"SENTINEL", b"MASTERS"))
        if address := named.get(service):
            return access.allowed.check(address)
        known = escaped(sorted(named)[:_SHOWN_SERVICES], MAX_TEXT)
        raise ValueError("counts it as down" if service in named else f"knows only {known}")

    return _first(sentinels, master, f"no Sentinel names a master {service!r}")


def find_slots(access: Access, servers: Iterable[Address], *, whole: bool = False) -> Slots:
    """Return which server has which slots: without a cluster, one has them all.

    Args:
        access: The URL and the credentials.
        servers: Those of a cluster to ask.
        whole: Accept only a table with a server for every slot.

    Raises:
        ConnectionError: no server tells; what each one said, with the first failure as its cause.
    """
    if access.target.kind != "cluster":
        is_named = access.target.kind == "sentinel"
        return [(0, NUM_SLOTS - 1, find_master(access) if is_named else access.target.addresses[0])]

    def table(server: Address) -> Slots:
        slots = fetch_slots(server, access)
        missing = NUM_SLOTS - sum(stop + 1 - start for start, stop, _ in slots)
        if whole and missing:
            raise ValueError(f"{missing} of {NUM_SLOTS} slots have no server")
        return slots

    return _first(servers, table, "no server gives a slot table")


def masters(access: Access) -> list[Address]:
    """Return every server that holds a part of the data; OSError: no server names them all."""
    slots = find_slots(access, access.target.addresses, whole=True)
    return list(dict.fromkeys(address for _, _, address in slots))


def _first(servers: Iterable[Address], ask_one: Callable[[Address], T], failure: str) -> T:
    """Return the first server's answer; ConnectionError: the failure, and what each server said."""
    said: list[str] = []
    cause: Exception | None = None
    for server in servers:
        try:
            return ask_one(server)
        except (OSError, ValueError) as error:
            said.append(f"{server}: {str(error) or type(error).__name__}")
            cause = cause or error
    raise ConnectionError(f"{failure}: {'; '.join(said[:_SHOWN_SERVERS])}") from cause
