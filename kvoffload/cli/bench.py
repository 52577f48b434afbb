"""``kvoffload bench NAME``: measurements, each with the limit measured in the same run.

The benchmarks are part of the source checkout, not of the wheel.
"""

import json
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

import kvoffload
from kvoffload.cli.output import console, say, table_of
from kvoffload.errors import ConfigError

FOLDER = Path(kvoffload.__file__).parents[1] / "benchmarks"
"""Of the checkout that the package is imported from."""
NEED_MORE = ("vllm",)
"""Benches that need an engine installed; ``all`` leaves them out."""
LINUX_ONLY = ("disk", "e2e", "folder", "serve", "store_by_slot", "vllm")
"""Benches that use the page cache or memory files; ``all`` leaves them out elsewhere."""

NAMES_HELP = (
    "copy, core, disk, e2e, encryption, engine_step, folder, hops, io_forms, load, manager, "
    "object, redis, redis_faults, serve, store_by_slot, vllm; or all (not vllm)."
)


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


def benchmark_names() -> list[str]:
    """Return the names of the benchmarks in the checkout.

    Raises:
        ConfigError: the package is not imported from a checkout.
    """
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "harness")
    if not names:
        remedy = "needs the source checkout: pip install -e '.[all]' there, then run it again"
        raise ConfigError("bench", str(FOLDER), remedy)
    return names


def benchmark(name: str) -> ModuleType:
    """Import a module of the checkout's ``benchmarks``; it has ``run() -> dict``."""
    return import_module(f"benchmarks.{name}")


def show(report: dict[str, Any]) -> None:
    """Print a report as a table."""
    rows = [
        (
            row["case"],
            f"{row['value']:.4g} {row['unit']}",
            "" if row["limit"] is None else f"{row['limit']:.4g} {row['unit']}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            row["limit_name"] or "",
        )
        for row in report["rows"]
    ]
    say(f"{report['bench']} on {report['machine']}")
    numbers = ("value", "limit", "ratio")
    console().print(table_of(("case", *numbers, "limit is"), rows, numbers=numbers), crop=False)
