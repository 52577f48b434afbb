"""All stores of a step as one transfer, and its result as one result for each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvoffload.messages import (
    BlockIds,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    TransferResult,
    TransferSpec,
)

PARTIAL_CHUNK = "partial_chunk"
"""Blocks of the chunk have left the sliding window; only whole chunks are stored."""


class Store(NamedTuple):
    """A store of the whole chunks of a job."""

    job_id: int
    blocks: GPULoadStoreSpec
    host_slots: BlockIds
    """One a whole chunk, in the order of the blocks."""
    whole: Sequence[bool]
    """For each chunk of the job, whether it is whole."""


class StoreBatch:
    """Stores that are carried out by one transfer, so that they cost one launch.

    Args:
        stores: at least one; the transfer has the job id of the first.
        blocks_per_chunk: blocks that make up a chunk.
    """

    def __init__(self, stores: Sequence[Store], blocks_per_chunk: int) -> None:
        self.job_id = stores[0].job_id
        self.job_ids = [store.job_id for store in stores]
        self._whole = [store.whole for store in stores]
        self._places: list[list[int]] = [[] for _ in stores]
        """For each store, the positions of its chunks in the transfer."""
        blocks: list[BlockIds] = []
        slots: list[BlockIds] = []
        sizes = []
        self.num_chunks = 0
        taken = [0] * len(stores)
        # A transfer lists group after group.
        for group in range(len(stores[0].blocks.group_sizes)):
            sizes.append(sum(store.blocks.group_sizes[group] for store in stores))
            for i, store in enumerate(stores):
                size, start = store.blocks.group_sizes[group], taken[i]
                taken[i] += size
                first, last = start // blocks_per_chunk, taken[i] // blocks_per_chunk
                blocks.append(store.blocks.block_ids[start : taken[i]])
                slots.append(store.host_slots[first:last])
                self._places[i] += range(self.num_chunks, self.num_chunks + last - first)
                self.num_chunks += last - first
        target = CPULoadStoreSpec(np.concatenate(slots))
        self.spec: TransferSpec = GPULoadStoreSpec(np.concatenate(blocks), sizes), target

    def results(self, result: TransferResult) -> Iterator[TransferResult]:
        """Return each store's part of the transfer's result."""
        for job_id, places, whole in zip(self.job_ids, self._places, self._whole, strict=True):
            num_bytes = result.transfer_bytes * len(places) // self.num_chunks
            answers = (result.ok[place] for place in places)
            ok = tuple(is_whole and next(answers) for is_whole in whole)
            reason = result.reason or ("" if all(whole) else PARTIAL_CHUNK)
            yield replace(result, job_id=job_id, ok=ok, reason=reason, transfer_bytes=num_bytes)
