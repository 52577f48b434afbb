"""vLLM's view of its KV cache → ours: canonical tensors, GPU ends of transfers, chunk by chunk."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)


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


def layers_of_groups(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, group_ids: Sequence[int]
) -> dict[int, list[torch.Tensor]]:
    """Return the tensors of each group's layers, with vLLM's blocks as dimension 0."""
    return {
        group_id: [
            group_kernel_blocks(kv_caches[layer], kv_cache_config.num_blocks)
            for layer in kv_cache_config.kv_cache_groups[group_id].layer_names
        ]
        for group_id in group_ids
    }


class GpuEnd:
    """The GPU end of a job. Its blocks are cut into chunks where a load has failed, and not before.

    Args:
        theirs: vLLM's ``GPULoadStoreSpec``.
        group_ids: the ids of the groups it lists, ascending.
        blocks_per_chunk: blocks that make up a whole chunk.
    """

    def __init__(self, theirs: Any, group_ids: Sequence[int], blocks_per_chunk: int) -> None:
        self._block_ids = theirs.block_ids
        self._groups = list(zip(group_ids, theirs.group_sizes, theirs.block_indices, strict=True))
        self._num_groups = max(group_ids) + 1
        self._per_chunk = blocks_per_chunk
        self.num_chunks = sum(self._chunks(size, index) for _, size, index in self._groups)

    @property
    def chunks(self) -> list[tuple[int, tuple[int, ...]]]:
        """For each chunk, its group's id and its blocks; the first of a group may be a part."""
        chunks: list[tuple[int, tuple[int, ...]]] = []
        blocks = self._block_ids.tolist()
        start = 0
        for group_id, size, index in self._groups:
            end = start + size
            room = self._per_chunk - index % self._per_chunk
            while start < end:
                count = min(room, end - start)
                chunks.append((group_id, tuple(blocks[start : start + count])))
                start += count
                room = self._per_chunk
        return chunks

    def leading(self, num_chunks: int) -> GPULoadStoreSpec:
        """Return the first chunks as one end of a transfer."""
        sizes, indices = [0] * self._num_groups, [0] * self._num_groups
        pieces = []
        start = 0
        for group_id, size, index in self._groups:
            room = max(0, num_chunks * self._per_chunk - index % self._per_chunk)
            taken = min(size, room)
            num_chunks -= self._chunks(taken, index)
            sizes[group_id], indices[group_id] = taken, index
            pieces.append(self._block_ids[start : start + taken])
            start += size
        return GPULoadStoreSpec(np.concatenate(pieces), sizes, indices)

    def whole(self) -> tuple[GPULoadStoreSpec, tuple[bool, ...]]:
        """Return the whole chunks as one end of a transfer, and which of all chunks are whole."""
        sizes, indices = [0] * self._num_groups, [0] * self._num_groups
        pieces, whole = [], []
        start = 0
        for group_id, size, index in self._groups:
            skipped = min(size, -index % self._per_chunk)
            count = (size - skipped) // self._per_chunk
            sizes[group_id], indices[group_id] = count * self._per_chunk, index + skipped
            pieces.append(self._block_ids[start + skipped :][: sizes[group_id]])
            whole += [False] * bool(skipped) + [True] * count
            whole += [False] * (self._chunks(size, index) - bool(skipped) - count)
            start += size
        return GPULoadStoreSpec(np.concatenate(pieces), sizes, indices), tuple(whole)

    def _chunks(self, size: int, index: int) -> int:
        return -(-(index % self._per_chunk + size) // self._per_chunk) if size else 0
