"""vLLM's view of its KV cache and of its stores → ours: canonical tensors, ends of transfers.

All stores of a step are one transfer, whose result is one result for each of them.

With multi-head latent attention every rank of a tensor parallel group has the whole KV cache. One
copy in a tier is enough, if all ranks see it. Ranks then have one namespace, and each writes its
part of the chunks. A rank reports the other ranks' chunks as stored. The scheduler joins all
reports, so a chunk is present when its writer has stored it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch

from kvoffload.messages import (
    BackendLoadStoreSpec,
    BlockIds,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadKey,
    TransferResult,
    TransferSpec,
)

# ---- Of the GPU ----


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
    from vllm.v1.kv_cache_interface import group_kernel_blocks

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


# ---- Stores of a step ----

PARTIAL_CHUNK = "partial_chunk"
"""Blocks of the chunk have left the sliding window; only whole chunks are stored."""


class BatchedStore(NamedTuple):
    """A store of the whole chunks of a job, as a part of a batch."""

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

    def __init__(self, stores: Sequence[BatchedStore], blocks_per_chunk: int) -> None:
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


# ---- Write-through of ranks with the same bytes ----

Write = tuple[CPULoadStoreSpec, BackendLoadStoreSpec]
"""The ends of a write-through."""
_HASHED_BYTES = 8
"""Of the beginning of a key, which is a block's hash."""


class SharedWrites:
    """This rank's part of the write-through; for the engine's thread alone.

    Args:
        rank: this worker's number.
        num_ranks: workers that have the same bytes.
        tiers: names of the tiers of which all these workers see the same chunks.
    """

    def __init__(self, rank: int, num_ranks: int, tiers: Collection[str]) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._tiers = frozenset(tiers)
        self._own: dict[int, list[bool]] = {}
        """Job → for each chunk, whether this rank writes it."""

    def writes(self, key: OffloadKey) -> bool:
        """Return whether this rank writes a chunk."""
        return int.from_bytes(key[:_HASHED_BYTES], "big") % self._num_ranks == self._rank

    def begin(self, job_id: int, ends: Write) -> tuple[Write, int]:
        """Return the part of a write-through that this rank carries out, and its chunks."""
        source, target = ends
        keys: Sequence[OffloadKey] = target.keys
        if target.tier not in self._tiers:
            return ends, len(keys)
        self._own[job_id] = own = list(map(self.writes, keys))
        keys = [key for key, is_own in zip(keys, own, strict=True) if is_own]
        slots = source.host_slots[np.array(own)]
        tenants = list(compress(target.tenants, own))
        part = BackendLoadStoreSpec(target.tier, keys, tenants)
        return (CPULoadStoreSpec(slots), part), len(keys)

    def end(self, result: TransferResult) -> TransferResult:
        """Turn the result of a part into one for all chunks of its job."""
        own = self._own.pop(result.job_id, None)
        if own is None:
            return result
        answers = iter(result.ok)
        return replace(result, ok=tuple(not is_own or next(answers) for is_own in own))
