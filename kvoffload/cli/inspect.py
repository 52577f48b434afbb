"""``kvoffload inspect``: what a store holds."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvoffload.backends.admin import Holding, counted, duration, is_digest, named
from kvoffload.cli.output import plain, print_numbers, say
from kvoffload.cli.stores import AsJson, Kind, Settings, Target, run_on
from kvoffload.config import human_bytes
from kvoffload.facts import Difference, compared, differences, model_of
from kvoffload.identity import short


class Order(StrEnum):
    """The order of the rows."""

    size = "size"
    age = "age"
    name = "name"


def command(
    root: Target = None,
    kind: Kind = None,
    option: Settings = None,
    as_json: AsJson = False,
    sort: Annotated[
        Order, typer.Option(help="Largest, longest unused, or first name first.")
    ] = Order.size,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="Show the facts in which two namespaces differ; with -v all."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every fact.")] = False,
) -> None:
    """Show namespaces, chunks, bytes, ages and how lately chunks were used. Changes nothing.

    Exit codes: 0 done, 1 the store cannot be reached, 2 no such store or namespace, or a store of
    another user.
    """
    held, figures, lines, times = run_on(
        "inspect", root, kind, option, lambda store: store.survey()
    )
    if diff is not None:
        _diff(held, diff, as_json=as_json, verbose=verbose)
        return
    if as_json:
        print(json.dumps({**figures, "namespaces": [_figures(each) for each in held]}))
        return
    for title, text in lines:
        say(plain(title, "bold") + (": " if title else "") + plain(text))
    if held:
        _show(held, times, sort, verbose=verbose)
    else:
        say("nothing of kvoffload's is stored here")


def _figures(each: Holding) -> dict[str, object]:
    if each.figures is not None:
        return dict(each.figures)
    return {name: getattr(each, name) for name in Holding._fields[:5]}


def _show(held: Sequence[Holding], times: str, order: Order, *, verbose: bool) -> None:
    """Print namespaces as a table, and every fact on request; ``times`` heads their times."""
    order_named, key = _ORDERS[order]
    held = sorted(sorted(held, key=lambda each: each.namespace), key=key)
    cells = [
        (
            plain(_short(each.namespace)).plain,
            [
                plain(model_of(each.facts)).plain,
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
    print_numbers(title, "namespace", columns, cells, texts=2)
    for each in held if verbose else ():
        pairs = ", ".join(f"{name}={value}" for name, value in sorted(each.facts.items()))
        name = plain(_short(each.namespace), "bold")
        say("", name + "  " + plain(pairs or "no facts stored"))
        say(*(f"  {line}" for line in each.details))


def _diff(
    held: Sequence[Holding], wanted: tuple[str, str], *, as_json: bool, verbose: bool
) -> None:
    """Print the facts of two namespaces side by side.

    Raises:
        ConfigError: a name means no namespace, or several.
    """
    by_name = {each.namespace: each for each in held}
    one, other = (by_name[named(name, by_name, "diff")] for name in wanted)
    compare = compared if verbose else differences
    shown: Sequence[Difference] = list(compare(one.facts, other.facts))
    if as_json:
        names = [one.namespace, other.namespace]
        print(json.dumps({"namespaces": names, "facts": {n: [a, b] for n, a, b in shown}}))
        return
    if not shown:
        say("no stored fact differs")
    for fact in shown:
        say(plain(fact.name, "bold"))
        for each, value in zip((one, other), fact[1:], strict=True):
            say(f"  {_short(each.namespace)}  {'(none)' if value is None else value}")


def _short(name: str) -> str:
    """Return a name whole, or the first digits of a digest, which ``gc`` accepts."""
    return short(name) if is_digest(name) else name


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


def _dtype(facts: Mapping[str, Any]) -> str:
    """Return the type of the stored elements, which an engine may set apart from the model's."""
    stored = str(facts.get("kv_dtype", ""))
    if stored in ("", "auto", "of the pool"):  # SGLang's pages have the dtype of their pool
        stored = str(facts.get("pool.dtype") or facts.get("dtype", ""))
    return stored.removeprefix("torch.")
