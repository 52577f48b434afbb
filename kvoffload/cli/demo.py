"""``kvoffload demo``: real engines serve long prompts again from memory, a disk, and a server."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from kvoffload.cli.output import console, plain, say
from kvoffload.errors import ConfigError, KVOffloadError


def command(
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, ttft.png and engine.log.")
    ] = Path("demo-output"),
    device: Annotated[str, typer.Option(help="Where the model computes: cpu, cuda.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Compute threads; default: all cores but one.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and short prompts: a check, no figures.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report to standard output, nothing else.")
    ] = False,
) -> None:
    """Serve conversations cold, from host memory, after a kill from disk, and from a server.

    Exit codes:

    0: all outputs equal those of an engine without offloading, and all tiers served.

    1: an output differs, a tier served nothing, or an engine process died.

    2: wrong usage or settings.
    """
    if threads is not None and threads < 1:
        raise ConfigError("threads", threads, "must be at least 1")
    _check_folder(out)
    from kvoffload.demo import showcase  # loads torch

    chosen = {} if threads is None else {"threads": threads}
    options = showcase.DemoOptions(out, quick, device, **chosen)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console(stderr=as_json)) as bar:
            task = bar.add_task("starting", total=showcase.num_requests(options))
            report = showcase.run(
                options, lambda what, done: bar.update(task, description=what, advance=done)
            )
    except ConfigError:
        raise
    except KVOffloadError as error:
        say(plain(f"kvoffload demo: {error}", "red"), stderr=True)
        sys.exit(1)

    written = write(out, report)
    if as_json:
        print(json.dumps(report))
    else:
        show(out, report, written)
    problems = (plain(f"PROBLEM  {problem}", "red") for problem in report["problems"])
    say(*problems, stderr=as_json)
    sys.exit(1 if report["problems"] else 0)


def write(out: Path, report: Mapping[str, Any]) -> list[str]:
    """Write the report, and a picture where matplotlib is installed; return the files' names."""
    from kvoffload.demo.demo_report import draw_plot  # loads torch

    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    try:
        draw_plot(out / "ttft.png", report)
    except ImportError:
        return ["report.json"]
    return ["report.json", "ttft.png"]


def show(out: Path, report: Mapping[str, Any], written: Sequence[str]) -> None:
    """Print what the demo found."""
    from kvoffload.demo.demo_report import print_table

    print_table(console(), report)
    killed = enumerate(report["killed_with_chunks_on_their_way"], 3)
    text = "Before pass {} the engine was killed with {} chunks on their way."
    lines = [text.format(*each) for each in killed]
    if len(lines) > 1:
        lines.append("In pass 4 another engine goes on, with what the server of the host has.")
    if report["quick"]:
        lines.append("A check, no figures: prompts are too short for their times to say anything.")
    lines.append(f"Written to {out}: {', '.join(written)}")
    if "ttft.png" not in written:
        lines.append("no plot: pip install '/path/to/kvoffload[plots]'")
    say(*lines)


def _check_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError("out", str(out), f"cannot be written: {error.strerror}") from error
