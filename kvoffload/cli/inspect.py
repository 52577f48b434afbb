"""``kvoffload inspect``: what a store holds."""

import json
from typing import Annotated

import typer

from kvoffload.backends.admin import Admin, Holding, Overview
from kvoffload.cli import namespaces
from kvoffload.cli.output import console, plain
from kvoffload.cli.stores import AsJson, Kind, Settings, Target, run_on


def command(
    root: Target = None,
    kind: Kind = None,
    option: Settings = None,
    as_json: AsJson = False,
    sort: Annotated[
        namespaces.Order, typer.Option(help="Largest, longest unused, or first name first.")
    ] = namespaces.Order.size,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every fact.")] = False,
) -> None:
    """Show namespaces, chunks, bytes, ages and how lately chunks were used. Changes nothing.

    Exit codes: 0 done, 1 the store cannot be reached, 2 no such store, or one of another user.
    """
    held, overview = run_on("inspect", root, kind, option, _look)
    if as_json:
        print(json.dumps({**overview.figures, "namespaces": [_figures(each) for each in held]}))
        return
    terminal = console()
    for title, text in overview.lines:
        terminal.print(plain(title, "bold") + (": " if title else "") + text, soft_wrap=True)
    namespaces.show(terminal, held, overview.times, sort, verbose=verbose)
    if not held:
        terminal.print("nothing of kvoffload's is stored here")


async def _look(store: Admin) -> tuple[list[Holding], Overview]:
    held = await store.survey()
    return held, await store.overview(held)


def _figures(each: Holding) -> dict[str, object]:
    if each.figures is not None:
        return dict(each.figures)
    return {name: getattr(each, name) for name in Holding._fields[:5]}
