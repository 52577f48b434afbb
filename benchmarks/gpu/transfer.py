"""GPU ↔ host memory, each row against the limit measured in the same run: ``make bench-gpu``.

Prints each row when it is measured. Writes all rows, with machine, driver and date, to the file
named as argument. When a part fails, the rest of the parts run, and the exit status is 1.
"""

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.need import reason
from benchmarks.harness import Row, machine, row
from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.pinning import PORTION_BYTES
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.io_loop import IOLoop
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

SHAPES = {"Llama-3-8B-like": (64, 64 << 10), "MLA-like": (61, 18 << 10)}
"""Tensors, and bytes of their pages."""
CHUNKS = (1, 8, 64, 512)
SOME_CHUNKS = 64
"""For the comparison of ways."""
BLOCKS_OVER = 2
"""The cache has so many times the blocks that are moved: they lie scattered."""
ROUNDS = 7
PRODUCT = 8192
"""Rows and columns of the matrices that are multiplied during transfers."""
WAIT_S = 60.0
"""For pinning, and for a transfer, before it counts as failed."""


class Bench:
    """One cache shape with slab, copier and limits."""

    def __init__(self, name: str, num_tensors: int, page_bytes: int) -> None:
        self.name, self.page_bytes = name, page_bytes
        most = max(CHUNKS)
        self.caches = CanonicalKVCaches(
            tuple(
                CanonicalKVCacheTensor(
                    torch.randint(
                        -128, 127, (BLOCKS_OVER * most, page_bytes), dtype=torch.int8, device="cuda"
                    ),
                    page_bytes,
                )
                for _ in range(num_tensors)
            ),
            (tuple(CanonicalKVCacheRef(i, page_bytes) for i in range(num_tensors)),),
        )
        self.layout = ChunkLayout(self.caches, 1)
        self.chunk_bytes = num_tensors * page_bytes
        # One half of the slots for stores, the other for loads: both directions at once.
        self.slab = Slab(2 * most, self.layout.slot_bytes)
        self.order = np.random.default_rng(0).permutation(BLOCKS_OVER * most)
        self.plain = torch.empty(most * self.chunk_bytes, dtype=torch.int8, device="cuda")
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copier(self, **how: Any) -> StreamCopier:
        """Make a copier whose slab is pinned when it is returned.

        Raises:
            RuntimeError: the slab is not pinned; says how far pinning came, and why.
        """
        ways = {key: how.pop(key) for key in ("triton", "batches") if key in how}
        copier = StreamCopier(
            self.caches, self.slab, self.layout, CudaDevice(self.caches, self.slab, **ways), **how
        )
        end = time.monotonic() + WAIT_S
        while (stats := copier.stats())["pinned_bytes"] != self.slab.num_bytes:
            if "why_not_pinned" in stats or time.monotonic() > end:
                copier.close()
                raise RuntimeError(
                    f"the slab of {self.slab.num_bytes} bytes is not pinned: {stats}"
                )
            time.sleep(0.01)
        return copier

    def moves(self, count: int, to_host: bool) -> list[Any]:
        """Chunks of scattered blocks; stores and loads have different blocks and slots."""
        blocks = self.order[:count] if to_host else self.order[-count:]
        first = 0 if to_host else max(CHUNKS)
        return self.layout.moves(GPULoadStoreSpec(blocks), list(range(first, first + count)))

    def large(self, count: int, to_host: bool) -> Callable[[], None]:
        """Pinned copies of as many bytes, each as large as a registration allows: the limit."""
        length = count * self.chunk_bytes
        first = 0 if to_host else max(CHUNKS) * self.layout.slot_bytes
        slab, stream = torch.from_numpy(self.slab.flat), self.streams[to_host]
        pairs = [
            (slab[at : at + size], self.plain[at - first : at - first + size])
            for at, size in registered(first, length)
        ]

        def copy() -> None:
            with torch.cuda.stream(stream):
                for host, device in pairs:
                    if to_host:
                        host.copy_(device, non_blocking=True)
                    else:
                        device.copy_(host, non_blocking=True)

        return copy


def registered(
    at: int, num_bytes: int, portion_bytes: int = PORTION_BYTES
) -> Iterator[tuple[int, int]]:
    """Cut bytes of a slab where a registration ends, as (place, length) of each piece."""
    whole = Copies(*(np.array([number]) for number in (at, at, num_bytes)))
    _, places, sizes = whole.within_registrations(portion_bytes)
    return zip(places.tolist(), sizes.tolist(), strict=True)


def seconds(*begin: Callable[[], Any]) -> float:
    """Best of some rounds, from the first submission to the end of all."""
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for fence in [start() for start in begin]:
            if fence is not None:
                ended(fence)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def ended(fence: Any) -> None:
    """Wait for a transfer.

    Raises:
        RuntimeError: it failed, or did not end.
    """
    if not fence.wait(WAIT_S):
        raise RuntimeError(f"a copy did not end in {WAIT_S:.0f} s")
    if fence.error is not None:
        raise RuntimeError(f"a copy failed: {fence.error}") from fence.error


def launcher(copier: StreamCopier, moves: list[Any], to_host: bool) -> Callable[[], Any]:
    """Begin a transfer each time it is called."""
    return lambda: copier.launch(moves, to_host, copier.record_fence())


def speeds(bench: Bench) -> Iterator[Row]:
    """Each direction, and both at once, against large copies."""
    copier = bench.copier()
    print(f"{bench.name}: {copier.stats()}", file=sys.stderr)
    try:
        for count in CHUNKS:
            gigabytes = count * bench.chunk_bytes / 1e9
            ways = {
                to_host: launcher(copier, bench.moves(count, to_host), to_host)
                for to_host in (True, False)
            }
            larges = {to_host: bench.large(count, to_host) for to_host in (True, False)}
            for what, which in (("store", (True,)), ("load", (False,)), ("both", (True, False))):
                limit = seconds(*(larges[to_host] for to_host in which))
                took = seconds(*(ways[to_host] for to_host in which))
                moved = gigabytes * len(which)
                case = f"{bench.name}, {what} {count} chunks"
                yield row(case, moved / took, "GB/s", moved / limit, "large copies")
    finally:
        copier.close()


def against_pages(bench: Bench) -> Iterator[Row]:
    """Every way against a batched copy of single pages."""
    timed: dict[str, float] = {}
    ways = {
        "page by page, batched": {"direct_page_bytes": 1},
        "page by page, one by one": {"direct_page_bytes": 1, "batches": False},
        "staged": {"direct_page_bytes": 1 << 30},
        "staged, copied one by one": {"direct_page_bytes": 1 << 30, "batches": False},
    }
    gigabytes = SOME_CHUNKS * bench.chunk_bytes / 1e9
    for to_host in (True, False):
        for way, how in ways.items():
            copier = bench.copier(**how)
            try:
                timed[way] = seconds(launcher(copier, bench.moves(SOME_CHUNKS, to_host), to_host))
            finally:
                copier.close()
            case = f"{bench.name}, {'store' if to_host else 'load'}, {way}"
            limit = gigabytes / timed["page by page, batched"]
            yield row(case, gigabytes / timed[way], "GB/s", limit, "batched pages")


def beside_compute(bench: Bench) -> Iterator[Row]:
    """A stream of matrix products, alone and during transfers in both directions."""
    shape = (PRODUCT, PRODUCT)
    a, b = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    copier = bench.copier()
    begin = [launcher(copier, bench.moves(max(CHUNKS), to), to) for to in (True, False)]

    def products(count: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            torch.mm(a, b, out=out)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / count

    try:
        products(20)
        alone = min(products(100) for _ in range(3))
        beside = []
        for _ in range(3):
            # The fences are recorded first, so that transfers and products run side by side.
            fences = [start() for _ in range(8) for start in begin]
            beside.append(products(100))
            still_running = not all(fence.done() for fence in fences)
            if not still_running:
                print("transfers ended before the products did", file=sys.stderr)
            for fence in fences:
                ended(fence)
        case = f"{bench.name}, {PRODUCT}³ bf16 product beside transfers"
        yield row(case, min(beside), "ms", alone, "alone")
    finally:
        copier.close()


def answered(engine: TransferEngine) -> None:
    """Wait until the engine's only job is answered.

    Raises:
        RuntimeError: it failed, or was not answered.
    """
    end = time.monotonic() + WAIT_S
    while not (results := engine.get_finished()):
        if time.monotonic() > end:
            raise RuntimeError(f"a job was not answered in {WAIT_S:.0f} s")
        time.sleep(1e-5)
    if not results[0].success:
        raise RuntimeError(f"a job failed: {results[0]}")


def submits(bench: Bench) -> Iterator[Row]:
    """The cost of a submission on the thread of the LLM engine."""
    io, copier = IOLoop(), bench.copier()
    engine = TransferEngine(io, {}, bench.slab, bench.layout, copier, WAIT_S, WAIT_S)
    try:
        for count in CHUNKS:
            spec = (
                GPULoadStoreSpec(bench.order[:count]),
                CPULoadStoreSpec(np.arange(count, dtype=np.int32)),
            )
            best = float("inf")
            for job_id in range(30):
                started = time.perf_counter()
                engine.transfer_async(job_id, spec)
                best = min(best, time.perf_counter() - started)
                answered(engine)
            allowed = 50 + count
            case = f"{bench.name}, submit {count} blocks"
            yield row(case, best * 1e6, "µs", allowed, "50 µs and 1 µs a block")
    finally:
        io.close()
        copier.close()


def driver() -> str:
    """The driver's version according to nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


PARTS = (speeds, against_pages, beside_compute, submits)


def measure(rows: list[Row]) -> list[str]:
    """Run all parts, print each row and add it to ``rows``; return the parts that failed."""
    failed = []
    for name, (num_tensors, page_bytes) in SHAPES.items():
        bench = Bench(name, num_tensors, page_bytes)
        for part in PARTS:
            try:
                for one in part(bench):
                    rows.append(one)
                    print(
                        f"{one['case']:<58} {one['value']:9.2f} {one['unit']:<5}"
                        f" {one['limit']:9.2f} {one['limit_name']:<24} {one['ratio']:6.2f}",
                        flush=True,
                    )
            except Exception:
                traceback.print_exc()
                failed.append(f"{name}, {part.__name__}")
        del bench
        torch.cuda.empty_cache()
    return failed


def main() -> int:
    """Measure everything; return the exit status."""
    if missing := reason():
        print(f"skipped: {missing}")
        return 0
    title = f"{machine()}, {torch.cuda.get_device_name()}, driver {driver()}"
    report: dict[str, Any] = {
        "bench": "gpu",
        "machine": f"{title}, torch {torch.__version__}",
        "command": "make bench-gpu",
        "date": time.strftime("%Y-%m-%d"),
        "failed": ["interrupted"],
        "rows": [],
    }
    print(f"{report['machine']}, {report['date']}", flush=True)
    try:
        report["failed"] = measure(report["rows"])
    finally:
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    for part in report["failed"]:
        print(f"FAILED: {part}; the traceback is above")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
