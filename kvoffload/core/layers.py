"""From the attention layers of an engine to the KV cache format of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvoffload.errors import KVCacheSpecError

if TYPE_CHECKING:
    import torch


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
