"""Paged attention: what a backend must offer, what it is told each step, and one in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvoffload.core.interface import KVCacheConfig, KVCacheSpec


class AttentionMetadataBuilder(Protocol):
    """Turns what all backends are told of a step into what one backend wants."""

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Return the metadata that the backend's layers of one group get."""
        ...


BuilderFactory = Callable[[KVCacheSpec, Sequence[str], torch.device], AttentionMetadataBuilder]


class AttentionBackend(Protocol):
    """The face an attention implementation shows to the KV cache: shapes, a metadata builder."""

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


class SdpaPagedBackend:
    """Paged attention with torch's scaled dot product attention; CPU and CUDA, any dtype.

    Cache shape: ``(2, num_blocks, block_size, num_kv_heads, head_size)``; keys, then values.

    Args:
        scale: of the scores; None: ``1 / sqrt(head_size)``.
        sliding_window: a token sees so many tokens, itself included; None: all before it.
    """

    def __init__(self, scale: float | None = None, sliding_window: int | None = None) -> None:
        self.scale = scale
        self.sliding_window = sliding_window

    def get_name(self) -> str:
        """Return ``SDPA_PAGED``."""
        return "SDPA_PAGED"

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return ``(2, num_blocks, block_size, num_kv_heads, head_size)``."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """Return the identity: memory lies as the shape says."""
        return (0, 1, 2, 3, 4)

    def get_builder_cls(self) -> BuilderFactory:
        """Return a builder that passes the common metadata on."""
        return CommonMetadataBuilder

    def write_kv(
        self,
        kv_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store the keys and values ``[T, kv_heads, head_size]`` of a step's tokens."""
        block_size = kv_cache.shape[2]
        blocks = slot_mapping // block_size
        offsets = slot_mapping % block_size
        kv_cache[0, blocks, offsets] = key.to(kv_cache.dtype)
        kv_cache[1, blocks, offsets] = value.to(kv_cache.dtype)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: CommonAttentionMetadata
    ) -> torch.Tensor:
        """Attend from a step's tokens to all tokens of their requests.

        The step's own keys and values must have been written.

        Args:
            query: ``[T, heads, head_size]``, requests one after the other.
            kv_cache: of the layer.
            metadata: of the layer.

        Returns:
            ``[T, heads, head_size]``.
        """
        out = torch.empty_like(query)
        starts = metadata.query_start_loc_cpu.tolist()
        lens = metadata.seq_lens_cpu.tolist()
        single = [r for r in range(metadata.num_reqs) if starts[r + 1] - starts[r] == 1]
        if len(single) > 1:
            rows = torch.tensor([starts[r] for r in single], device=query.device)
            out[rows] = self._attend_decodes(query[rows], kv_cache, metadata, single, lens)
        else:
            single = []
        batched = set(single)
        for r in range(metadata.num_reqs):
            if r not in batched and starts[r] < starts[r + 1]:
                rows_of_r = slice(starts[r], starts[r + 1])
                table = metadata.block_table_tensor[r]
                out[rows_of_r] = self._attend_one(query[rows_of_r], kv_cache, table, lens[r])
        return out

    def _attend_one(
        self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """Attend for one request with any number of query tokens, the last of ``seq_len``."""
        count = query.shape[0]
        block_size = kv_cache.shape[2]
        first = self._first_block(seq_len - count, block_size)
        begin = first * block_size
        kv = kv_cache[:, table[first : -(-seq_len // block_size)]].flatten(1, 2)
        key, value = kv[:, : seq_len - begin].transpose(1, 2)
        mask = None
        causal = count == seq_len and self.sliding_window is None
        if not causal and (count > 1 or self.sliding_window is not None):
            mask = self._mask(
                torch.arange(seq_len - count, seq_len, device=query.device),
                torch.arange(begin, seq_len, device=query.device),
            )
        result = self._sdpa(
            query.transpose(0, 1)[None], key[None], value[None], mask, causal and count > 1
        )
        return result[0].transpose(0, 1)

    def _attend_decodes(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonAttentionMetadata,
        requests: Sequence[int],
        lens: Sequence[int],
    ) -> torch.Tensor:
        """Attend for requests with one query token each, padded to the longest."""
        device = query.device
        block_size = kv_cache.shape[2]
        longest = max(lens[r] for r in requests)
        first = self._first_block(min(lens[r] for r in requests) - 1, block_size)
        begin = first * block_size
        tables = metadata.block_table_tensor[
            torch.tensor(requests, device=device), first : -(-longest // block_size)
        ]
        kv = kv_cache[:, tables].flatten(2, 3)
        key, value = kv[:, :, : longest - begin].transpose(2, 3)
        mask = self._mask(
            torch.tensor([[lens[r] - 1] for r in requests], device=device),
            torch.arange(begin, longest, device=device),
        )
        return self._sdpa(query[:, :, None], key, value, mask[:, None], False)[:, :, 0]

    def _first_block(self, first_position: int, block_size: int) -> int:
        """Return the first block that any query position from this one on can see."""
        if self.sliding_window is None:
            return 0
        return max(first_position - self.sliding_window + 1, 0) // block_size

    def _mask(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        distance = query_positions[..., None] - key_positions
        visible = distance >= 0
        if self.sliding_window is not None:
            visible &= distance < self.sliding_window
        return visible

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query,
            key.to(query.dtype),
            value.to(query.dtype),
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


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
        """Return the common metadata."""
        return common_attn_metadata


def init_attn_backend(
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, AttentionBackend],
    device: torch.device | str = "cpu",
) -> list[AttentionMetadataBuilder]:
    """Make one metadata builder a group, from the backend of the group's first layer."""
    return [
        backends[group.layer_names[0]].get_builder_cls()(
            group.kv_cache_spec, group.layer_names, torch.device(device)
        )
        for group in kv_cache_config.kv_cache_groups
    ]
