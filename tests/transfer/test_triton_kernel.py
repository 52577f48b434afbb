"""The Triton kernel, interpreted on the CPU, moves what torch's index operations move."""

import os
import subprocess
import sys

import pytest

CHILD = """
import numpy as np, torch
from benchmarks.harness import caches_of
from kvoffload.transfer.cuda.triton_kernel import TritonKernels
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part
from kvoffload.transfer.layout import ChunkLayout
from tests.support.index_kernels import IndexKernels

for pages, padding, per_chunk in [((24, 64), 0, 2), ((7, 300), 3, 3), ((40000, 12), 8, 1)]:
    raw = [torch.randint(-128, 127, (20, page + padding), dtype=torch.int8) for page in pages]
    caches = caches_of([rows[:, :page] for rows, page in zip(raw, pages)])
    regions = ChunkLayout(caches, per_chunk).regions[0]
    part = Part(regions, 0, per_chunk, sum(pages) * per_chunk)
    ids = np.random.default_rng(0).permutation(20)[: 5 * per_chunk].astype(np.int64)[1:]
    at = np.arange(5 * per_chunk)[1:]
    host = np.zeros(300, np.int64)
    table, stages = BlockTable(host, torch.from_numpy(host)), []
    table.fill((ids, at // per_chunk, at % per_chunk))
    for kernels in (TritonKernels(caches, [part]), IndexKernels(caches)):
        stage = torch.zeros(-(-part.num_bytes * 5 // 8) * 8, dtype=torch.int8)
        kernels.move(part, table, stage, True)
        stages.append(stage)
        before = [entry.tensor.clone() for entry in caches.tensors]
        for entry in caches.tensors:
            entry.tensor[ids] = 0
        kernels.move(part, table, stage, False)
        assert all(torch.equal(e.tensor, b) for e, b in zip(caches.tensors, before))
    assert stages[0].any() and torch.equal(*stages)
print("same")
"""


def test_interpreted_it_moves_the_same_bytes_as_index_operations():
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("Triton's interpreter does not work with this numpy; 2.3 will do")
    assert done.stdout == "same\n", done.stderr
