"""A load of 512 chunks from a disk into a KV cache (on a CPU here), against reading them alone.

``kvoffload bench load``. The limit is the disk backend reading and verifying the same chunks into
the same slots, in the same run. Two more rows: all chunks read and then all copied, and a load
through few slots in turns, as without a cache in host memory.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, best_of, caches_of, check_all, report, row
from kvoffload import open_backend
from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerThread
from kvoffload.io.protocol import VERSION, Open, TierSettings
from kvoffload.messages import CPULoadStoreSpec, Fetch, GPULoadStoreSpec, OffloadKey
from kvoffload.testing.backends import keys_of
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

COUNT = 512
NUM_TENSORS = 64
FEW_SLOTS = 64
READ = "read and verified alone"
TIMEOUT_S = 60.0


def run(folder: str | None = None, count: int = COUNT) -> dict[str, Any]:
    """Measure both sizes in a scratch folder below ``folder`` (default: TMPDIR)."""
    rows = [
        measured
        for page_bytes, label in ((16 << 10, "1 MiB"), (2 << 10, "128 KiB"))
        for measured in _case(folder, count, page_bytes, label)
    ]
    return report("load", rows)


def _case(folder: str | None, count: int, page_bytes: int, label: str) -> list[Row]:
    tensors = [torch.ones((count, page_bytes), dtype=torch.int8) for _ in range(NUM_TENSORS)]
    caches = caches_of(tensors)
    layout = ChunkLayout(caches, 1)
    slab = Slab(count, layout.slot_bytes)
    slab.rows[:] = 2
    scratch = tempfile.mkdtemp(prefix="kvoffload-bench-", dir=folder)
    copier, loop = CpuCopier(caches, slab, layout), asyncio.Runner()
    options = {"root": scratch, "capacity": "64GiB", "min_free": 0}
    disk = open_backend("disk", options, "bench")
    tier = TierSettings("disk", "disk", options, "")
    opening = Open(VERSION, [tier], "bench", {}, layout.slot_bytes, layout.slot_bytes, TIMEOUT_S)
    memory = slab.slot(0, slab.num_bytes)
    io = IOClient(lambda: ServerThread(memory), opening, TIMEOUT_S, TIMEOUT_S)
    keys = [OffloadKey(key) for key in keys_of(count)]
    views = [slab.slot(slot, layout.payload_bytes[0]) for slot in range(count)]
    target = GPULoadStoreSpec(np.random.default_rng(0).permutation(count))
    moves = layout.moves(target, list(range(count)))
    engine = TransferEngine(io, slab, layout, copier)

    def read() -> None:
        check_all(loop.run(disk.read(keys, views)))

    def one_after_the_other() -> None:
        read()
        copier.launch(moves, to_host=False, after=copier.record_fence()).wait()

    def load(slots: Sequence[int]) -> None:
        fetch = Fetch("disk", tuple(range(count)), tuple(keys))
        engine.transfer_async(0, (CPULoadStoreSpec(slots, [fetch]), target))
        engine.wait([0])
        check_all(engine.get_finished()[0].ok)

    try:
        check_all(loop.run(disk.write(keys, views)))
        few = [slot % FEW_SLOTS for slot in range(count)]
        limit, *times = best_of(
            read, one_after_the_other, lambda: load(range(count)), lambda: load(few), rounds=5
        )
        ways = ("read, then copied", "loaded", f"loaded through {FEW_SLOTS} slots")
        return [
            row(f"{count} chunks of {label}, {way}", seconds * 1e3, "ms", limit * 1e3, READ)
            for way, seconds in zip(ways, times, strict=True)
        ]
    finally:
        loop.run(disk.close())
        loop.close()
        io.close()
        copier.close()
        shutil.rmtree(scratch)
