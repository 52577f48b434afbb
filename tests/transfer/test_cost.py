"""The engine's thread runs as many steps of Python for thousands of chunks as for a few."""

import numpy as np
import pytest
import torch
from opcodes import count_opcodes

from benchmarks.harness import caches_of
from kvoffload.messages import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

PAGE = 64
GROUPS = 2


class Copied(CpuCopier):
    """A copier whose copies have ended at once: no thread's steps are counted."""

    def launch(self, moves, to_host, after, lent=None):
        fence = CopyFence()
        fence.reach()
        return fence


def parts(chunks, per_chunk):
    """An engine over a cache of two groups, and both ends of a transfer of that many chunks."""
    num_blocks = 2 * chunks * per_chunk
    tensors = [torch.zeros((num_blocks, PAGE), dtype=torch.int8) for _ in range(GROUPS)]
    caches = caches_of(*([tensor] for tensor in tensors))
    layout = ChunkLayout(caches, per_chunk)
    slab = Slab(chunks, layout.slot_bytes)
    copier = Copied(caches, slab, layout)
    engine = TransferEngine(None, slab, layout, copier)
    half = chunks // GROUPS * per_chunk
    blocks = np.random.default_rng(0).permutation(num_blocks)[: GROUPS * half]
    gpu = GPULoadStoreSpec(blocks, [half] * GROUPS)
    return engine, copier, gpu, CPULoadStoreSpec(range(chunks))


def steps(chunks, per_chunk, to_host):
    engine, copier, gpu, host = parts(chunks, per_chunk)
    ends = (gpu, host) if to_host else (host, gpu)
    results = []

    def submit_and_poll():
        engine.submit(1, ends, chunks)
        results.extend(engine.get_finished())

    try:
        count = count_opcodes(submit_and_poll)
    finally:
        copier.close()
    (result,) = results
    assert result.success
    assert len(result.ok) == chunks
    return count


@pytest.mark.parametrize("per_chunk", [1, 16])
@pytest.mark.parametrize("to_host", [True, False])
def test_submit_and_poll_take_the_same_steps_for_8_and_for_8000_chunks(per_chunk, to_host):
    few = steps(8, per_chunk, to_host)  # numpy's own functions differ by some steps
    assert steps(8000, per_chunk, to_host) <= few + 100
