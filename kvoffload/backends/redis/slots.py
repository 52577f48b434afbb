"""Which slot a key belongs to, and what servers say about who serves it, checked before use.

Slot tables, redirects and Sentinels' answers come over the network: a server that lies, or somebody
on the line, chooses every word of them. Pure functions; what is out of bounds is a ValueError.
"""

import binascii
import re
from itertools import pairwise
from typing import Any

from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.resp import ServerError, printable

NUM_SLOTS = 16384
MAX_NODES = 1024
"""Masters in one table; Redis recommends at most 1,000 nodes."""
_HOST = re.compile(r"[0-9A-Za-z._:%-]{1,253}")

Slots = list[tuple[int, int, Address]]
"""First slot, last slot, master: the rows of a slot table."""


def slot_of(key: bytes) -> int:
    """The cluster slot of a key, by its hash tag if it has one."""
    start = key.find(b"{")
    if start >= 0:
        stop = key.find(b"}", start + 1)
        if stop > start + 1:
            key = key[start + 1 : stop]
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


def parse_address(host: str, port: str) -> Address:
    """An address named by a server.

    Raises:
        ValueError: it is none.
    """
    if not _HOST.fullmatch(host):
        raise ValueError(f"not a host: {printable(host)}")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"not a port: {printable(port)}")
    return Address(host, int(port))


def parse_slots(rows: Any, asked: Address) -> Slots:
    """Read the reply to ``CLUSTER SLOTS``.

    Args:
        rows: the reply, as nested lists.
        asked: who gave it; a row without a host means this one.

    Raises:
        ValueError: it is no slot table, or one that no cluster has.
    """
    slots: Slots = []
    for row in _rows(rows):
        match row:
            case [int(start), int(stop), [host, int(port), *_], *_] if (
                0 <= start <= stop < NUM_SLOTS and isinstance(host, bytes | None)
            ):
                if host == b"?":
                    continue  # a node that is to announce its name, and does not know it yet
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
    """The slot and the server that a MOVED or ASK names.

    Raises:
        ValueError: it names none.
    """
    words = error.text.split(" ")
    if len(words) != 3 or not (words[1].isascii() and words[1].isdecimal()) or len(words[1]) > 5:
        raise ValueError(f"not a redirect: {error.text}")
    slot = int(words[1])
    if slot >= NUM_SLOTS:
        raise ValueError(f"a redirect of slot {slot}")
    host, _, port = words[2].rpartition(":")
    return slot, parse_address(host.strip("[]"), port)


def parse_masters(rows: Any) -> dict[str, Address | None]:
    """Read the reply to ``SENTINEL MASTERS``: masters by their service; None where one is down.

    Raises:
        ValueError: it is no such list.
    """
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
    match reply:
        case list():
            return reply
        case _:
            raise ValueError(f"{type(reply).__name__} where an array was due")
