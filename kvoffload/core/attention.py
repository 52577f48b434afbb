"""Paged attention: the metadata of a step, and the builders of all groups.

The interface of a backend is in :mod:`kvoffload.core.attention_base`; import it from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvoffload.core.attention_base import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BuilderFactory,
    CommonAttentionMetadata,
)
from kvoffload.core.interface import KVCacheConfig
from kvoffload.core.layers import AttentionLayer, AttentionType, get_kv_cache_spec
from kvoffload.core.sdpa import CommonMetadataBuilder, SdpaPagedBackend

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "AttentionType",
    "BuilderFactory",
    "CommonAttentionMetadata",
    "CommonMetadataBuilder",
    "CpuGpuBuffer",
    "SdpaPagedBackend",
    "build_attn_metadata",
    "get_kv_cache_spec",
    "init_attn_backend",
    "make_block_table",
    "make_slot_mapping",
    "prepare_attn_metadata",
]


class CpuGpuBuffer:
    """A small array the host writes and the device reads, kept in both places.

    Args:
        size: elements.
        dtype: of the elements.
        device: where ``gpu`` lives; on a CPU-only machine both are one tensor.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        device = torch.device(device)
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.np: np.ndarray[Any, Any] = self.cpu.numpy()
        self.gpu = self.cpu if device.type == "cpu" else self.cpu.to(device)

    def copy_to_gpu(self, count: int) -> torch.Tensor:
        """Send the first elements to the device, in stream order, and return them there."""
        if self.gpu is not self.cpu:
            self.gpu[:count].copy_(self.cpu[:count], non_blocking=True)
        return self.gpu[:count]


def make_block_table(
    tables: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Lay out requests' block tables as int32 ``[R, longest]``, padded with the null block."""
    width = max((len(table) for table in tables), default=0)
    rows = np.zeros((len(tables), max(width, 1)), dtype=np.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(rows).to(device)


def make_slot_mapping(
    tables: Sequence[Sequence[int]],
    num_computed_tokens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Say for each token of a step where its KV goes: int64 ``[T]``."""
    parts = []
    for table, computed, count in zip(tables, num_computed_tokens, query_lens, strict=True):
        positions = np.arange(computed, computed + count, dtype=np.int64)
        first, last = computed // block_size, -(-(computed + count) // block_size)
        blocks = np.asarray(table[first:last], dtype=np.int64)
        parts.append(blocks[positions // block_size - first] * block_size + positions % block_size)
    slots = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(slots).to(device)


def build_attn_metadata(
    attn_metadata_builders: Sequence[AttentionMetadataBuilder],
    num_reqs: int,
    num_tokens: int,
    query_start_loc: CpuGpuBuffer,
    seq_lens: CpuGpuBuffer,
    num_computed_tokens_cpu: torch.Tensor,
    block_tables: Sequence[torch.Tensor],
    slot_mappings: Sequence[torch.Tensor] | torch.Tensor,
    kv_cache_config: KVCacheConfig,
) -> dict[str, Any]:
    """Build the step's metadata once a group and hand it to all layers of the group.

    Args:
        attn_metadata_builders: one a KV cache group.
        num_reqs: requests in the batch.
        num_tokens: tokens to compute.
        query_start_loc: filled up to ``num_reqs + 1``, host and device.
        seq_lens: filled up to ``num_reqs``, host and device.
        num_computed_tokens_cpu: by request.
        block_tables: by group.
        slot_mappings: by group.
        kv_cache_config: the plan.

    Returns:
        Layer name → metadata.
    """
    starts = query_start_loc.np[: num_reqs + 1]
    # Offsets grow along the batch, so the longest query is their largest step, not their maximum.
    max_query_len = int(np.diff(starts).max()) if num_reqs else 0
    max_seq_len = int(seq_lens.np[:num_reqs].max()) if num_reqs else 0
    metadata: dict[str, Any] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc.gpu[: num_reqs + 1],
            query_start_loc_cpu=query_start_loc.cpu[: num_reqs + 1],
            seq_lens=seq_lens.gpu[:num_reqs],
            seq_lens_cpu=seq_lens.cpu[:num_reqs],
            num_computed_tokens_cpu=num_computed_tokens_cpu[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=block_tables[index],
            slot_mapping=slot_mappings[index],
        )
        built = attn_metadata_builders[index].build(0, common)
        metadata.update(dict.fromkeys(group.layer_names, built))
    return metadata


def prepare_attn_metadata(
    kv_cache_config: KVCacheConfig,
    attn_metadata_builders: Sequence[AttentionMetadataBuilder],
    query_lens: Sequence[int],
    num_computed_tokens: Sequence[int],
    block_ids: Sequence[tuple[Sequence[int], ...]],
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Make a step's metadata from plain lists, one entry a request: the simple way in.

    Args:
        kv_cache_config: the plan.
        attn_metadata_builders: one a KV cache group.
        query_lens: tokens each request computes.
        num_computed_tokens: tokens each computed before.
        block_ids: each request's block tables by group, as ``KVCacheManager.get_block_ids`` gives.
        device: of the cache.
    """
    num_reqs = len(query_lens)
    starts = CpuGpuBuffer(num_reqs + 1, torch.int32, device)
    seq_lens = CpuGpuBuffer(num_reqs, torch.int32, device)
    np.cumsum(query_lens, out=starts.np[1:])
    seq_lens.np[:] = np.add(num_computed_tokens, query_lens)
    starts.copy_to_gpu(num_reqs + 1)
    seq_lens.copy_to_gpu(num_reqs)
    tables, slots = [], []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        rows = [ids[index] for ids in block_ids]
        size = group.kv_cache_spec.block_size
        tables.append(make_block_table(rows, device))
        slots.append(make_slot_mapping(rows, num_computed_tokens, query_lens, size, device))
    return build_attn_metadata(
        attn_metadata_builders,
        num_reqs,
        int(starts.np[-1]),
        starts,
        seq_lens,
        torch.tensor(list(num_computed_tokens), dtype=torch.int32),
        tables,
        slots,
        kv_cache_config,
    )


def init_attn_backend(
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, AttentionBackend],
    device: torch.device | str = "cpu",
) -> list[AttentionMetadataBuilder]:
    """Make one metadata builder a group, from the backend of the group's first layer.

    A group without layers, on a pipeline stage, gets a builder too: builders follow the groups.
    """
    builders: list[AttentionMetadataBuilder] = []
    for group in kv_cache_config.kv_cache_groups:
        names = group.layer_names
        make = backends[names[0]].get_builder_cls() if names else CommonMetadataBuilder
        builders.append(make(group.kv_cache_spec, names, torch.device(device)))
    return builders
