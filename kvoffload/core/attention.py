"""Paged attention: what layers keep, the interface of a backend, the metadata of a step.

A backend in plain torch is in :mod:`kvoffload.core.sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch

from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvoffload.errors import KVCacheSpecError

# -- from the attention layers of an engine to the KV cache format of each -------------------------


class AttentionType(StrEnum):
    """Which tokens attend to which; the values are vLLM's."""

    DECODER = "decoder"
    """A token attends to the tokens before it: their KV is kept."""
    ENCODER = "encoder"
    """Encoder of an encoder-decoder model: nothing is kept."""
    ENCODER_ONLY = "encoder_only"
    """A model without decoder: nothing is kept."""
    ENCODER_DECODER = "encoder_decoder"
    """Decoder tokens attend to the encoder's output: its KV is kept once a request."""


@dataclass(frozen=True)
class AttentionLayer:
    """What decides the KV cache format of one attention layer.

    Attributes:
        num_kv_heads: KV heads of one rank; 1 for a latent cache.
        head_size: elements per head; for a latent cache the latent and the rotated key together.
        attn_type: which tokens attend to which.
        sliding_window: tokens that a token attends to, itself included; None: all before it.
        attention_chunk_size: tokens of a local chunk; None: no chunks.
        use_mla: one latent vector a token in place of keys and values.
        kv_sharing_target_layer_name: the earlier layer whose KV this layer reads; None: its own.
    """

    num_kv_heads: int
    head_size: int
    attn_type: AttentionType = AttentionType.DECODER
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    use_mla: bool = False
    kv_sharing_target_layer_name: str | None = None


def get_kv_cache_spec(
    layers: Mapping[str, AttentionLayer | KVCacheSpec],
    kv_cache_dtype: torch.dtype,
    block_size: int,
) -> dict[str, KVCacheSpec]:
    """Return the KV cache format of each layer of a model, in layer order.

    A layer that reads the KV of another layer has no format of its own and is left out. Bind the
    cache and the metadata of its target to it. Encoder layers have an empty format; planning
    leaves them out.

    Args:
        layers: layer name → layer, in layer order. A recurrent layer has no heads: give its
            ``MambaSpec``, which is taken as it is.
        kv_cache_dtype: of the stored elements.
        block_size: tokens in a block.

    Raises:
        KVCacheSpecError: names the layer, what is wrong with it, and what would do.
    """
    specs: dict[str, KVCacheSpec] = {}
    for name, layer in layers.items():
        if isinstance(layer, KVCacheSpec):
            specs[name] = layer
            continue
        try:
            spec = _format_of(layer, kv_cache_dtype, block_size)
            target = layer.kv_sharing_target_layer_name
            if target is None:
                specs[name] = spec
            else:
                _check_target(target, specs.get(target), spec)
        except KVCacheSpecError as error:
            raise KVCacheSpecError(f"layer {name}: {error}") from None
    return specs


def _format_of(layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> KVCacheSpec:
    shape = (block_size, layer.num_kv_heads, layer.head_size, dtype)
    if layer.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        return EncoderOnlyAttentionSpec(*shape)
    if layer.attn_type == AttentionType.ENCODER_DECODER:
        return CrossAttentionSpec(*shape)
    if layer.attn_type != AttentionType.DECODER:
        raise KVCacheSpecError(
            f"attn_type = {layer.attn_type!r}: must be one of {', '.join(AttentionType)}"
        )
    window, chunk = layer.sliding_window, layer.attention_chunk_size
    if (window is not None) + (chunk is not None) + layer.use_mla > 1:
        raise KVCacheSpecError(
            f"sliding_window = {window}, attention_chunk_size = {chunk}, use_mla = "
            f"{layer.use_mla}: no format has two of them; describe such a layer without a window "
            "or chunk, so that all its blocks are kept"
        )
    if layer.use_mla:
        return MLAAttentionSpec(*shape)
    if window is not None:
        return SlidingWindowSpec(*shape, sliding_window=window)
    if chunk is not None:
        return ChunkedLocalAttentionSpec(*shape, attention_chunk_size=chunk)
    return FullAttentionSpec(*shape)


def _check_target(target: str, kept: KVCacheSpec | None, spec: KVCacheSpec) -> None:
    if kept is None:
        raise KVCacheSpecError(
            f"kv_sharing_target_layer_name = {target}: must name an earlier layer that keeps its "
            "own KV"
        )
    if kept != spec:
        raise KVCacheSpecError(
            f"kv_sharing_target_layer_name = {target}: both layers need the same format, but one "
            f"is {spec} and its target {kept}"
        )


# -- backends, and the metadata of a step ----------------------------------------------------------


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
