"""An engine's step while the connector loads from disk at full speed.

``kvoffload bench engine_step``. A step is 300 small torch calls, as a decode step issues them. Each
torch call releases and retakes the GIL, so Python code on other threads of the process delays it.
The limit of a row is the same step while *another* process does the same loads through the same
connector: it has the same load on memory and processor, and a GIL of its own.

In further rows the I/O process has nice 0 and its own nice by turns, and the limit is the step
alone. They show what the slowest steps waited for. Only root may lower a nice.
"""

import hashlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Row, caches_of, quantile, report, row, timed
from kvoffload.connectors.local import LocalConnector
from kvoffload.io.process import NICE

BLOCK = 16
CHUNKS = 64
"""Blocks of one request."""
PROMPTS = 6
"""Distinct prompts; host memory holds two of them, so that each load comes from disk."""
CONCURRENT = 2
PAUSE_S = 0.004
"""Between two steps the GPU works, and the engine's thread sleeps."""
MEASURE_S = 6.0
TURNS = 4
SLOWEST = 0.02
FORMS = ("thread", "process")
PARTS = ("p50", "p99")


class Case(NamedTuple):
    """What is loaded."""

    label: str
    page_bytes: int
    """Of a block."""
    per_chunk: int | str = 1
    """Blocks of a chunk."""


CASES = (
    Case("1 MiB", 1 << 20),
    Case("128 KiB", 128 << 10),
    Case("2 MiB in blocks of 128 KiB, the default", 128 << 10, "auto"),
)


class Step(NamedTuple):
    """One step, in seconds."""

    took_s: float
    ran_s: float
    """Processor time of the engine's thread."""
    queued_s: float
    """Time in which the thread was runnable and had no core."""


@dataclass
class Prompt:
    """One use of a prompt: all its chunks were stored before."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int = CHUNKS * BLOCK + 3
    kv_transfer_params: dict[str, Any] | None = None


class Loads:
    """A connector that always loads ``CONCURRENT`` prompts, from disk unless memory holds all."""

    def __init__(
        self,
        root: str,
        case: Case,
        form: str,
        device: str = "cpu",
        prompts_in_memory: int = CONCURRENT,
    ) -> None:
        page_bytes = case.page_bytes
        raw = torch.zeros(CHUNKS * (CONCURRENT + 1), page_bytes, dtype=torch.int8, device=device)
        disk = {"type": "disk", "root": root, "capacity": "16GiB", "min_free": 0}
        cpu_bytes = page_bytes * CHUNKS * prompts_in_memory
        settings = {"cpu_bytes": cpu_bytes, "backends": [disk], "policy": "lru"}
        settings |= {"blocks_per_chunk": case.per_chunk}
        facts = {"model": "engine_step", "dtype": "int8"}
        self._connector = LocalConnector(
            {**settings, "io": form}, caches_of([raw]), block_size=BLOCK, facts=facts
        )
        self._page_bytes = page_bytes
        self._uses = 0
        # An engine has a request's hashes before the step that begins its load.
        self._hashes = [
            [hashlib.sha256(f"{number}.{i}".encode()).digest() for i in range(CHUNKS)]
            for number in range(PROMPTS)
        ]
        self._slots = list(range(CONCURRENT))
        self._loading: dict[str, tuple[Prompt, int]] = {}
        self._loaded_chunks = 0
        self._began_s = time.perf_counter()
        for number in range(PROMPTS):
            prompt = self._prompt(number)
            self._connector.after_forward(prompt, [list(range(CHUNKS))], CHUNKS * BLOCK)
            self._connector.flush()
            self._connector.request_finished(prompt)

    def _prompt(self, number: int) -> Prompt:
        self._uses += 1
        return Prompt(f"use {self._uses}", self._hashes[number])

    def _take_in(self) -> None:
        for outcome in self._connector.poll():
            prompt, slot = self._loading.pop(outcome.request_id)
            self._loaded_chunks += outcome.num_loaded_tokens // BLOCK
            self._connector.request_finished(prompt)
            self._slots.append(slot)

    def begin(self) -> None:
        """Count from now on."""
        self._loaded_chunks, self._began_s = 0, time.perf_counter()

    def step(self) -> None:
        """Take in ended loads and begin the next ones, as an engine does between two steps."""
        self._take_in()
        while self._slots:
            prompt = self._prompt(self._uses % PROMPTS)
            tokens = self._connector.get_num_new_matched_tokens(prompt, 0)
            if not tokens:
                self._connector.request_finished(prompt)
                return
            slot = self._slots.pop()
            self._loading[prompt.request_id] = prompt, slot
            blocks = list(range((slot + 1) * CHUNKS, (slot + 2) * CHUNKS))
            self._connector.update_state_after_alloc(prompt, [[*blocks, 0]], tokens)

    def rest(self) -> None:
        """Wait until the loads in flight have ended, and begin none."""
        while self._loading:
            self._take_in()
            time.sleep(0.001)

    def rate(self) -> float:
        """Bytes loaded a second since :meth:`begin`."""
        passed_s = time.perf_counter() - self._began_s
        return self._loaded_chunks * self._page_bytes / passed_s

    def close(self) -> None:
        """Close the connector."""
        self._connector.close()


def run(seconds: float = MEASURE_S, folder: str | None = None) -> dict[str, Any]:
    """Measure chunks of 1 MiB and of 128 KiB in a scratch folder below ``folder``."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=folder) as scratch:
            rows += _case(case, seconds, scratch)
    return report("engine_step", rows)


def _case(case: Case, seconds: float, scratch: str) -> list[Row]:
    alone = _parts(_steps(seconds / 3))
    rows = [
        row(f"step alone, {name}", value * 1e3, "ms")
        for name, value in zip(PARTS, alone, strict=True)
    ]
    for form in FORMS:
        other, other_rate = _beside_other_process(f"{scratch}/{form}-other", case, form, seconds)
        own, own_rate, calls_s = _beside_own(f"{scratch}/{form}-own", case, form, seconds)
        name = f"loads of {case.label}, io: {form}"
        limit = "loads in another process"
        for part, value, bound in zip(PARTS, own, other, strict=True):
            rows.append(row(f"step, {name}, {part}", value * 1e3, "ms", bound * 1e3, limit))
        rows.append(row(f"rate, {name}", own_rate / 1e9, "GB/s", other_rate / 1e9, limit))
        rows.append(row(f"connector's calls in a step, {name}, p50", calls_s * 1e3, "ms"))
    return rows + _by_nice(f"{scratch}/nice", case, seconds / TURNS)


def _by_nice(root: str, loaded: Case, seconds: float) -> list[Row]:
    """Let the step alone, and with an I/O process at two nice values, take turns."""
    loads = Loads(root, loaded, "process")
    nices = {"nice 0": 0, f"nice {NICE}": NICE}
    alone: list[Step] = []
    beside: dict[str, list[Step]] = {name: [] for name in nices}
    rates: dict[str, list[float]] = {name: [] for name in nices}
    try:
        for _ in range(TURNS):
            alone += _steps(seconds)
            for name, nice in nices.items():
                _renice(nice)
                loads.begin()
                beside[name] += _steps(seconds, loads.step)
                rates[name].append(loads.rate())
                loads.rest()
    except PermissionError as error:
        print(f"engine_step: no rows by nice, which only root may lower: {error}", file=sys.stderr)
        return []
    finally:
        loads.close()
    rows = []
    for name, steps in beside.items():
        case = f"loads of {loaded.label}, I/O process at {name}"
        for part, value, bound in zip(PARTS, _parts(steps), _parts(alone), strict=True):
            rows.append(row(f"step, {case}, {part}", value * 1e3, "ms", bound * 1e3, "step alone"))
        slowest = sorted(steps)[-max(1, int(len(steps) * SLOWEST)) :]
        took, ran, queued = (statistics.mean(each) * 1e3 for each in zip(*slowest, strict=True))
        for what, value in (
            ("took", took),
            ("ran", ran),
            ("waited for a core", queued),
            ("waited for the GIL", max(0.0, took - ran - queued)),
        ):
            rows.append(row(f"slowest {SLOWEST:.0%} of steps, {what}, {case}", value, "ms"))
        rows.append(row(f"rate, {case}", statistics.mean(rates[name]) / 1e9, "GB/s"))
    return rows


def _renice(nice: int) -> None:
    """Set the nice of all threads of the I/O process, which is a child of this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        if b"kvoffload.io.process" in Path(f"/proc/{child}/cmdline").read_bytes():
            for thread in os.listdir(f"/proc/{child}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def _beside_own(
    root: str, case: Case, form: str, seconds: float
) -> tuple[tuple[float, float], float, float]:
    """Return the step's times, the rate of loading, and the connector's median time in a step."""
    loads = Loads(root, case, form)
    calls: list[float] = []

    def step() -> None:
        calls.append(timed(loads.step))

    try:
        loads.begin()
        steps = _steps(seconds, step)
        return _parts(steps), loads.rate(), statistics.median(calls)
    finally:
        loads.close()


def _beside_other_process(
    root: str, case: Case, form: str, seconds: float
) -> tuple[tuple[float, float], float]:
    """Return the step's times here and the rate of loading there."""
    context = multiprocessing.get_context("spawn")
    stop, ready, rates = context.Event(), context.Event(), context.Queue()
    child = context.Process(target=_load_until, args=(root, case, form, stop, ready, rates))
    child.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the other process did not begin to load")
        steps = _steps(seconds)
        stop.set()
        return _parts(steps), rates.get(timeout=60)
    finally:
        stop.set()
        child.join(60)


def _load_until(root: str, case: Case, form: str, stop: Event, ready: Event, rates: Any) -> None:
    torch.set_num_threads(1)
    loads = Loads(root, case, form)
    ready.set()
    loads.begin()
    while not stop.is_set():
        loads.step()
        time.sleep(PAUSE_S)
    rates.put(loads.rate())
    loads.close()


def _steps(seconds: float, between: Callable[[], None] = lambda: None) -> list[Step]:
    """Run steps for a while."""
    first, second = torch.ones(2048), torch.ones(2048)
    steps = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        queued_s, ran_s, began_s = _queued_s(), time.thread_time(), time.perf_counter()
        for _ in range(300):
            first.add_(second)
        took_s = time.perf_counter() - began_s
        steps.append(Step(took_s, time.thread_time() - ran_s, _queued_s() - queued_s))
        between()
        time.sleep(PAUSE_S)
    return steps


def _queued_s() -> float:
    """Return how long this thread has waited for a core, as Linux counts it."""
    counts = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


def _parts(steps: list[Step]) -> tuple[float, float]:
    """Return :data:`PARTS` of the times that steps took, in seconds."""
    times = [step.took_s for step in steps]
    return statistics.median(times), quantile(times, 0.99)
