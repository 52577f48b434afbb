"""Slab ↔ KV cache tensors (on a CPU here), against one memcpy of the same bytes in the same run.

``kvoffload bench copy``. There are two cache shapes: pages of 64 KiB, as large models have per
layer, and of 4 KiB. Blocks lie scattered, as after hours of serving, or in one run, as at first.
For scattered blocks there is also a Python loop with a memmove for each page.
"""

import ctypes
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, best_of, caches_of, report, row, timed
from kvoffload.messages import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import ChunkLayout, Moves
from kvoffload.transfer.slab import Slab

TOTAL_BYTES = 256 << 20
TENSOR_BYTES = 64 << 20
BLOCKS_PER_CHUNK = 4
NUM_TENSORS = 64
NUM_SUBMITTED = (1, 16, 128, 512, 2048)
ROUNDS = 15


def run(total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure every shape in both directions."""
    rows = [
        measured
        for page_bytes, num_tensors in ((64 << 10, NUM_TENSORS), (4 << 10, NUM_TENSORS))
        for scattered in (False, True)
        for measured in _case(total_bytes, page_bytes, num_tensors, scattered)
    ]
    return report("copy", rows + _submissions())


def _submissions() -> list[Row]:
    """Measure the cost of a submission on the engine's thread, against 50 µs and 1 µs a block."""
    num_blocks = max(NUM_SUBMITTED)
    caches = caches_of(
        [torch.zeros((num_blocks, 64), dtype=torch.int8) for _ in range(NUM_TENSORS)]
    )
    layout = ChunkLayout(caches, 1)
    slab = Slab(num_blocks, layout.slot_bytes)
    copier = CpuCopier(caches, slab, layout)
    engine = TransferEngine(None, slab, layout, copier)
    rows = []
    order = np.random.default_rng(0).permutation(num_blocks)
    try:
        for count in NUM_SUBMITTED:
            spec = (GPULoadStoreSpec(order[:count]), CPULoadStoreSpec(range(count)))
            took_s = []
            for _ in range(100):
                took_s.append(timed(partial(engine.transfer_async, 0, spec)))
                engine.wait([0])
                engine.get_finished()
            # The median: in the best case the copier's thread has not even woken up.
            value_us = sorted(took_s)[len(took_s) // 2] * 1e6
            rows.append(row(f"submit {count} blocks", value_us, "µs", 50 + count, "aim"))
    finally:
        copier.close()
    return rows


def _case(total_bytes: int, page_bytes: int, num_tensors: int, scattered: bool) -> list[Row]:
    num_blocks = total_bytes // page_bytes // num_tensors
    # As large as an engine's, which the allocator maps each by itself.
    rows_a_tensor = max(2 * num_blocks, TENSOR_BYTES // page_bytes)
    tensors = [
        torch.empty((rows_a_tensor, page_bytes), dtype=torch.int8) for _ in range(num_tensors)
    ]
    for tensor in tensors:
        tensor[: 2 * num_blocks] = 1  # touched, so that no page fault is measured
    caches = caches_of(tensors)
    layout = ChunkLayout(caches, BLOCKS_PER_CHUNK)
    num_chunks = num_blocks // BLOCKS_PER_CHUNK
    slab = Slab(num_chunks, layout.slot_bytes)
    slab.rows[:] = 2
    order = np.random.default_rng(0).permutation(2 * num_blocks)
    ids = order[:num_blocks] if scattered else np.arange(num_blocks)
    moves = layout.moves(GPULoadStoreSpec(ids), list(range(num_chunks)))
    copier = CpuCopier(caches, slab, layout)
    plain = np.ones(total_bytes, np.int8)

    def memcpy() -> None:
        np.copyto(slab.rows.reshape(-1), plain)

    def copy(to_host: bool) -> None:
        copier.launch(moves, to_host, copier.record_fence()).wait()

    sides = {"store": lambda: copy(True), "load": lambda: copy(False)}
    if scattered:
        places = _places(layout, moves, tensors, slab)

        def page_by_page() -> None:
            for target, source in places:
                ctypes.memmove(target, source, page_bytes)

        sides["store, a memmove a page"] = page_by_page
    try:
        limit_s, *took_s = best_of(memcpy, *sides.values(), rounds=ROUNDS)
    finally:
        copier.close()
    shape = f"{page_bytes >> 10} KiB pages, {'scattered' if scattered else 'consecutive'} blocks"
    gigabytes = total_bytes / 1e9
    return [
        row(f"{what}, {shape}", gigabytes / side_s, "GB/s", gigabytes / limit_s, "memcpy")
        for what, side_s in zip(sides, took_s, strict=True)
    ]


def _places(
    layout: ChunkLayout, moves: Moves, tensors: list[torch.Tensor], slab: Slab
) -> list[tuple[int, int]]:
    """Address of each page in the slab and in its tensor, in the slab's order."""
    return [
        (
            slab.address + move.host_slot * slab.slot_bytes + region.offset + i * region.page_bytes,
            tensors[region.tensor_idx].data_ptr() + block * region.page_bytes,
        )
        for move in moves
        for region in layout.regions[move.group_idx]
        for i, block in enumerate(move.block_ids.tolist(), start=move.first)
    ]
