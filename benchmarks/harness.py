"""What benchmarks share: naming the machine, taking turns, and the shape of a row."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def machine() -> str:
    """Processor, cores and Python, as a table's title names them."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}"


def best_of(*sides: Callable[[], object], rounds: int = 7) -> list[float]:
    """Let the sides take turns; return each one's best time in seconds.

    Taking turns makes a disturbance by other work on the machine hit all sides alike. Each round
    begins with another side, because a device may be quicker after a pause.
    """
    best = [float("inf")] * len(sides)
    for start in range(rounds):
        for turn in range(len(sides)):
            i = (start + turn) % len(sides)
            started = time.perf_counter()
            sides[i]()
            best[i] = min(best[i], time.perf_counter() - started)
    return best


def row(
    case: str,
    value: float | str,
    unit: str,
    limit: float | None = None,
    limit_name: str | None = None,
) -> Row:
    """One measurement, or a word that stands for one; the ratio is value to limit."""
    ratio = value / limit if limit and not isinstance(value, str) else None
    return {
        "case": case,
        "value": value,
        "unit": unit,
        "limit": limit,
        "limit_name": limit_name,
        "ratio": ratio,
    }


def report(bench: str, rows: list[Row]) -> dict[str, Any]:
    """What ``run()`` returns."""
    return {
        "bench": bench,
        "machine": machine(),
        "command": f"kvoffload bench {bench} --json",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "rows": rows,
    }


def commit() -> str:
    """The commit that was measured, ``+`` if files had been changed since; empty if unknown."""
    try:
        name, changed = _git("rev-parse", "--short", "HEAD"), _git("diff", "--quiet", "HEAD")
    except OSError:  # no git here
        return ""
    return name.stdout.strip() + "+" * (changed.returncode == 1)


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    here = str(Path(__file__).parent)
    return subprocess.run(["git", "-C", here, *words], check=False, capture_output=True, text=True)
