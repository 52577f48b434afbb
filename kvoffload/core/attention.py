"""Paged attention: the interface of a backend, the metadata of a step, the builders of all groups.

A backend in plain torch is in :mod:`kvoffload.core.sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvoffload.core.interface import KVCacheConfig, KVCacheSpec
from kvoffload.core.layers import (  # noqa: F401 - engines look for these names here
    AttentionLayer,
    AttentionType,
    get_kv_cache_spec,
)


class AttentionMetadataBuilder(Protocol):
    """Turns the common metadata of a step into the metadata of one backend."""

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Return the metadata that the backend's layers of one group get."""
        ...


BuilderFactory = Callable[[KVCacheSpec, Sequence[str], torch.device], AttentionMetadataBuilder]


class AttentionBackend(Protocol):
    """The interface of an attention implementation: cache shapes and a metadata builder."""

    def get_name(self) -> str:
        """Return the backend's name, for logs and for the namespace of stored bytes."""
        ...

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the logical shape of one layer's cache."""
        ...

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """Return the logical dimensions in the order they lie in memory, outermost first."""
        ...

    def get_builder_cls(self) -> BuilderFactory:
        """Return what makes the metadata builder of a group."""
        ...


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step of a batch, for one KV cache group. R requests, T tokens to compute.

    Attributes:
        query_start_loc: int32 ``[R + 1]``: where each request's tokens begin; its end at ``[R]``.
        query_start_loc_cpu: the same on the host.
        seq_lens: int32 ``[R]``: tokens of each request, this step's included.
        seq_lens_cpu: the same on the host.
        num_computed_tokens_cpu: int32 ``[R]``: tokens computed before this step.
        num_reqs: R.
        num_actual_tokens: T.
        max_query_len: most tokens any request computes in this step.
        max_seq_len: the longest request.
        block_table_tensor: int32 ``[R, blocks]``, padded with the null block.
        slot_mapping: int64 ``[T]``: where each token's KV goes, ``block * block_size + offset``.
        causal: a token sees only those before it.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    num_computed_tokens_cpu: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class CommonMetadataBuilder:
    """For backends that want the common metadata as it is."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str], device: torch.device
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = tuple(layer_names)
        self.device = device

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class CpuGpuBuffer:
    """A small array the host writes and the device reads; on a CPU-only machine one tensor."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        device = torch.device(device)
        is_cuda = device.type == "cuda"
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=is_cuda, device="cpu")
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

    Builders, block tables and slot mappings are by group. The buffers are filled, on host and
    device, up to ``num_reqs`` (``query_start_loc``: one more); ``num_tokens`` are computed.

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

    ``block_ids`` are block tables by group, as ``KVCacheManager.get_block_ids`` gives.
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
        torch.tensor(list(num_computed_tokens), dtype=torch.int32, device="cpu"),
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
