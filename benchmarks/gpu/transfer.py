"""GPU ↔ host memory, each row beside the limit measured in the same run: ``make bench-gpu``.

Prints one table, and writes it with machine, driver and date to the file named as argument.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.need import reason
from benchmarks.harness import Row, machine, row
from kvoffload.core.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.transfers import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.transfer.cuda_device import CudaDevice
from kvoffload.transfer.handlers import CopyHandler
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from kvoffload.transfer.stream_copier import StreamCopier

SHAPES = {"Llama-3-8B-like": (64, 64 << 10), "MLA-like": (61, 18 << 10)}
"""Tensors, and bytes of their pages."""
CHUNKS = (1, 8, 64, 512)
BLOCKS_OVER = 2
"""The cache has so many times the blocks that are moved: they lie scattered."""
ROUNDS = 7


class Bench:
    """One cache shape with slab, copier and what it is compared with."""

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
        """Make a copier whose slab is pinned when it is returned."""
        ways = {key: how.pop(key) for key in ("triton", "batches") if key in how}
        copier = StreamCopier(
            self.caches, self.slab, self.layout, CudaDevice(self.caches, self.slab, **ways), **how
        )
        while copier.stats()["pinned_bytes"] != self.slab.num_bytes:
            time.sleep(0.01)
        return copier

    def moves(self, count: int, to_host: bool) -> list[Any]:
        """Chunks of scattered blocks; stores and loads have different blocks and slots."""
        blocks = self.order[:count] if to_host else self.order[-count:]
        first = 0 if to_host else max(CHUNKS)
        return self.layout.moves(GPULoadStoreSpec(blocks), list(range(first, first + count)))

    def large(self, count: int, to_host: bool) -> Callable[[], None]:
        """One pinned copy of as many bytes: the limit."""
        length = count * self.chunk_bytes
        half = max(CHUNKS) * self.layout.slot_bytes
        host = torch.from_numpy(self.slab.flat)[0 if to_host else half :][:length]
        device, stream = self.plain[:length], self.streams[to_host]

        def copy() -> None:
            with torch.cuda.stream(stream):
                if to_host:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)

        return copy


def seconds(*begin: Callable[[], Any]) -> float:
    """Best of some rounds, from the first submission to the end of all."""
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for fence in [start() for start in begin]:
            if fence is not None and not (fence.wait(60) and fence.error is None):
                raise RuntimeError(f"a copy failed: {fence.error}")
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def launcher(copier: StreamCopier, moves: list[Any], to_host: bool) -> Callable[[], Any]:
    """Begin a transfer each time it is called."""
    return lambda: copier.launch(moves, to_host, copier.record_fence())


def speeds(bench: Bench) -> list[Row]:
    """Each direction, and both at once, beside one large copy."""
    rows, copier = [], bench.copier()
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
                rows.append(row(case, moved / took, "GB/s", moved / limit, "one large copy"))
    finally:
        copier.close()
    return rows


def against_pages(bench: Bench) -> list[Row]:
    """Every way beside a batched copy of page by page, 64 chunks."""
    rows = []
    timed: dict[str, float] = {}
    ways = {
        "page by page, batched": {"direct_page_bytes": 1},
        "page by page, one by one": {"direct_page_bytes": 1, "batches": False},
        "staged by Triton": {},
        "staged by index_select": {"triton": False},
        "staged by Triton, copied one by one": {"batches": False},
    }
    gigabytes = 64 * bench.chunk_bytes / 1e9
    for to_host in (True, False):
        for way, how in ways.items():
            copier = bench.copier(**how)
            try:
                timed[way] = seconds(launcher(copier, bench.moves(64, to_host), to_host))
            finally:
                copier.close()
        limit = gigabytes / timed["page by page, batched"]
        what = "store" if to_host else "load"
        rows += [
            row(f"{bench.name}, {what}, {way}", gigabytes / took, "GB/s", limit, "batched pages")
            for way, took in timed.items()
        ]
    return rows


def beside_compute(bench: Bench) -> list[Row]:
    """A stream of matrix products, alone and beside transfers in both directions."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    copier = bench.copier()
    begin = [launcher(copier, bench.moves(512, to), to) for to in (True, False)]

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
                fence.wait(60)
    finally:
        copier.close()
    case = f"{bench.name}, 8192³ bf16 product beside transfers"
    return [row(case, min(beside), "ms", alone, "alone")]


def submits(bench: Bench) -> list[Row]:
    """What a submission through the handler costs the engine's thread."""
    rows, copier = [], bench.copier()
    try:
        for count in CHUNKS:
            spec = (
                GPULoadStoreSpec(bench.order[:count]),
                CPULoadStoreSpec(np.arange(count, dtype=np.int32)),
            )
            handler, best = CopyHandler(copier, bench.layout, to_host=True), float("inf")
            for job_id in range(30):
                started = time.perf_counter()
                handler.transfer_async(job_id, spec)
                best = min(best, time.perf_counter() - started)
                handler.wait([job_id])
                handler.get_finished()
            allowed = 50 + count
            case = f"{bench.name}, submit {count} blocks"
            rows.append(row(case, best * 1e6, "µs", allowed, "50 µs and 1 µs a block"))
    finally:
        copier.close()
    return rows


def driver() -> str:
    """The driver's version, as nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def main() -> None:
    """Measure everything and print it."""
    if missing := reason():
        print(f"skipped: {missing}")
        return
    rows: list[Row] = []
    for name, (num_tensors, page_bytes) in SHAPES.items():
        bench = Bench(name, num_tensors, page_bytes)
        for part in (speeds, against_pages, beside_compute, submits):
            rows += part(bench)
        del bench
        torch.cuda.empty_cache()
    report = {
        "bench": "gpu",
        "machine": f"{machine()}, {torch.cuda.get_device_name()}, driver {driver()}, "
        f"torch {torch.__version__}",
        "command": "make bench-gpu",
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    print(f"{report['machine']}, {report['date']}")
    for one in rows:
        print(
            f"{one['case']:<58} {one['value']:9.2f} {one['unit']:<5}"
            f" {one['limit']:9.2f} {one['limit_name']:<24} {one['ratio']:6.2f}"
        )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
