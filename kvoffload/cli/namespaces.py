"""Namespaces of a store as people look at them: a table, and every fact on request."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from rich.console import Console

from kvoffload.cli.output import counted, plain, print_numbers
from kvoffload.config import human_bytes

SHOWN_DIGITS = 16
"""Of a digest: so many does ``inspect`` show."""
_DIGEST_DIGITS = 32
"""So many digits and more are no name that people give."""


class Order(StrEnum):
    """What the rows are sorted by."""

    size = "size"
    age = "age"
    name = "name"


_ORDERS = {
    Order.size: "largest first",
    Order.age: "longest unused first",
    Order.name: "by name",
}


class Row(NamedTuple):
    """One namespace."""

    name: str
    """As it was opened: a name, or a digest of facts."""
    facts: object
    chunks: int
    stored_bytes: int
    unused_s: float | None
    """Seconds since the last use, or any number that grows with them; None: unknown."""
    time: str
    """The same for people; empty: unknown."""
    details: Sequence[str] = ()
    """Further lines, shown on request."""


def show(to: Console, rows: Sequence[Row], time: str, order: Order, *, verbose: bool) -> None:
    """Print namespaces as a table; ``time`` is the heading of the rows' times."""
    if not rows:
        return
    rows = _sorted(rows, order)
    cells = [
        (
            plain(short(row.name)).plain,
            [
                plain(_fact(row.facts, "model")).plain,
                plain(_dtype(row.facts)).plain,
                f"{row.chunks:,}",
                human_bytes(row.stored_bytes),
                row.time,
            ],
        )
        for row in rows
    ]
    title = f"{counted(len(rows), 'namespace')}, {_ORDERS[order]}"
    columns = ("model", "dtype", "chunks", "bytes", time)
    print_numbers(to, title, "namespace", columns, cells, texts=2)
    for row in rows if verbose else ():
        to.print()
        to.print(plain(short(row.name), "bold") + "  " + plain(_told(row.facts)), soft_wrap=True)
        for line in row.details:
            to.print(f"  {line}", soft_wrap=True)


def short(name: str) -> str:
    """A name whole; of a digest the first digits, which ``gc`` takes as well."""
    is_digest = len(name) >= _DIGEST_DIGITS and not set(name) - set("0123456789abcdef")
    return name[:SHOWN_DIGITS] if is_digest else name


def duration(seconds: float) -> str:
    """Write seconds for people: ``duration(5400) == "1.5 h"``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _sorted(rows: Sequence[Row], order: Order) -> list[Row]:
    by_name = sorted(rows, key=lambda row: row.name)
    if order is Order.size:
        return sorted(by_name, key=lambda row: -row.stored_bytes)
    if order is Order.age:
        return sorted(by_name, key=lambda row: math.inf if row.unused_s is None else -row.unused_s)
    return by_name


def _fact(facts: object, name: str) -> str:
    return str(facts.get(name, "")) if isinstance(facts, Mapping) else ""


def _dtype(facts: object) -> str:
    """The type of the stored elements, which an engine may set apart from the model's."""
    stored = _fact(facts, "kv_dtype")
    return stored if stored not in ("", "auto") else _fact(facts, "dtype")


def _told(facts: object) -> str:
    pairs = sorted(facts.items()) if isinstance(facts, Mapping) else []
    return ", ".join(f"{name}={value}" for name, value in pairs) or "no facts stored"
