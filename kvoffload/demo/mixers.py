"""Layers that mix the tokens of a sequence, and the KV cache that each kind keeps between steps.

Each kind has its weights and its KV cache format. The engine passes in ``attend``, which reads the
KV cache; the mixer computes the rest.

| kind | keeps | as in |
|---|---|---|
| ``full`` | keys and values of all tokens | Llama, Qwen |
| ``window`` | keys and values of the last ``sliding_window`` tokens | gpt-oss, Gemma |
| ``latent`` | one latent vector a token for all heads | DeepSeek |
| ``state`` | one state, whatever the length | Mamba, Jamba |
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvoffload.core.attention import AttentionLayer
from kvoffload.core.interface import MambaSpec
from kvoffload.demo.config import ModelConfig

Take = Callable[..., Tensor]
Attend = Callable[..., Tensor]
"""Takes this step's rows of what a kind keeps and asks; gives a row for each. No padding rows."""
Shapes = dict[str, tuple[int, ...]]

CONV_WIDTH = 4
"""Tokens the short convolution before a state sees, itself included."""


class Mixer(Protocol):
    """One layer's mixing of tokens, its output projection not included."""

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, count: int, attend: Attend) -> Tensor:
        """Mix: ``h[rows, hidden]`` to ``[rows, output_size]``; rows after ``count`` are padding."""
        ...


def output_size(config: ModelConfig, kind: str) -> int:
    """Columns of what a kind's mixer returns."""
    return config.state_channels if kind == "state" else config.num_heads * config.head_size


def attention_layer(config: ModelConfig, kind: str) -> AttentionLayer:
    """Describe a layer that keeps something of every token: all kinds but ``state``."""
    if kind == "latent":
        return AttentionLayer(1, config.latent_size + config.head_size, use_mla=True)
    window = config.sliding_window if kind == "window" else None
    return AttentionLayer(config.num_kv_heads, config.head_size, sliding_window=window)


def state_spec(config: ModelConfig, block_size: int, dtype: torch.dtype) -> MambaSpec:
    """Return the format of what a ``state`` layer keeps."""
    channels = config.state_channels
    shapes = ((channels, config.state_size), (CONV_WIDTH - 1, channels))
    return MambaSpec(block_size, shapes, (torch.float32, dtype))


def weight_shapes(config: ModelConfig, kind: str) -> Shapes:
    """Name a mixer's weights; for ``full`` and ``window`` as Hugging Face does."""
    hidden, size = config.hidden_size, config.head_size
    query, kv = config.num_heads * size, config.num_kv_heads * size
    if kind == "state":
        inner = config.state_channels
        return {
            "in_proj.weight": (2 * inner, hidden),
            "conv.weight": (CONV_WIDTH, inner),
            "x_proj.weight": (1 + 2 * config.state_size, inner),
        }
    if kind == "latent":
        return {
            "q_proj.weight": (2 * query, hidden),
            "kv_a_proj.weight": (config.latent_size + size, hidden),
            "k_b_proj.weight": (config.latent_size * config.num_heads, size),
            "v_b_proj.weight": (query, config.latent_size),
        }
    shapes: Shapes = {}
    for part, rows in (("q", query), ("k", kv), ("v", kv)):
        shapes[f"{part}_proj.weight"] = (rows, hidden)
        if config.qkv_bias:
            shapes[f"{part}_proj.bias"] = (rows,)
    return shapes


def make_mixer(config: ModelConfig, kind: str, prefix: str, take: Take) -> Mixer:
    """Take a layer's mixer out of the model's weights."""
    if kind == "latent":
        return _Latent(config, prefix, take)
    if kind == "state":
        return _State(config, prefix, take)
    return _Attention(config, prefix, take)


class _Attention:
    """Grouped queries with rotary positions; a window is the business of ``attend``."""

    def __init__(self, config: ModelConfig, prefix: str, take: Take) -> None:
        names = [f"{prefix}{part}_proj" for part in "qkv"]
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._size = config.head_size
        self._qkv = take(*(name + ".weight" for name in names))
        self._bias = take(*(name + ".bias" for name in names)) if config.qkv_bias else None

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, count: int, attend: Attend) -> Tensor:
        heads, kv_heads, rows = self._heads, self._kv_heads, len(h)
        qkv = F.linear(h, self._qkv, self._bias).view(rows, heads + 2 * kv_heads, self._size)
        q, k, v = qkv.tensor_split([heads, heads + kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = h.new_zeros(rows, heads, self._size)
        mixed[:count] = attend(q[:count], k[:count], v[:count])
        return mixed.view(rows, -1)


class _Latent:
    """Multi-head latent attention, computed in the latent space.

    A token keeps ``latent | rotated key``. The key projection of each head is absorbed into its
    query, the value projection applied to the attended latent.
    """

    def __init__(self, config: ModelConfig, prefix: str, take: Take) -> None:
        self._heads, self._size, self._latent = (
            config.num_heads, config.head_size, config.latent_size,
        )  # fmt: skip
        self._query = take(prefix + "q_proj.weight")
        self._down = take(prefix + "kv_a_proj.weight")
        self._key_up = take(prefix + "k_b_proj.weight").chunk(self._heads)
        self._value_up = take(prefix + "v_b_proj.weight").chunk(self._heads)

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, count: int, attend: Attend) -> Tensor:
        rows = len(h)
        query = F.linear(h, self._query).view(rows, self._heads, 2 * self._size)
        plain, turned = query[..., : self._size], query[..., self._size :]
        absorbed = [F.linear(plain[:, i], up) for i, up in enumerate(self._key_up)]
        query = torch.cat([torch.stack(absorbed, 1), rotate(turned, cos, sin)], dim=-1)
        down = F.linear(h, self._down)
        latent, key = down[:, : self._latent], down[:, self._latent :]
        kept = torch.cat([latent, rotate(key[:, None], cos, sin)[:, 0]], dim=-1)
        mixed = h.new_zeros(rows, self._heads, self._latent)
        mixed[:count] = attend(query[:count], kept[:count])
        values = [F.linear(mixed[:, i], up) for i, up in enumerate(self._value_up)]
        return torch.cat(values, dim=-1)


class _State:
    """A small selective state-space layer: short convolution, gated diagonal recurrence."""

    def __init__(self, config: ModelConfig, prefix: str, take: Take) -> None:
        self._size = config.state_size
        self._in = take(prefix + "in_proj.weight")
        self._conv = take(prefix + "conv.weight")
        self._select = take(prefix + "x_proj.weight")

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, count: int, attend: Attend) -> Tensor:
        x, gate = F.linear(h, self._in).chunk(2, dim=-1)
        mixed = torch.zeros_like(x)
        mixed[:count] = attend(x[:count], self._convolve, self._step)
        return mixed * F.silu(gate)

    def _convolve(self, recent: Tensor) -> Tensor:
        """Mix the last tokens: ``[CONV_WIDTH, channels]`` to ``[channels]``."""
        return F.silu((recent * self._conv).sum(0))

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Advance ``state[channels, size]``, float32, by one token; returns output and state."""
        wide = x.float()
        # Products and sums of one token at a time: the same bits however tokens are batched.
        selected = (self._select.float() * wide).sum(-1)
        read, write = selected[1 : 1 + self._size], selected[1 + self._size :]
        state = state * torch.sigmoid(2 - selected[:1]) + (wide / len(x) ** 0.5)[:, None] * write
        return ((state * read).sum(-1) + wide).to(x.dtype), state


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(x[i], x[i + D/2])`` of each head by their position's angles.

    Args:
        x: ``[T, heads, D]``.
        cos: ``[T, 1, D/2]`` float32.
        sin: likewise.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
