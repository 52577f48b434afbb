"""``kvoffload replay``: compare eviction policies on a trace with Belady's bound."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvoffload.cli.output import console, print_numbers, say
from kvoffload.errors import ConfigError
from kvoffload.replay import synthetic
from kvoffload.replay.sample import sampled
from kvoffload.replay.simulate import Hits
from kvoffload.replay.study import (
    Row,
    default_sizes,
    parse_count,
    parse_tiers,
    study,
    study_tiers,
    total_work,
)
from kvoffload.replay.trace import Trace, from_timed, read_trace

TRACE_HELP = (
    "JSONL of requests with hash_ids or as recorded, also as .gz, or - for standard input; "
    "or a folder of conversations."
)
SYNTHETIC_HELP = (
    f"Make requests instead: NAME[:seed=1,requests=6000]; {', '.join(synthetic.WORKLOADS)}."
)
SAMPLE_HELP = "Share of all blocks to replay, of large traces: rates are then estimates."


def command(
    trace: Annotated[Path | None, typer.Argument(help=TRACE_HELP)] = None,
    policies: Annotated[str, typer.Option(help="Names, by commas.")] = "handicap,lru,arc",
    sizes: Annotated[str, typer.Option(help="Capacities in blocks: 1k,10k,...")] = "",
    tiers: Annotated[str, typer.Option(help="Instead of sizes: cpu=10k,disk=100k")] = "",
    synthetic: Annotated[str, typer.Option(help=SYNTHETIC_HELP)] = "",
    sample: Annotated[float, typer.Option(help=SAMPLE_HELP)] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rates into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace through eviction policies and print their hit rates.

    A request can use the contiguous prefix of its blocks that is present. The table also has
    Belady's bound on block hits, and a store that holds everything.

    Exit codes: 0 done; 2 wrong usage or a trace that cannot be read (file, line and field named).
    """
    if tiers and (sizes or plot):
        raise ConfigError("tiers", tiers, "goes with neither --sizes nor --plot")
    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError("plot", str(plot), "must end in .png")
    if plot is not None:
        from kvoffload.replay.plot import check

        check(plot)
    names = list(dict.fromkeys(name for name in policies.split(",") if name))
    if not names:
        raise ConfigError("policies", policies, "must name at least one policy")
    loaded = sampled(open_trace(trace, synthetic), sample)
    if tiers:
        parts = parse_tiers(tiers)
        with progress_bar(total_work(loaded, len(names), None)) as step:
            rows = study_tiers(loaded, names, parts, step)
    else:
        asked = dict.fromkeys(parse_count(text, "sizes") for text in sizes.split(",") if text)
        counts = list(asked) or default_sizes(loaded)
        with progress_bar(total_work(loaded, len(names), len(counts))) as step:
            rows = study(loaded, names, counts, step)
    if plot is not None:
        from kvoffload.replay.plot import plot as draw

        part = "" if sample == 1 else f", a sample of {sample:g}"
        draw(rows, f"{loaded.name}{part}", plot)
    if as_json:
        print(json.dumps({"trace": facts(loaded), "rows": [row.plain() for row in rows]}))
    else:
        _show(loaded, rows)


def open_trace(path: Path | None, made: str) -> Trace:
    """Read the trace, or make the synthetic one asked for instead.

    Raises:
        ConfigError: neither or both, or the trace is wrong.
    """
    if (path is None) == (not made):
        raise ConfigError("trace", path and str(path), "give a trace, or --synthetic NAME")
    if path is not None:
        return read_trace(path)
    return from_timed(made, synthetic.timed(*synthetic.parse(made)))


def facts(trace: Trace) -> dict[str, Any]:
    """Return what was replayed, as plain data."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "block_accesses": trace.accesses,
        "distinct_blocks": trace.distinct,
        "sample": trace.sample,
    }


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while it is a terminal."""
    to = console(stderr=True)
    with Progress(console=to, transient=True, disable=not to.is_terminal) as bar:
        task = bar.add_task("replaying", total=total)
        yield lambda blocks: bar.advance(task, blocks)


def _show(trace: Trace, rows: Sequence[Row]) -> None:
    to = console()
    say(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} block accesses, "
        f"{trace.distinct:,} distinct blocks"
        + (f" (a sample of {trace.sample:.3g})" if trace.sample < 1 else "")
    )
    if any(row.levels for row in rows):
        _show_tiers(to, rows)
    else:
        _show_rates(to, rows, "contiguous-prefix hits, %", lambda hits: hits.prefix_rate)
        _show_rates(to, rows, "block hits, %", lambda hits: hits.block_rate)
    say("belady bounds block hits; a policy's prefix hits may be above belady's in small stores")


def _show_rates(
    to: Console, rows: Sequence[Row], title: str, rate: Callable[[Hits], float]
) -> None:
    sizes = list(dict.fromkeys(row.capacity for row in rows if row.capacity is not None))
    lines = []
    for name in dict.fromkeys(row.policy for row in rows):
        cells = {row.capacity: f"{100 * rate(row.hits):.2f}" for row in rows if row.policy == name}
        lines.append((name, [cells.get(size, cells.get(None, "")) for size in sizes]))
    print_numbers(to, title, "policy", [f"{size:,}" for size in sizes], lines)


def _show_tiers(to: Console, rows: Sequence[Row]) -> None:
    tiers = list(rows[0].levels)
    lines = []
    for row in rows:
        shares = [f"{100 * row.levels[name]:.2f}" if row.levels else "" for name in tiers]
        rates = (row.hits.prefix_rate, row.hits.block_rate)
        lines.append((row.policy, [*shares, *(f"{100 * rate:.2f}" for rate in rates)]))
    columns = [*tiers, "all tiers", "block hits"]
    print_numbers(to, "contiguous-prefix hits by tier, %", "policy", columns, lines)
