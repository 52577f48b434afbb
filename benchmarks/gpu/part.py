"""Runs one part of the first run in this process: ``python -m benchmarks.gpu.part NAME ROWS S``.

Each row is printed and added to the file ROWS when it is measured. Shortly before S seconds have
passed, the stacks of all threads are printed: the process is about to be killed.
"""

import faulthandler
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness import Row, row

COMMAND = (sys.executable, "-u", "-m", "benchmarks.gpu.part")
PYTEST = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-v"]
RESULT = re.compile(r"tests/\S+::(.+) (PASSED|FAILED|ERROR|SKIPPED)")


def run_tests(selection: str, under: tuple[str, ...] = ()) -> Iterator[Row]:
    """Run those of ``tests/gpu`` whose names match; a row for each, with its seconds.

    Raises:
        RuntimeError: not all passed, or there are none.
    """
    command = [*under, *PYTEST, "-p", "no:cacheprovider", "tests/gpu", "-k", selection]
    pytest = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    begun_s = time.monotonic()
    for line in pytest.stdout or ():
        print(line, end="")
        if found := RESULT.match(line):
            now_s = time.monotonic()
            yield row(found[1], now_s - begun_s, "s") | {"outcome": found[2].lower()}
            begun_s = now_s
    if status := pytest.wait():
        raise RuntimeError(f"pytest ended with {status}")


def sanitize() -> Iterator[Row]:
    """Round trips under compute-sanitizer, which sees accesses out of bounds."""
    if path := shutil.which("compute-sanitizer"):
        yield from run_tests("round_trip and 13", under=(path, "--error-exitcode", "9"))
    else:
        yield row("compute-sanitizer", "not installed", "")


TESTS: dict[str, Callable[[], Iterator[Row]]] = {
    "round_trips": partial(run_tests, "round_trip"),
    "growth": partial(run_tests, "grow"),
    "suite": partial(run_tests, "not (round_trip or grow or whatever_the_order)"),
    "orders": partial(run_tests, "whatever_the_order"),
    "sanitizer": sanitize,
}
PARTS = {
    "environment": (60, "checks"),
    "smoke": (90, "checks"),
    "link": (60, "measures"),
    "sweep": (90, "measures"),
    "rates": (120, "measures"),
    "memory": (90, "memory"),
    "ways": (90, "ways"),
    "plans": (90, "ways"),
    "steps": (120, "steps"),
    "behind": (60, "waits"),
    "latency": (60, "waits"),
    "submit": (60, "measures"),
    "connector": (90, "connector"),
    "captures": (60, "checks"),
    "expandable": (90, "checks"),
    "round_trips": (120, ""),
    "growth": (150, ""),
    "sanitizer": (120, ""),
    "suite": (150, ""),
    "orders": (120, ""),
}
"""The most seconds of each, and the module with a function of its name; what says most first."""

ENVIRONMENTS = {"expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
"""What torch reads when it is imported."""


def show(one: Row) -> str:
    """A row as a line of a table."""
    value = one["value"]
    text = f"{value:12.3f}" if isinstance(value, float) else f"{value!s:>12}"
    against = f"  {one['ratio']:6.3f} of {one['limit_name']}" if one["ratio"] is not None else ""
    return f"{one['case']:<58} {text} {one['unit']:<7}{one.get('outcome', '')}{against}".rstrip()


def main(name: str, rows_file: str, limit_s: str) -> int:
    """Run a part; returns the exit status."""
    faulthandler.dump_traceback_later(0.9 * float(limit_s))
    os.environ.update(ENVIRONMENTS.get(name, {}))
    status = 0
    try:
        module = f"benchmarks.gpu.{PARTS[name][1]}"
        part = TESTS.get(name) or getattr(importlib.import_module(module), name)
        with open(rows_file, "a", buffering=1) as out:
            for one in part():
                out.write(json.dumps(one) + "\n")
                print(show(one), flush=True)
    except BaseException:
        traceback.print_exc()
        status = 1
    return status


if __name__ == "__main__":
    ended = main(*sys.argv[1:])
    sys.stdout.flush()
    if ended:
        os._exit(ended)  # Threads that a failure left behind could keep the process alive.
