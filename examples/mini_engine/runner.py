"""Runs one step's work through the model, with keys and values in KV cache blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvoffload.core.attention import SdpaPagedBackend, init_attn_backend, prepare_attn_metadata
from kvoffload.core.canonical import CanonicalKVCaches
from kvoffload.core.interface import FullAttentionSpec, KVCacheConfig, ModelLimits
from kvoffload.core.planning import get_kv_cache_config
from kvoffload.core.tensors import allocate_kv_cache, canonicalize_kv_caches, reshape_kv_cache
from kvoffload.errors import ConfigError, InsufficientMemoryError
from mini_engine.attention import InvariantPagedBackend
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.model import Model
from mini_engine.request import Work


def plan_kv_cache(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype) -> KVCacheConfig:
    """Decide how many blocks the memory for the KV cache holds, and where they lie.

    Raises:
        ConfigError: it cannot hold one request of the greatest length.
    """
    spec = FullAttentionSpec(config.block_size, shape.num_kv_heads, shape.head_size, dtype)
    limits = ModelLimits(
        max_model_len=config.max_model_len, max_num_batched_tokens=config.max_num_batched_tokens
    )
    layers = {f"model.layers.{i}.self_attn": spec for i in range(shape.num_layers)}
    try:
        return get_kv_cache_config(limits, layers, config.kv_cache_bytes)
    except InsufficientMemoryError as error:
        raise ConfigError("kv_cache_bytes", int(config.kv_cache_bytes), str(error)) from error


class Runner:
    """Owns the KV cache's memory; computes, and knows nothing of requests waiting or tiers.

    Args:
        config: settings.
        model: on the device where the cache will be.
        kv_cache_config: the plan.
    """

    def __init__(self, config: EngineConfig, model: Model, kv_cache_config: KVCacheConfig) -> None:
        self.model = model
        self._plan = kv_cache_config
        self._layer_names = tuple(kv_cache_config.layer_specs)
        self._backend = _attention_backend(config, model)
        self._backends = dict.fromkeys(self._layer_names, self._backend)
        raw = allocate_kv_cache(kv_cache_config, model.device)
        caches = reshape_kv_cache(kv_cache_config, raw, self._backends)
        self._kv_caches = {n: c for n, c in caches.items() if isinstance(c, Tensor)}
        self._builders = init_attn_backend(kv_cache_config, self._backends, model.device)

    @property
    def attention_name(self) -> str:
        """Which attention computes, for the facts about stored bytes."""
        return self._backend.get_name()

    def canonical_kv_caches(self) -> CanonicalKVCaches:
        """See the cache as rows of bytes, a row a block, for transfers."""
        return canonicalize_kv_caches(self._plan, self._kv_caches, self._backends)

    @torch.inference_mode()
    def forward(self, work: Sequence[Work]) -> Tensor:
        """Compute each item's tokens and keep their keys and values.

        Returns:
            Float32 ``[items that sample, vocab_size]``: scores of their next tokens, in order.
        """
        device = self.model.device
        metadata = prepare_attn_metadata(
            self._plan,
            self._builders,
            [item.end - item.start for item in work],
            [item.start for item in work],
            [(item.block_ids,) for item in work],
            device,
        )

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            name = self._layer_names[index]
            cache = self._kv_caches[name]
            self._backend.write_kv(cache, key, value, metadata[name].slot_mapping)
            return self._backend.attend(query, cache, metadata[name])

        tokens = [t for item in work for t in item.request.token_ids[item.start : item.end]]
        positions = [p for item in work for p in range(item.start, item.end)]
        hidden = self.model.forward(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attend
        )
        last, row = [], -1
        for item in work:
            row += item.end - item.start
            if item.samples:
                last.append(row)
        return self.model.logits(hidden[last])


def _attention_backend(config: EngineConfig, model: Model) -> SdpaPagedBackend:
    # What invariance costs in padding is only repaid where it holds.
    exact = model.device.type == "cpu" and model.dtype == torch.float32
    wanted = config.attention
    if wanted == "auto":
        wanted = "invariant" if exact else "sdpa"
    return InvariantPagedBackend() if wanted == "invariant" else SdpaPagedBackend()
