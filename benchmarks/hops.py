"""Functions and files of this package that one block passes, on all threads.

``python -m benchmarks.hops`` stores one block and loads it back from disk, through
:class:`LocalConnector` with a disk tier and copies on the CPU. It counts calls, distinct functions
and files of ``kvoffload`` by step, without comprehensions, housekeeping and operators' commands.
Another block goes before it each time, so that no first use is counted. The numbers are the same on
every machine, up to a few calls that depend on the timing of threads.

It counts twice. With ``io: "process"`` only the engine's process is counted: what an engine pays.
With ``io: "thread"`` both ends of the I/O server's socket are: the whole path.
"""

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import kvoffload
from benchmarks.harness import caches_of, report, row
from kvoffload.connectors.local import LoadOutcome, LocalConnector

BLOCK = 16
PACKAGE = str(Path(kvoffload.__file__).parent)
OTHERS = ("kvoffload-disk", "kvoffload-control")
"""Threads whose work belongs to no block: one cleans the disk's folder, one answers commands."""
GOALS = {
    "store to host memory and disk, engine's process": {"functions": 110},
    "load from disk, engine's process": {"functions": 120},
    "store to host memory and disk, whole path": {"functions": 205, "files": 38},
    "load from disk, whole path": {"functions": 205, "files": 38},
}
"""At most so many."""


@dataclass
class Request:
    """A request with one full block of these tokens."""

    request_id: str
    tokens: bytes = b"h"
    num_tokens: int = BLOCK + 1

    @property
    def block_hashes(self) -> list[bytes]:
        """The hash of the block."""
        return [self.tokens * 32]


class Hops:
    """Counts the package's calls while it is switched on; installed before threads start."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if not self.on or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if threading.current_thread().name in OTHERS:
            return
        if not code.co_name.endswith(("comp>", "genexpr>", "<module>")):
            self.calls[code] += 1

    def during(self, action: Callable[[], object]) -> dict[str, int]:
        """Run an action; return how many calls it made, of how many functions in how many files."""
        self.calls.clear()
        self.on = True
        action()
        self.on = False
        return {
            "calls": self.calls.total(),
            "functions": len(self.calls),
            "files": len({code.co_filename for code in self.calls}),
        }

    def listed(self) -> list[str]:
        """Name the functions of the last action, by file."""
        root = Path(PACKAGE)
        return sorted(
            f"{Path(code.co_filename).relative_to(root)}:{code.co_qualname}" for code in self.calls
        )

    def close(self) -> None:
        """Count no more."""
        threading.setprofile(None)
        sys.setprofile(None)


def _until(done: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 30
    while not done():
        if time.monotonic() > give_up_s:
            raise TimeoutError("the transfer did not end")
        time.sleep(0.02)


def _connector(root: str, form: str) -> LocalConnector:
    tensor = torch.zeros((8, 4096), dtype=torch.int8)
    disk = {"type": "disk", "root": root, "capacity": "1GiB", "min_free": 0}
    settings: dict[str, Any] = {"cpu_bytes": "1MiB", "policy": "lru", "backends": [disk]}
    settings |= {"io": form, "blocks_per_chunk": 1}
    facts = {"model": "m", "weights": "none", "dtype": "bytes"}
    return LocalConnector(settings, caches_of([tensor]), block_size=BLOCK, facts=facts)


def measured() -> dict[str, tuple[dict[str, int], list[str]]]:
    """Count each step: in the engine's process, and on the whole path."""
    counted = {}
    for form, what in (("process", "engine's process"), ("thread", "whole path")):
        with tempfile.TemporaryDirectory() as root:
            for step, counts in _measured(root, form).items():
                counted[f"{step}, {what}"] = counts
    return counted


def _measured(root: str, form: str) -> dict[str, tuple[dict[str, int], list[str]]]:
    hops = Hops()
    counted = {}

    def step(name: str, action: Callable[[], object]) -> None:
        counted[name] = hops.during(action), hops.listed()

    try:
        connector = _connector(root, form)
        time.sleep(0.3)  # the store of chunks reads its folder first

        def store(request: Request, block: int) -> None:
            connector.after_forward(request, [[block]], BLOCK)
            time.sleep(0.1)
            connector.poll()
            time.sleep(0.3)
            connector.poll()

        store(first := Request("first", b"f"), 1)
        step("store to host memory and disk", partial(store, second := Request("second"), 2))
        for request in (first, second):
            connector.request_finished(request)
        connector.close()
        connector = _connector(root, form)

        def look_up(request: Request) -> int | None:
            return connector.get_num_new_matched_tokens(request, 0)

        def load(request: Request, block: int) -> None:
            connector.update_state_after_alloc(request, [[block]], BLOCK)
            time.sleep(0.3)  # a poll that comes too early would be counted
            ended: list[LoadOutcome] = []

            def polled() -> list[LoadOutcome]:
                ended.extend(connector.poll())
                return ended

            _until(polled)
            if not ended[0].ok:
                raise RuntimeError("the load failed")

        for request in (first, second):
            _until(partial(look_up, request))
        load(first, 3)
        step("lookup", partial(look_up, second))
        step("load from disk", partial(load, second, 4))
        connector.close()
    finally:
        hops.close()
    return counted


def run() -> dict[str, Any]:
    """Count the hops of a store, a lookup and a load."""
    return report(
        "hops",
        [
            row(f"{step}: {what}", count, "", GOALS[step][what], "goal")
            if what in GOALS.get(step, ())
            else row(f"{step}: {what}", count, "")
            for step, (counts, _) in measured().items()
            for what, count in counts.items()
        ],
    )


if __name__ == "__main__":
    for name, (counts, functions) in measured().items():
        print(f"{name}: {counts}")
        if "--list" in sys.argv:
            print("  " + "\n  ".join(functions))
