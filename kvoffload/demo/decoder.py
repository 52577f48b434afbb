"""A Llama-architecture decoder in plain PyTorch: RMSNorm, RoPE, grouped queries, SwiGLU.

The model hands keys and values to an ``attend`` function, layer by layer. The engine passes one
that writes and reads KV cache blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kvoffload.demo.engine_config import ModelConfig
from kvoffload.demo.self_attention import SelfAttention, Take

ROW_TILE = 16
"""Rows of a batch are padded to a multiple of this.

Matrix libraries pick another routine, with another order of additions, for a few rows than for
many. Whole tiles keep them in one, so that a token's result does not depend on what else is in its
batch: a chunked, batched or resumed request gives bit for bit what it gives alone (CPU, float32).
"""

Attend = Callable[..., Tensor]
"""``(layer, *what the layer's mixer passes) -> a row for each token``; keeps and reads KV."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    mixer: SelfAttention
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """The decoder's weights, packed for few large matrix products, and its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        self.config = config
        self.device = device

        def take(*names: str) -> Tensor:
            parts = [state[name] for name in names]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            return whole.to(device=device, dtype=dtype)

        self._embedding = take("model.embed_tokens.weight")
        self._layers = [_pack_layer(config, i, take) for i in range(config.num_layers)]
        self._norm = take("model.norm.weight")
        self._head = take("lm_head.weight")
        self._cos, self._sin = rope_tables(config, max_len, device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run a flat batch of tokens of any number of sequences.

        Args:
            token_ids: int64 ``[T]``, sequence after sequence.
            positions: int64 ``[T]``, each token's place in its own sequence.
            attend: attention of the whole batch in one layer.

        Returns:
            Hidden states after the last norm, ``[T, hidden_size]``.
        """
        cfg, count = self.config, len(token_ids)
        padding = (0, -count % ROW_TILE)
        token_ids, positions = F.pad(token_ids, padding), F.pad(positions, padding)
        x = self._embedding[token_ids]
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

        for index, layer in enumerate(self._layers):
            h = rms_norm(x, layer.attention_norm, cfg.rms_norm_eps)
            mixed = layer.mixer(h, cos, sin, count, partial(attend, index))
            x = x + F.linear(mixed, layer.output)

            h = rms_norm(x, layer.mlp_norm, cfg.rms_norm_eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return rms_norm(x, self._norm, cfg.rms_norm_eps)[:count]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token of each row: float32 ``[rows, vocab_size]``."""
        count = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, -count % ROW_TILE))
        return F.linear(padded, self._head)[:count].float()


def _pack_layer(config: ModelConfig, index: int, take: Take) -> _Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return _Layer(
        attention_norm=take(prefix + "input_layernorm.weight"),
        mixer=config.mixer(index)(config, attention, take),
        output=take(attention + "o_proj.weight"),
        mlp_norm=take(prefix + "post_attention_layernorm.weight"),
        gate_up=take(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=take(mlp + "down_proj.weight"),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit root mean square, in float32, then by ``weight``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rope_tables(config: ModelConfig, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and frequency: float32 ``[max_len, D/2]`` each."""
    half = config.head_size // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)
