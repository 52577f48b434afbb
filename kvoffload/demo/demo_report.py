"""What the demo shows: a table, a plot, a JSON report."""

import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PASSES = {"cold": "1 cold", "host": "2 host", "disk": "3 disk", "server": "4 server"}
"""The passes in order, and their names for people."""
TICKS = (
    "cold", "from host memory", "from disk,\nin a new process",
    "from the host's server,\nin another process",
)  # fmt: skip
MEDIA = {"GPU": "gpu", "CPU": "cpu", "DISK": "disk", "SERVE": "server"}
"""Where chunks come from, and its name in the report."""


def machine() -> dict[str, Any]:
    """Describe the machine the figures were made on."""
    return {
        "cpu": _cpu_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def summarize(
    name: str, results: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Sum up one pass against the same prompts without offloading."""
    tokens: Counter[str] = Counter()
    for result in results:
        tokens.update(result["cached_tokens"])
    ttft = statistics.median(result["ttft_s"] for result in results)
    without = statistics.median(result["ttft_s"] for result in baseline)
    return {
        "pass": name,
        "requests": len(results),
        "prompt_tokens": sum(result["prompt_tokens"] for result in results),
        "tokens_from": {name: tokens[medium] for medium, name in MEDIA.items()},
        "tokens_recomputed": sum(result["computed_prompt_tokens"] for result in results),
        "median_ttft_s": ttft,
        "baseline_median_ttft_s": without,
        "speedup": without / ttft,
        "outputs_identical": all(
            a["token_ids"] == b["token_ids"] for a, b in zip(results, baseline, strict=True)
        ),
        "ttft_s": [result["ttft_s"] for result in results],
        "baseline_ttft_s": [result["ttft_s"] for result in baseline],
    }


def problems(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what a demo must not show: other outputs, or a tier that served nothing."""
    found = [f"{p['pass']}: outputs differ" for p in passes if not p["outputs_identical"]]
    served = {p["pass"]: p["tokens_from"] for p in passes}
    if not served["host"]["cpu"]:
        found.append("host: nothing came from host memory")
    if not served["disk"]["disk"]:
        found.append("disk: nothing came from disk")
    if "server" in served and not served["server"]["server"]:
        found.append("server: nothing came from the server of the host")
    return found


def print_table(console: Any, report: Mapping[str, Any]) -> None:
    """Print the passes as a table of rich, with the machine above it."""
    from rich import box
    from rich.table import Table

    where = report["machine"]
    table = Table(
        title=f"{report['model']}\n{where['cpu']}, {report['threads']} compute thread(s)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("pass")
    for heading in (
        "re-\nque-\nsts", "prompt\ntokens", "from\nGPU", "from\nCPU", "from\ndisk", "from\nserver",
        "com-\nputed", "median\nTTFT", "with-\nout",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    if not report["quick"]:
        table.add_column("speed\nup", justify="right")
    table.add_column("same\nout-\nput", justify="right")
    for row in report["passes"]:
        came = row["tokens_from"]
        table.add_row(
            PASSES[row["pass"]],
            *(f"{n:,}" for n in (row["requests"], row["prompt_tokens"], *came.values())),
            f"{row['tokens_recomputed']:,}",
            _seconds(row["median_ttft_s"]),
            _seconds(row["baseline_median_ttft_s"]),
            *([] if report["quick"] else [f"{row['speedup']:.1f}×"]),
            "[green]yes[/]" if row["outputs_identical"] else "[red]NO[/]",
        )
    console.print(table)


def draw_plot(path: Path, report: Mapping[str, Any]) -> None:
    """Draw every request's time to first token, with and without offloading, and the medians."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colors = {"baseline_": "#9a9a9a", "": "#0f7b6c"}
    labels = {"baseline_": "without offloading", "": "with kvoffload"}
    for x, row in enumerate(report["passes"]):
        for shift, kind in ((-0.19, "baseline_"), (0.19, "")):
            times, median = row[f"{kind}ttft_s"], row[f"{kind}median_ttft_s"]
            axes.bar(x + shift, median, 0.34, color=colors[kind], alpha=0.55,
                     label=labels[kind] if x == 0 else None)  # fmt: skip
            spread = [
                x + shift + 0.2 * (i / max(1, len(times) - 1) - 0.5) for i in range(len(times))
            ]
            axes.plot(spread, times, "o", ms=4, color=colors[kind], mec="white", mew=0.5)
            factor = "" if kind or report["quick"] else f"\n{row['speedup']:.1f}×"
            text = f"{_seconds(median)}{factor}"
            axes.annotate(text, (x + shift, max([median, *times])), xytext=(0, 5),
                          textcoords="offset points", ha="center", fontsize=9)  # fmt: skip
    axes.set_xticks(range(len(report["passes"])), TICKS[: len(report["passes"])])
    axes.set_ylabel("time to first token, s")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(f"{report['model']} on {report['machine']['cpu']}", fontsize=10)
    figure.savefig(path, dpi=130)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
