"""Paged attention in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvoffload.core.attention import (
    BuilderFactory,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
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

        Returns:
            ``[T, heads, head_size]``.
        """
        out = torch.empty_like(query)
        starts = metadata.query_start_loc_cpu.tolist()
        for r, length in enumerate(metadata.seq_lens_cpu.tolist()):
            rows = slice(starts[r], starts[r + 1])
            if starts[r] < starts[r + 1]:
                table = metadata.block_table_tensor[r]
                out[rows] = self._attend_one(query[rows], kv_cache, table, length)
        return out

    def _attend_one(
        self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """Attend for one request with any number of query tokens, the last of ``seq_len``."""
        done = seq_len - query.shape[0]
        block_size = kv_cache.shape[2]
        first = 0
        if self.sliding_window is not None:
            first = max(done - self.sliding_window + 1, 0) // block_size
        begin = first * block_size
        kv = kv_cache[:, table[first : -(-seq_len // block_size)]].flatten(1, 2)
        key, value = kv[:, : seq_len - begin].transpose(1, 2).to(query.dtype)
        positions = torch.arange(begin, seq_len, device=query.device)
        distance = positions[done - begin :, None] - positions
        visible = distance >= 0
        if self.sliding_window is not None:
            visible &= distance < self.sliding_window
        causal = not done and self.sliding_window is None  # a faster kernel needs no mask
        result = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=None if causal else visible,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[0],
        )
        return result[0].transpose(0, 1)
