"""Layers of other kinds than the demo engine's own, and the KV cache that each keeps.

| kind | keeps | as in |
|---|---|---|
| ``window`` | keys and values of the last ``sliding_window`` tokens | gpt-oss, Gemma |
| ``latent`` | one latent vector a token for all heads | DeepSeek |
| ``state`` | one state, whatever the length | Mamba, Jamba |
"""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from kvoffload.core.attention import (
    AttentionLayer,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
)
from kvoffload.core.interface import MambaSpec
from kvoffload.core.sdpa import SdpaPagedBackend
from kvoffload.demo.engine_config import EngineConfig, ModelConfig, parse_engine_config
from kvoffload.demo.self_attention import Attend, SelfAttention, Take, rotate

CONV_WIDTH = 4
"""Tokens the short convolution before a state sees, itself included."""


class HybridConfig(ModelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a decoder with layers of several kinds."""

    layer_kinds: tuple[str, ...]
    """``full``, ``window``, ``latent`` or ``state``; repeated over the layers."""
    sliding_window: int = 256
    """Tokens a ``window`` layer sees, itself included."""
    latent_size: int = 128
    """Elements of a ``latent`` layer's vector, without the ``head_size`` for positions."""
    state_channels: int = 256
    """Channels of a ``state`` layer."""
    state_size: int = 8
    """Elements of a channel's state."""

    def mixer(self, layer: int) -> type[SelfAttention]:
        return KINDS[self.layer_kinds[layer % len(self.layer_kinds)]]


def hybrid_engine(raw: dict) -> EngineConfig:
    """Read an engine's settings, with a model of several kinds, from plain data."""
    rest = {name: value for name, value in raw.items() if name != "model"}
    model = msgspec.convert(raw["model"], HybridConfig)
    return msgspec.structs.replace(parse_engine_config(rest), model=model)


class Window(SelfAttention):
    """Attention to the last tokens only."""

    @staticmethod
    def kept(config, block_size, dtype):
        window = config.sliding_window
        return AttentionLayer(config.num_kv_heads, config.head_size, sliding_window=window)

    @staticmethod
    def backend(config, spec):
        return SdpaPagedBackend(sliding_window=config.sliding_window)


class LatentPagedBackend(SdpaPagedBackend):
    """Multi-head latent attention: all heads read one latent vector a token, as key and as value.

    Cache shape: ``(num_blocks, block_size, head_size)``. Queries are in the latent space, with the
    key projection absorbed into them. The value is the first ``value_size`` elements of the latent
    vector, and the caller projects the result back.

    Args:
        value_size: leading elements that make up the value (the rest carries positions).
        scale: of the scores; None: ``1 / sqrt(head_size)``.
    """

    def __init__(self, value_size: int, scale: float | None = None) -> None:
        super().__init__(scale)
        self.value_size = value_size

    def get_name(self) -> str:
        """Return ``SDPA_LATENT``."""
        return "SDPA_LATENT"

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return ``(num_blocks, block_size, head_size)``: there is one latent "head"."""
        return (num_blocks, block_size, head_size)

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """Return the identity."""
        return (0, 1, 2)

    def write_latent(self, kv_cache: Tensor, latent: Tensor, slot_mapping: Tensor) -> None:
        """Store the latent vectors ``[T, head_size]`` of a step's tokens."""
        block_size = kv_cache.shape[1]
        blocks = slot_mapping // block_size
        kv_cache[blocks, slot_mapping % block_size] = latent.to(kv_cache.dtype)

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: CommonAttentionMetadata) -> Tensor:
        """Attend in the latent space: ``[T, heads, head_size]`` to ``[T, heads, value_size]``."""
        as_keys_and_values = kv_cache[None, :, :, None].expand(2, -1, -1, -1, -1)
        return super().attend(query, as_keys_and_values, metadata)[..., : self.value_size]


class Latent(SelfAttention):
    """Multi-head latent attention, computed in the latent space.

    A token keeps ``latent | rotated key``. The key projection of each head is absorbed into its
    query, the value projection applied to the attended latent.
    """

    def __init__(self, config: HybridConfig, prefix: str, take: Take) -> None:
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

    @staticmethod
    def weight_shapes(config):
        hidden, size = config.hidden_size, config.head_size
        return {
            "q_proj.weight": (2 * config.num_heads * size, hidden),
            "kv_a_proj.weight": (config.latent_size + size, hidden),
            "k_b_proj.weight": (config.latent_size * config.num_heads, size),
            "v_b_proj.weight": (config.num_heads * size, config.latent_size),
        }

    @staticmethod
    def kept(config, block_size, dtype):
        return AttentionLayer(1, config.latent_size + config.head_size, use_mla=True)

    @staticmethod
    def backend(config, spec):
        # Scores are of a head's own key and its rotated part, whatever the latent space's size.
        scale = (2 * config.head_size) ** -0.5
        return LatentPagedBackend(config.latent_size, scale)

    @staticmethod
    def attend(backend, cache, metadata, query, latent):
        backend.write_latent(cache, latent, metadata.slot_mapping)
        return backend.attend(query, cache, metadata)


class StateBackend:
    """Runs a recurrence over each request's tokens, from the state its last token left.

    A request's state after token ``t`` is kept in the block of ``t``. At the end of a block it
    stays there, for requests that share the prefix.

    Args:
        block_size: tokens a block of the layer's group stands for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def get_name(self) -> str:
        return "STATE"

    def get_builder_cls(self):
        return CommonMetadataBuilder

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Never asked: states have the shapes their format says."""
        raise NotImplementedError

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """Never asked, likewise."""
        raise NotImplementedError

    def advance(
        self,
        x: Tensor,
        convolve: Callable[[Tensor], Tensor],
        step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        cache: tuple[Tensor, ...],
        metadata: CommonAttentionMetadata,
    ) -> Tensor:
        """Run ``x[T, channels]`` through the recurrence, request by request, token by token."""
        states, recents = cache
        out = torch.empty_like(x)
        starts = metadata.query_start_loc_cpu.tolist()
        computed = metadata.num_computed_tokens_cpu.tolist()
        tables = metadata.block_table_tensor.tolist()
        for i, (table, done) in enumerate(zip(tables, computed, strict=True)):
            state, recent = torch.zeros_like(states[0]), torch.zeros_like(recents[0])
            if done:
                block = table[(done - 1) // self._block_size]
                state, recent = states[block], recents[block]
            for row in range(starts[i], starts[i + 1]):
                window = torch.cat([recent, x[row : row + 1]])
                out[row], state = step(convolve(window), state)
                recent = window[1:]
            block = table[(done + starts[i + 1] - starts[i] - 1) // self._block_size]
            states[block], recents[block] = state, recent
        return out


class State(SelfAttention):
    """A small selective state-space layer: short convolution, gated diagonal recurrence."""

    def __init__(self, config: HybridConfig, prefix: str, take: Take) -> None:
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

    @staticmethod
    def output_size(config):
        return config.state_channels

    @staticmethod
    def weight_shapes(config):
        channels = config.state_channels
        return {
            "in_proj.weight": (2 * channels, config.hidden_size),
            "conv.weight": (CONV_WIDTH, channels),
            "x_proj.weight": (1 + 2 * config.state_size, channels),
        }

    @staticmethod
    def kept(config, block_size, dtype):
        channels = config.state_channels
        shapes = ((channels, config.state_size), (CONV_WIDTH - 1, channels))
        return MambaSpec(block_size, shapes, (torch.float32, dtype))

    @staticmethod
    def backend(config, spec):
        return StateBackend(spec.block_size)

    @staticmethod
    def attend(backend, cache, metadata, x, convolve, step):
        return backend.advance(x, convolve, step, cache, metadata)


KINDS = {"full": SelfAttention, "window": Window, "latent": Latent, "state": State}
