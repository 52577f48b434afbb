"""A table of the namespaces of a store, with every fact on request."""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from rich.console import Console

from kvoffload.backends.admin import Holding, counted, duration, is_digest
from kvoffload.cli.output import plain, print_numbers
from kvoffload.config import human_bytes

SHOWN_DIGITS = 16
"""Digits of a digest that ``inspect`` shows."""


class Order(StrEnum):
    """The order of the rows."""

    size = "size"
    age = "age"
    name = "name"


def show(to: Console, held: Sequence[Holding], times: str, order: Order, *, verbose: bool) -> None:
    """Print namespaces as a table; ``times`` is the heading of their times."""
    if not held:
        return
    order_named, key = _ORDERS[order]
    held = sorted(sorted(held, key=lambda each: each.namespace), key=key)
    cells = [
        (
            plain(short(each.namespace)).plain,
            [
                plain(_fact(each.facts, "model")).plain,
                plain(_dtype(each.facts)).plain,
                f"{each.chunks:,}",
                human_bytes(each.stored_bytes),
                _time(each),
            ],
        )
        for each in held
    ]
    title = f"{counted(len(held), 'namespace')}, {order_named}"
    columns = ("model", "dtype", "chunks", "bytes", times)
    print_numbers(to, title, "namespace", columns, cells, texts=2)
    for each in held if verbose else ():
        facts = plain(_shown(each.facts))
        to.print()
        to.print(plain(short(each.namespace), "bold") + "  " + facts, soft_wrap=True)
        for line in each.details:
            to.print(f"  {line}", soft_wrap=True)


def short(name: str) -> str:
    """Return a name whole, or the first digits of a digest, which ``gc`` accepts."""
    return name[:SHOWN_DIGITS] if is_digest(name) else name


def _freshness(each: Holding) -> float:
    """Return a number that falls with the time since the last use."""
    if each.used_s is not None:
        return -each.used_s
    return math.inf if each.expires_s is None else each.expires_s


_ORDERS: dict[Order, tuple[str, Callable[[Holding], float]]] = {
    Order.size: ("largest first", lambda each: -each.stored_bytes),
    Order.age: ("longest unused first", _freshness),
    Order.name: ("by name", lambda each: 0),
}


def _time(each: Holding) -> str:
    if each.used_s is not None:
        return f"{duration(each.used_s)} ago"
    return "" if each.expires_s is None else duration(each.expires_s)


def _fact(facts: object, name: str) -> str:
    return str(facts.get(name, "")) if isinstance(facts, Mapping) else ""


def _dtype(facts: object) -> str:
    """Return the type of the stored elements, which an engine may set apart from the model's."""
    stored = _fact(facts, "kv_dtype")
    return stored if stored not in ("", "auto") else _fact(facts, "dtype")


def _shown(facts: object) -> str:
    pairs = sorted(facts.items()) if isinstance(facts, Mapping) else []
    return ", ".join(f"{name}={value}" for name, value in pairs) or "no facts stored"
