"""``kvoffload bench NAME``: measurements, each beside the limit measured in the same run."""

import json
import os
from typing import Annotated, Any

import typer
from rich.table import Table

from kvoffload.cli.checkout import benchmark, benchmark_names
from kvoffload.cli.console import console

NEED_MORE = ("vllm",)
"""Benches that need an engine installed; ``all`` leaves them out."""
LINUX_ONLY = ("disk", "e2e", "vllm")
"""Benches that empty the page cache or read past it; ``all`` leaves them out elsewhere."""

NAMES_HELP = "copy, core, disk, e2e, load, manager, redis, redis_faults, vllm; or all (not vllm)."


def command(
    name: Annotated[str, typer.Argument(help=NAMES_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a bench.")] = False,
) -> None:
    """Measure; each row shows a limit taken in the same run (physical, or a peer's) and the ratio.

    Exit codes: 0 done, 2 no such bench.
    """
    names = benchmark_names()
    if name != "all" and name not in names:
        raise typer.BadParameter(f"{name!r}: must be one of {', '.join(names)}, or all")
    elsewhere = () if hasattr(os, "posix_fadvise") else LINUX_ONLY
    if name in elsewhere:
        raise typer.BadParameter(f"{name!r}: needs Linux, whose page cache it empties")
    left_out = {*NEED_MORE, *elsewhere}
    for each in [n for n in names if n not in left_out] if name == "all" else [name]:
        report = benchmark(each).run()
        if as_json:
            print(json.dumps(report))
        else:
            show(report)


def show(report: dict[str, Any]) -> None:
    """Print a report as a table."""
    table = Table()
    table.add_column("case", overflow="fold")
    for title in ("value", "limit", "ratio"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("limit is", overflow="fold")
    for row in report["rows"]:
        limit, ratio = row["limit"], row["ratio"]
        table.add_row(
            row["case"],
            f"{row['value']:.4g} {row['unit']}",
            "" if limit is None else f"{limit:.4g} {row['unit']}",
            "" if ratio is None else f"{ratio:.2f}",
            row["limit_name"] or "",
        )
    to = console()
    to.print(f"{report['bench']} on {report['machine']}", soft_wrap=True, highlight=False)
    to.print(table, crop=False)
