"""vLLM's view of its KV cache and of its stores → ours: canonical tensors, ends of transfers.

Models whose KV cache loads would not restore are refused.

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

from kvoffload.connectors.vllm.start import CONNECTOR
from kvoffload.errors import ConfigError
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadKey,
    TransferResult,
    TransferSpec,
)
from kvoffload.transfer.layout import ChunkLayout, Moves, joined

# ---- Models that cannot be offloaded ----


def check_groups(kv_cache_config: Any) -> None:
    """Refuse a model of which vLLM's offloading moves a part alone, where a load restores a prefix.

    With HiSparse the KV cache lies in pages of the host, and vLLM's offloading moves the index of
    it. After a load vLLM would read pages that have no bytes.

    Args:
        kv_cache_config: vLLM's; None in tools, which have no groups.

    Raises:
        ConfigError: names the layers and the remedy.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
    )

    if kv_cache_config is None:
        return
    needed = set(kv_cache_config.prefix_cacheable_group_ids)
    if left := needed.difference(get_offloading_group_ids(kv_cache_config)):
        layers = [kv_cache_config.kv_cache_groups[i].layer_names[0] for i in sorted(left)]
        raise ConfigError(
            "kv_connector",
            CONNECTOR,
            f"vLLM's offloading leaves out the KV cache of {', '.join(layers)}, and a load would "
            "bring wrong bytes; take this connector out, or HiSparseConnector",
        )


def check_prefixes(model: Any, kv_cache_config: Any) -> None:
    """Refuse a model that cannot go on from the KV cache of another prompt with the same beginning.

    vLLM turns its own prefix cache off for such a model, and asks a connector all the same.

    Args:
        model: vLLM's ``ModelConfig``; None in tools, which have no model.
        kv_cache_config: vLLM's; None in tools.

    Raises:
        ConfigError: names the pooler, or a layer, and the remedy.
    """
    from vllm.v1.kv_cache_interface import iter_layer_specs

    is_pooler = model is not None and model.runner_type == "pooling"
    if is_pooler and not model.is_prefix_caching_supported:
        pooler = model.pooler_config
        raise ConfigError(
            "pooler_config",
            f"{pooler.seq_pooling_type}, {pooler.tok_pooling_type}",
            "needs every token of a prompt computed, and vLLM would end at the first loaded "
            "prefix; take this connector out",
        )
    for group in kv_cache_config.kv_cache_groups if kv_cache_config is not None else ():
        for spec in iter_layer_specs(group.kv_cache_spec):
            # Prefix LM, and windows over what is generated alone.
            if getattr(spec, "non_causal", False) or getattr(spec, "rswa_window", None):
                raise ConfigError(
                    "kv_connector",
                    CONNECTOR,
                    f"the KV cache of {group.layer_names[0]} depends on more than the tokens "
                    "before, and another prompt would load wrong bytes; take this connector out",
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


def has_useful_heads(kv_cache_config: Any) -> bool:
    """Whether the first blocks of a prefix are of use without those behind them.

    Not so where a load brings the last blocks alone, as of windows and recurrent states. With
    several groups, vLLM takes no blocks at all.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

    first, *others = kv_cache_config.kv_cache_groups
    return not others and all(
        isinstance(spec, FullAttentionSpec) for spec in iter_layer_specs(first.kv_cache_spec)
    )


def cut(theirs: Any, group_ids: Sequence[int], layout: ChunkLayout) -> Moves:
    """Cut the GPU end of a job into chunks; the first and the last of a group may be parts.

    Args:
        theirs: vLLM's ``GPULoadStoreSpec``.
        group_ids: the ids of the groups it lists, ascending.
        layout: of a chunk.
    """
    sizes, indices = [0] * (max(group_ids) + 1), [0] * (max(group_ids) + 1)
    listed = zip(group_ids, theirs.group_sizes, theirs.block_indices, strict=True)
    for group_id, size, index in listed:
        sizes[group_id], indices[group_id] = size, index
    return layout.moves(GPULoadStoreSpec(theirs.block_ids, sizes, indices))


# ---- Stores of a step ----

PARTIAL_CHUNK = "partial_chunk"
"""Blocks of the chunk have left the sliding window; only whole chunks are stored."""


class BatchedStore(NamedTuple):
    """A store of the whole chunks of a job, as a part of a batch."""

    job_id: int
    moves: Moves
    """The whole chunks, each with its host slot."""
    whole: Sequence[bool]
    """For each chunk of the job, whether it is whole."""


class StoreBatch:
    """Stores that are carried out by one transfer, so that they cost one launch.

    Args:
        stores: at least one; the transfer has the job id of the first.
    """

    def __init__(self, stores: Sequence[BatchedStore]) -> None:
        self.job_id = stores[0].job_id
        self.job_ids = [store.job_id for store in stores]
        self._stores = stores
        moves = joined([store.moves for store in stores])
        self.num_chunks = len(moves)
        self.spec: TransferSpec = moves, CPULoadStoreSpec(moves.host_slots)

    def results(self, result: TransferResult) -> Iterator[TransferResult]:
        """Return each store's part of the transfer's result."""
        answers = iter(result.ok)
        for job_id, moves, whole in self._stores:
            num_bytes = result.transfer_bytes * len(moves) // self.num_chunks
            # A list: a generator is entered again for each chunk, on the engine's thread.
            ok = tuple([is_whole and next(answers) for is_whole in whole])
            reason = result.reason or ("" if all(whole) else PARTIAL_CHUNK)
            end = result.settled, num_bytes, result.transfer_time_s, reason
            yield TransferResult(job_id, ok, *end)


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
        part = BackendLoadStoreSpec(target.tier, tuple(keys), tenants)
        return (CPULoadStoreSpec(slots), part), len(keys)

    def end(self, result: TransferResult) -> TransferResult:
        """Turn the result of a part into one for all chunks of its job."""
        own = self._own.pop(result.job_id, None)
        if own is None:
            return result
        answers = iter(result.ok)
        return replace(result, ok=tuple([not is_own or next(answers) for is_own in own]))
