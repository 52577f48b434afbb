"""A layer's attention: its weights, what it keeps of a token, and how it mixes tokens.

A subclass may mix tokens in another way, because the engine uses only the methods below. The
``mixer`` of the model's configuration names the class of each layer.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvoffload.core.attention import (
    AttentionBackend,
    AttentionLayer,
    CommonAttentionMetadata,
)
from kvoffload.core.interface import KVCacheSpec
from kvoffload.core.sdpa import SdpaPagedBackend

if TYPE_CHECKING:
    from kvoffload.demo.engine_config import ModelConfig

Take = Callable[..., Tensor]
"""Returns the weights of these names, joined to one tensor."""
Attend = Callable[..., Tensor]
"""Takes this step's rows of what a layer keeps and asks; gives a row for each. No padding rows."""


class SelfAttention:
    """Grouped queries with rotary positions, as in Llama."""

    def __init__(self, config: "ModelConfig", prefix: str, take: Take) -> None:
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._size = config.head_size
        self._qkv = take(*(f"{prefix}{part}_proj.weight" for part in "qkv"))

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, count: int, attend: Attend) -> Tensor:
        """Mix ``h[rows, hidden]``; rows after ``count`` are padding."""
        heads, kv_heads, rows = self._heads, self._kv_heads, len(h)
        qkv = F.linear(h, self._qkv).view(rows, heads + 2 * kv_heads, self._size)
        q, k, v = qkv.tensor_split([heads, heads + kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = h.new_zeros(rows, heads, self._size)
        mixed[:count] = attend(q[:count], k[:count], v[:count])
        return mixed.view(rows, -1)

    @staticmethod
    def output_size(config: "ModelConfig") -> int:
        """Columns of what a call returns."""
        return config.num_heads * config.head_size

    @staticmethod
    def weight_shapes(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
        """Name the weights as Hugging Face does, those of the output projection not included."""
        query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        parts = (("q", query), ("k", kv), ("v", kv))
        return {f"{part}_proj.weight": (rows, config.hidden_size) for part, rows in parts}

    @staticmethod
    def kept(
        config: "ModelConfig", block_size: int, dtype: torch.dtype
    ) -> AttentionLayer | KVCacheSpec:
        """Describe what the layer keeps in the KV cache, for planning."""
        return AttentionLayer(config.num_kv_heads, config.head_size)

    @staticmethod
    def backend(config: "ModelConfig", spec: KVCacheSpec) -> AttentionBackend:
        """Return what reads and writes the layer's KV cache of this format."""
        return SdpaPagedBackend()

    @staticmethod
    def attend(backend: Any, cache: Any, metadata: CommonAttentionMetadata, *given: Any) -> Tensor:
        """Keep what a call gives of this step, and answer what it asks."""
        query, key, value = given
        backend.write_kv(cache, key, value, metadata.slot_mapping)
        mixed: Tensor = backend.attend(query, cache, metadata)
        return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(x[i], x[i + D/2])`` of ``x[T, heads, D]`` by their position's angles."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
