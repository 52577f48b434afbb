"""An engine's step while the connector loads from disk at full speed.

``kvoffload bench engine_step``. A step is 300 small torch calls, as a decode step issues them. Each
torch call releases and retakes the GIL, so Python code on other threads of the process delays it.
The limit of a row is the same step while *another* process does the same loads through the same
connector: it has the same load on memory and processor, and a GIL of its own.
"""

import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Row, report, row
from kvoffload.connectors.local import LocalConnector
from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

BLOCK = 16
CHUNKS = 64
"""Blocks of one request."""
PROMPTS = 6
"""Distinct prompts; host memory holds two of them, so that each load comes from disk."""
CONCURRENT = 2
PAUSE_S = 0.004
"""Between two steps the GPU works, and the engine's thread sleeps."""
MEASURE_S = 6.0
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


@dataclass
class Prompt:
    """One use of a prompt: all its chunks were stored before."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int = CHUNKS * BLOCK + 3
    kv_transfer_params: dict[str, Any] | None = None


class Loads:
    """A connector that always loads ``CONCURRENT`` prompts from disk."""

    def __init__(self, root: str, case: Case, form: str) -> None:
        page_bytes = case.page_bytes
        raw = torch.zeros(CHUNKS * (CONCURRENT + 1), page_bytes, dtype=torch.int8)
        caches = CanonicalKVCaches(
            (CanonicalKVCacheTensor(raw, page_bytes),), ((CanonicalKVCacheRef(0, page_bytes),),)
        )
        disk = {"type": "disk", "root": root, "capacity": "16GiB", "min_free": 0, "io": "buffered"}
        settings = {"cpu_bytes": page_bytes * CHUNKS * 2, "backends": [disk], "policy": "lru"}
        settings |= {"blocks_per_chunk": case.per_chunk}
        facts = {"model": "engine_step", "dtype": "int8"}
        self._connector = LocalConnector(
            {**settings, "io": form}, caches, block_size=BLOCK, facts=facts
        )
        self._page_bytes = page_bytes
        self._uses = 0
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
        hashes = [hashlib.sha256(f"{number}.{i}".encode()).digest() for i in range(CHUNKS)]
        self._uses += 1
        return Prompt(f"use {self._uses}", hashes)

    def begin(self) -> None:
        """Count from now on."""
        self._loaded_chunks, self._began_s = 0, time.perf_counter()

    def step(self) -> None:
        """Take in ended loads and begin the next ones, as an engine does between two steps."""
        for outcome in self._connector.poll():
            prompt, slot = self._loading.pop(outcome.request_id)
            self._loaded_chunks += outcome.num_loaded_tokens // BLOCK
            self._connector.request_finished(prompt)
            self._slots.append(slot)
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
    alone = _steps(seconds / 3)
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
    return rows


def _beside_own(
    root: str, case: Case, form: str, seconds: float
) -> tuple[tuple[float, float], float, float]:
    """Return the step's times, the rate of loading, and the connector's median time in a step."""
    loads = Loads(root, case, form)
    calls: list[float] = []

    def step() -> None:
        began_s = time.perf_counter()
        loads.step()
        calls.append(time.perf_counter() - began_s)

    try:
        loads.begin()
        times = _steps(seconds, step)
        return times, loads.rate(), statistics.median(calls)
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
        times = _steps(seconds)
        stop.set()
        return times, rates.get(timeout=60)
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


def _steps(seconds: float, between: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Run steps for a while; return their :data:`PARTS` in seconds."""
    first, second = torch.ones(2048), torch.ones(2048)
    times = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        for _ in range(300):
            first.add_(second)
        times.append(time.perf_counter() - began_s)
        between()
        time.sleep(PAUSE_S)
    times.sort()
    return statistics.median(times), times[int(len(times) * 0.99)]
