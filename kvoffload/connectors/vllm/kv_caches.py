"""vLLM's view of its KV cache → ours: canonical tensors, GPU ends of transfers, chunk by chunk."""

from collections.abc import Sequence
from typing import Any

from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from kvoffload.transfer.layout import PAGE


def canonical(theirs: Any, group_ids: Sequence[int]) -> CanonicalKVCaches:
    """Translate vLLM's canonical caches; group ``i`` of theirs has the id ``group_ids[i]``.

    Keys carry group ids, so groups that are not offloaded keep their place and are empty.
    """
    refs: list[tuple[CanonicalKVCacheRef, ...]] = [()] * (max(group_ids) + 1)
    for group_id, group in zip(group_ids, theirs.group_data_refs, strict=True):
        # Layers of a group that overlay the same memory are one row, as wide as the widest.
        widths: dict[int, int] = {}
        for ref in group:
            widths[ref.tensor_idx] = max(widths.get(ref.tensor_idx, 0), ref.page_size_bytes)
        refs[group_id] = tuple(CanonicalKVCacheRef(i, width) for i, width in widths.items())
    return CanonicalKVCaches(
        tuple(CanonicalKVCacheTensor(t.tensor, t.page_size_bytes) for t in theirs.tensors),
        tuple(refs),
    )


def slot_bytes(worker_bytes_per_block: int, blocks_per_chunk: int) -> int:
    """Bytes of a host slot, as both processes can compute them from vLLM's configuration."""
    return -(-worker_bytes_per_block * blocks_per_chunk // PAGE) * PAGE


class GpuEnd:
    """The GPU end of a job, cut into chunks.

    Args:
        theirs: vLLM's ``GPULoadStoreSpec``.
        group_ids: the ids of the groups it lists.
        blocks_per_chunk: blocks that make up a whole chunk.
    """

    def __init__(self, theirs: Any, group_ids: Sequence[int], blocks_per_chunk: int) -> None:
        self.chunks: list[tuple[int, tuple[int, ...]]] = []
        """For each chunk, its group's id and its blocks; the first of a group may be a part."""
        self._num_groups = max(group_ids) + 1
        self._indices = [0] * self._num_groups
        blocks = theirs.block_ids.tolist()
        start = 0
        for group_id, size, index in zip(
            group_ids, theirs.group_sizes, theirs.block_indices, strict=True
        ):
            end = start + size
            self._indices[group_id] = index
            room = blocks_per_chunk - index % blocks_per_chunk
            while start < end:
                count = min(room, end - start)
                self.chunks.append((group_id, tuple(blocks[start : start + count])))
                start += count
                room = blocks_per_chunk

    def leading(self, num_chunks: int) -> GPULoadStoreSpec:
        """Return the first chunks as one end of a transfer."""
        sizes = [0] * self._num_groups
        blocks: list[int] = []
        for group_id, ids in self.chunks[:num_chunks]:
            sizes[group_id] += len(ids)
            blocks.extend(ids)
        return GPULoadStoreSpec(blocks, sizes, self._indices)
