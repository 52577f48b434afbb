"""Paged attention in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvoffload.core.attention_base import BuilderFactory, CommonAttentionMetadata
from kvoffload.core.interface import KVCacheSpec


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
        return "SDPA_PAGED"

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        return (0, 1, 2, 3, 4)

    def get_builder_cls(self) -> BuilderFactory:
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
        return common_attn_metadata
