"""Stores of a step as one transfer: every chunk keeps its blocks and its slot, and its answer."""

import random

import numpy as np
import pytest

from kvoffload.connectors.vllm.kv_caches import BatchedStore, StoreBatch
from kvoffload.messages import TransferResult
from kvoffload.transfer.layout import Moves


def store(rng, job_id, counts, per_chunk, numbers):
    """Make a store of so many chunks of each group; return it and its chunks in order."""
    blocks, rows, chunks = [], [], []
    for group, count in enumerate(counts):
        for _ in range(count):
            taken = [next(numbers) for _ in range(per_chunk)]
            chunks.append((group, tuple(taken), slot := rng.randrange(1 << 20)))
            rows.append((slot, group, 0, len(blocks), per_chunk))
            blocks += taken
    whole = [True] * len(chunks)
    for _ in range(rng.randrange(3)):  # parts of chunks, which the transfer leaves out
        whole.insert(rng.randrange(len(whole) + 1), False)
    moves = Moves(np.array(rows, np.int64).reshape(-1, 5).T, np.array(blocks, np.int32))
    return BatchedStore(job_id, moves, whole), chunks


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_every_chunk_keeps_blocks_slot_and_answer(per_chunk, num_groups):
    rng, numbers = random.Random(num_groups), iter(range(1, 1 << 20))
    for _ in range(50):
        made = [
            store(rng, 7 + i, [rng.randrange(3) for _ in range(num_groups)], per_chunk, numbers)
            for i in range(rng.randrange(1, 6))
        ]
        made = [one for one in made if one[1]]
        if not made:
            continue
        batch = StoreBatch([one for one, _ in made])
        gpu, host = batch.spec
        slots = host.host_slots.tolist()
        assert [move.host_slot for move in gpu] == slots
        moved = [(each.group_idx, tuple(each.block_ids.tolist()), each.host_slot) for each in gpu]
        assert sorted(moved) == sorted(chunk for _, chunks in made for chunk in chunks)
        good = [rng.random() < 0.5 for _ in moved]
        result = TransferResult(batch.job_id, tuple(good), True, 64 * len(moved), 0.5, "copy_error")
        answers = dict(zip(moved, good, strict=True))
        for part, (one, chunks) in zip(batch.results(result), made, strict=True):
            assert part.job_id == one.job_id
            of_whole = iter(chunks)
            assert part.ok == tuple(fine and answers[next(of_whole)] for fine in one.whole)
            assert part.transfer_bytes == 64 * len(chunks)
            assert (part.settled, part.reason) == (True, "copy_error")
