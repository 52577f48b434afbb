"""Paged attention in plain torch, whose result for a token does not depend on its batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvoffload.core.attention import (
    BuilderFactory,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
)
from kvoffload.core.interface import cdiv

KEY_SPAN = 512
"""Keys are padded to a multiple of this: PyTorch's CPU kernel adds them up in spans of so many."""
QUERY_TILE = 16
"""Queries are padded to a multiple of this, so that the kernel's matrix products keep one shape."""
QUERY_ROWS = 256
"""Queries attended in one call; the keys after the last of them are left out."""


class SdpaPagedBackend:
    """Paged attention with torch's scaled dot product attention; CPU and CUDA, any dtype.

    Requests are attended one by one and in whole tiles. On the CPU in float32 a token then has the
    same bits in a chunk, in a batch, after preemption and on restored pages.

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
            table = metadata.block_table_tensor[r]
            out[rows] = self._attend_one(query[rows], kv_cache, table, length)
        return out

    def _attend_one(
        self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Attend one request's last ``len(query)`` tokens; it has ``length`` with them."""
        block_size = kv_cache.shape[2]
        span = cdiv(length, KEY_SPAN) * KEY_SPAN
        num_blocks = cdiv(span, block_size)
        # The null block pads the table; what it holds is masked out.
        blocks = F.pad(table[: cdiv(length, block_size)], (0, num_blocks))[:num_blocks].long()
        pages = kv_cache[:, blocks].flatten(1, 2)[:, :span].to(query.dtype)
        key, value = pages.transpose(1, 2).unsqueeze(1)  # [1, heads, span, D]

        out = torch.empty_like(query)
        for begin in range(0, len(query), QUERY_ROWS):
            part = query[begin : begin + QUERY_ROWS]
            first = length - len(query) + begin
            rows = cdiv(len(part), QUERY_TILE) * QUERY_TILE
            keys = cdiv(first + len(part), KEY_SPAN) * KEY_SPAN
            padded = F.pad(part, (0, 0, 0, 0, 0, rows - len(part))).transpose(0, 1).unsqueeze(0)
            mixed = F.scaled_dot_product_attention(
                padded,
                key[:, :, :keys],
                value[:, :, :keys],
                attn_mask=self._mask(first, rows, keys, query),
                scale=self.scale,
                enable_gqa=True,
            )
            out[begin : begin + len(part)] = mixed[0, :, : len(part)].transpose(0, 1)
        return out

    def _mask(self, first: int, rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask: row r stands at position ``first + r`` and sees the keys up to there."""
        hidden = torch.full((rows, keys), float("-inf"), dtype=like.dtype, device=like.device)
        mask = hidden.triu(first + 1)
        return (
            mask if self.sliding_window is None else mask + hidden.tril(first - self.sliding_window)
        )
