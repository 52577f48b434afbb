"""``kvoffload demo``: a real engine serves long prompts again from host memory and from disk."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from kvoffload.cli.checkout import example
from kvoffload.errors import ConfigError, KVOffloadError


def command(
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, ttft.png and engine.log.")
    ] = Path("demo-output"),
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face Llama or Qwen2 folder; default: random weights."),
    ] = None,
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
    """Serve conversations cold, from host memory, and after a kill from disk.

    Exit codes: 0 all outputs are those of an engine without offloading, and both tiers served; 1 an
    output differs, a tier served nothing, or an engine process died; 2 wrong usage or settings.
    """
    demo, reports = example("mini_engine.demo"), example("mini_engine.demo_report")
    console = Console(stderr=as_json)
    options = demo.DemoOptions(out=out, checkpoint=checkpoint, quick=quick, device=device)
    if threads is not None:
        options = demo.DemoOptions(out, checkpoint, quick, device, threads)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("starting", total=demo.num_requests(options))
            report = demo.run(
                options, lambda what, done: bar.update(task, description=what, advance=done)
            )
    except ConfigError:
        raise
    except KVOffloadError as error:
        console.print(f"kvoffload demo: {error}", style="red")
        sys.exit(1)

    reports.write_json(out / "report.json", report)
    written = ["report.json"]
    try:
        reports.draw_plot(out / "ttft.png", report)
        written.append("ttft.png")
    except ImportError:
        console.print("no plot: pip install 'kvoffload[plots]'")
    if as_json:
        print(json.dumps(report))
    else:
        reports.print_table(console, report)
        chunks = report["killed_with_chunks_on_their_way"]
        console.print(f"Before pass 3 the engine was killed with {chunks} chunks on their way.")
        console.print(f"Written to {out}: {', '.join(written)}")
    for problem in report["problems"]:
        console.print(f"PROBLEM  {problem}", style="red")
    sys.exit(1 if report["problems"] else 0)
