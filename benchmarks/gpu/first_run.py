"""The first run on a GPU: ``python -m benchmarks.gpu.first_run [--out FILE] [PART ...]``.

Each part is a process with a time limit: one that fails, or hangs, costs itself alone. After each
part all results are written to FILE, and all output to FILE with the suffix ``.log``. All parts
together end within the budget, ten minutes less a margin. Exit status 1: not every part was good.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import COMMAND, PARTS, show
from benchmarks.harness import Row, commit, machine

BUDGET_S = 550.0
LEAST_S = 10.0
"""A part is not begun with less time than this."""
MOST_LINES, MOST_COLUMNS = 40, 200
"""Of a failed part's output, in the report and on the screen."""
GOALS: dict[str, tuple[str, Callable[..., Any], float]] = {
    "one way": ("direct pieces, one way, of one large copy", min, 0.95),
    "both ways": ("direct pieces, both ways, of one large copy each", min, 0.90),
    "small pieces": ("staged pieces, of large copies", min, 0.85),
    "prefill": ("rate during prefill-like steps, of that with no model", min, 0.90),
    "step p50": ("a model's step during transfers, p50, of that alone", max, 1.02),
    "step p99": ("a model's step during transfers, p99, of that alone", max, 1.05),
    "submit": ("a submission, of 20 µs and 0.1 µs a page", max, 1.0),
}
"""For the rows marked with a goal: what it is, the worst of their ratios, and the ratio wanted."""


def run_part(name: str, limit_s: float, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a part in a process of its own; returns its verdict, seconds, rows and output."""
    rows_file, log_file = folder / f"{name}.rows", folder / f"{name}.log"
    begun_s = time.monotonic()
    with log_file.open("w") as log:
        child = subprocess.Popen(
            [*command, name, str(rows_file), str(limit_s)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_s)
            verdict = f"failed with exit status {status}" if status else "ok"
        except subprocess.TimeoutExpired:
            verdict = f"killed after {limit_s:.0f} s"
        finally:
            # Its own children too. What a driver does not let die is left alone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
    rows = read_rows(rows_file)
    if verdict == "ok" and not rows:
        verdict = "failed: no rows"
    return {
        "part": name,
        "verdict": verdict,
        "seconds": round(time.monotonic() - begun_s, 1),
        "rows": rows,
        "output": log_file.read_text(errors="replace").splitlines(),
    }


def read_rows(path: Path) -> list[Row]:
    """Return the rows written so far; a killed process may leave half a line."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def compare_with_link(parts: Sequence[dict[str, Any]]) -> None:
    """Set the limit of each rate: one large copy of as many bytes, measured in this run."""
    links = {
        (one.get("way"), one.get("bytes")): one["value"]
        for part in parts
        if part["part"] == "link"
        for one in part["rows"]
    }
    for one in (one for part in parts if part["part"] != "link" for one in part["rows"]):
        if limit := links.get((one.get("way"), one.get("bytes"))):
            one |= {"limit": limit, "limit_name": "link", "ratio": one["value"] / limit}


def goals(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge each goal by the worst row marked with it.

    ``reached`` is None if no such row has a ratio, or if some are missing and the rest are good.
    """
    judged = []
    for key, (text, worst, wanted) in GOALS.items():
        found = [
            (one["ratio"], one["case"], part["verdict"] == "ok")
            for part in parts
            for one in part["rows"]
            if one.get("goal") == key and one["ratio"] is not None
        ]
        ratio, case, _ = worst(found, default=(None, "", False))
        is_reached = None
        if found and (worst(ratio, wanted) != wanted or all(whole for _, _, whole in found)):
            is_reached = worst(ratio, wanted) == wanted
        bound = f"{'at least' if worst is min else 'at most'} {wanted:.2f}"
        judged.append(
            {"goal": f"{text}: {bound}", "ratio": ratio, "case": case, "reached": is_reached}
        )
    return judged


def print_part(part: dict[str, Any]) -> None:
    """Print the verdict and the rows; tests that passed as one line; the output of a failure."""
    print(f"\n== {part['part']}: {part['verdict']}, {part['seconds']} s")
    passed = [one for one in part["rows"] if one.get("outcome") == "passed"]
    for one in part["rows"]:
        if one not in passed:
            print(show(one)[:MOST_COLUMNS])
    if passed:
        print(f"{len(passed)} tests passed")
    if part["verdict"] != "ok":
        print(*(line[:MOST_COLUMNS] for line in part["output"][-MOST_LINES:]), sep="\n")
    sys.stdout.flush()


def print_summary(report: dict[str, Any]) -> None:
    """Print all rates against the link, the goals, and the verdicts."""
    print("\n== rates, and their ratio to one large copy of the same run")
    for part in report["parts"]:
        for one in part["rows"]:
            if part["part"] == "rates" and one["ratio"] is not None:
                print(show(one))
    print("\n== goals")
    words = {True: "reached", False: "NOT REACHED", None: "not measured"}
    for goal in report["goals"]:
        ratio = f", worst {goal['ratio']:.3f}: {goal['case']}" if goal["case"] else ""
        print(f"{words[goal['reached']]:<12} {goal['goal']}{ratio}")
    print("\n== parts")
    for part in report["parts"]:
        print(f"{part['part']:<12} {part['verdict']}, {len(part['rows'])} rows")


def main(words: Sequence[str] | None = None, command: Sequence[str] = COMMAND) -> int:
    """Run parts, by ``command`` with the part's name; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="first_run")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("first_run.json"), metavar="FILE")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    parser.add_argument("--commit", default=commit(), help="if there is no git here")
    given = parser.parse_args(words)
    if strange := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(strange))}; there are {', '.join(PARTS)}")
    end_s = time.monotonic() + given.budget
    gpu, driver = gpu_and_driver()
    report: dict[str, Any] = {
        "bench": "gpu",
        "machine": machine(),
        "gpu": gpu,
        "driver": driver,
        "commit": given.commit,
        "command": "make bench-gpu",
        "date": time.strftime("%Y-%m-%d"),
        "parts": [],
    }
    print(f"{gpu}, driver {driver}, {machine()}, commit {given.commit}, {report['date']}")
    log_file = given.out.with_suffix(".log")
    log_file.write_text("")
    # Next to the results: if this process is killed, it has the rows of the part that ran.
    folder = given.out.with_suffix(".part")
    folder.mkdir(exist_ok=True)
    for name in given.parts or PARTS:
        limit_s = min(PARTS[name][0], end_s - time.monotonic())
        if limit_s >= LEAST_S:
            part = run_part(name, limit_s, command, folder)
        else:
            verdict = "not begun: no time left"
            part = {"part": name, "verdict": verdict, "seconds": 0, "rows": [], "output": []}
        report["parts"].append(part)
        compare_with_link(report["parts"])
        report["goals"] = goals(report["parts"])
        print_part(part)
        with log_file.open("a") as log:
            print(f"== {name}: {part['verdict']}", *part["output"], "", sep="\n", file=log)
        part["output"] = part["output"][-MOST_LINES:] if part["verdict"] != "ok" else []
        write(given.out, report)
        for file in folder.iterdir():
            file.unlink()
    folder.rmdir()
    print_summary(report)
    return int(any(part["verdict"] != "ok" for part in report["parts"]))


def gpu_and_driver() -> tuple[str, str]:
    """Ask nvidia-smi for the first GPU's name and its driver's version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.check_output(query, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})", "unknown"
    name, _, driver = answer.strip().rpartition(", ")
    return name, driver


def missing() -> str:
    """Return what a run needs and this machine lacks; empty if nothing."""
    try:
        import msgspec  # noqa: F401
        import torch
    except ImportError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return "" if (major, minor) >= (2, 6) else f"torch {torch.__version__} is older than 2.6"


def write(path: Path, report: dict[str, Any]) -> None:
    """Replace the file whole: an interruption leaves the results of the part before."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


if __name__ == "__main__":
    if why := missing():
        print(f"not run: {why}")
        sys.exit(2)
    # Stopped from outside, it still ends the part that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    sys.exit(main())
