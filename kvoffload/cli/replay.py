"""``kvoffload replay``: compare eviction policies on a trace, with Belady's bound or in a loop."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from kvoffload.cli.output import console, print_numbers, say
from kvoffload.errors import ConfigError
from kvoffload.replay import plot as picture
from kvoffload.replay import synthetic
from kvoffload.replay.closed_loop import HELPED, ORACLE, Loop, of_oracle, of_policy
from kvoffload.replay.sample import sampled
from kvoffload.replay.simulate import Hits
from kvoffload.replay.study import (
    Row,
    default_sizes,
    parse_counts,
    parse_tiers,
    study,
    total_work,
)
from kvoffload.replay.trace import Trace, from_timed, read_trace

TRACE_HELP = (
    "JSONL of requests with hash_ids or as recorded, also as .gz, or - for standard input; "
    "or a folder of conversations."
)
SYNTHETIC_HELP = (
    f"Make requests instead: NAME or NAME:requests=9,seed=1; {', '.join(synthetic.WORKLOADS)}."
)
LOOP_HELP = "Sessions alive at once, by commas: run a closed loop with a queue, on --sizes."
SAMPLE_HELP = "Share of all blocks to replay, of large traces: rates are then estimates."


def command(
    trace: Annotated[Path | None, typer.Argument(help=TRACE_HELP)] = None,
    policies: Annotated[str, typer.Option(help="Names, by commas.")] = "handicap,lru,arc",
    sizes: Annotated[str, typer.Option(help="Capacities in blocks: 1k,10k,...")] = "",
    tiers: Annotated[str, typer.Option(help="Instead of sizes: cpu=10k,disk=100k")] = "",
    synthetic: Annotated[str, typer.Option(help=SYNTHETIC_HELP)] = "",
    sample: Annotated[float, typer.Option(help=SAMPLE_HELP)] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rates into this PNG file.")] = None,
    closed_loop: Annotated[str, typer.Option(help=LOOP_HELP)] = "",
    prefill: Annotated[
        float, typer.Option(help="Of a closed loop: tokens the engine computes a second.", min=1)
    ] = 20_000,
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a block, where the trace does not say it.", min=1)
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of a closed loop: how long.", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="Of a closed loop: the order of the sessions.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace through eviction policies and print their hit rates.

    A request can use the contiguous prefix of its blocks that is present. The table also has
    Belady's bound, and a store that holds everything.

    With --closed-loop, sessions ask again some time after their last answer, and wait in a queue.
    The tables have hits, served requests and the mean time to the first token. They also say what
    changes if chunks of waiting requests stay, and if requests say when their session returns.

    Exit codes: 0 done; 2 wrong usage or a trace that cannot be read (file, line and field named).
    """
    if tiers and (sizes or plot):
        raise ConfigError("tiers", tiers, "goes with neither --sizes nor --plot")
    if plot is not None:
        picture.check(plot)
    names = list(dict.fromkeys(name for name in policies.split(",") if name))
    if not names:
        raise ConfigError("policies", policies, "must name at least one policy")
    loaded = sampled(open_trace(trace, synthetic), sample)
    if closed_loop:
        if tiers or plot or sample != 1 or not sizes:
            remedy = "goes with --sizes, and with neither --tiers nor --plot nor --sample"
            raise ConfigError("closed_loop", closed_loop, remedy)
        loops = [
            Loop(alive, slots, prefill, tokens_of(loaded, block_tokens), 60 * minutes, seed)
            for alive in parse_counts(closed_loop, "closed_loop", "sessions")
            for slots in parse_counts(sizes, "sizes")
        ]
        found = _run_loops(loaded, loops, names)
        if as_json:
            print(json.dumps({"trace": facts(loaded), "rows": found}))
        else:
            _describe(loaded)
            _show_loops(found)
        return
    stacks = [parse_tiers(tiers)] if tiers else []
    stacks = stacks or [{"": n} for n in parse_counts(sizes, "sizes") or default_sizes(loaded)]
    with progress_bar(total_work(loaded, len(names), len(stacks))) as step:
        rows = study(loaded, names, stacks, step)
    if plot is not None:
        part = "" if sample == 1 else f", a sample of {sample:g}"
        picture.plot(rows, f"{loaded.name}{part}", plot)
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


def tokens_of(trace: Trace, asked: int | None) -> int:
    """Return the tokens in a block: what the trace says, else what was asked for.

    Raises:
        ConfigError: neither says it, or they differ.
    """
    told = trace.block_tokens
    if told is not None and asked not in (None, told):
        raise ConfigError("block_tokens", asked, f"the trace says {told}")
    tokens = told or asked
    if tokens is None:
        remedy = "the trace does not say it; for one in Mooncake's format: --block-tokens 512"
        raise ConfigError("block_tokens", None, remedy)
    return tokens


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


def _describe(trace: Trace) -> None:
    say(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} block accesses, "
        f"{trace.distinct:,} distinct blocks"
        + (f" (a sample of {trace.sample:.3g})" if trace.sample < 1 else "")
    )


def _show(trace: Trace, rows: Sequence[Row]) -> None:
    _describe(trace)
    if any(row.levels for row in rows):
        _show_tiers(rows)
    else:
        _show_rates(rows, "contiguous-prefix hits, %", lambda hits: hits.prefix_rate)
        _show_rates(rows, "block hits, %", lambda hits: hits.block_rate)
    say("belady knows the future: no policy has more hits, of either kind")


def _show_rates(rows: Sequence[Row], title: str, rate: Callable[[Hits], float]) -> None:
    sizes = list(dict.fromkeys(row.capacity for row in rows if row.capacity is not None))
    lines = []
    for name in dict.fromkeys(row.policy for row in rows):
        cells = {row.capacity: f"{100 * rate(row.hits):.2f}" for row in rows if row.policy == name}
        lines.append((name, [cells.get(size, cells.get(None, "")) for size in sizes]))
    print_numbers(title, "policy", [f"{size:,}" for size in sizes], lines)


def _show_tiers(rows: Sequence[Row]) -> None:
    tiers = list(rows[0].levels)
    lines = []
    for row in rows:
        shares = [f"{100 * row.levels[name]:.2f}" if row.levels else "" for name in tiers]
        rates = (row.hits.prefix_rate, row.hits.block_rate)
        lines.append((row.policy, [*shares, *(f"{100 * rate:.2f}" for rate in rates)]))
    columns = [*tiers, "all tiers", "block hits"]
    print_numbers("contiguous-prefix hits by tier, %", "policy", columns, lines)


# ---- closed loops ----

_HELPED_NAMES = {"": "", "waiting": ", waiting kept", "told": ", returns told", "both": ", both"}


def _run_loops(
    trace: Trace, loops: Sequence[Loop], policies: Sequence[str]
) -> list[dict[str, Any]]:
    """Run each loop with each policy, alone and helped, and with a store that knows all.

    Raises:
        ConfigError: the trace has no times, or there is no such policy.
    """
    rows = []
    for loop in loops:
        runs = [(name, helped) for name in policies for helped in HELPED]
        found = [(*run, of_policy(trace, loop, *run)) for run in runs]
        for policy, helped, served in [*found, (ORACLE, "", of_oracle(trace, loop))]:
            facts = {"policy": policy, "helped": helped, "capacity_blocks": loop.slots}
            rows.append({**facts, "sessions": loop.sessions, **served.plain()})
    return rows


def _show_loops(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each number of sessions and each size."""
    for sessions, slots in dict.fromkeys((row["sessions"], row["capacity_blocks"]) for row in rows):
        lines = [
            (
                row["policy"] + _HELPED_NAMES[row["helped"]],
                [
                    f"{100 * row['prefix_hit_rate']:.2f}",
                    f"{row['requests_per_hour']:,.0f}",
                    f"{row['mean_time_to_first_token_s']:.2f}",
                ],
            )
            for row in rows
            if (row["sessions"], row["capacity_blocks"]) == (sessions, slots)
        ]
        title = f"{sessions:,} sessions, {slots:,} blocks"
        columns = ["hits, %", "served an hour", "first token, s"]
        print_numbers(title, "policy", columns, lines)
    say("oracle knows what each session asks for next, and when")
