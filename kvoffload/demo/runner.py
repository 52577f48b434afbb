"""Runs one step's work through the model, with keys and values in KV cache blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvoffload.core.attention import (
    get_kv_cache_spec,
    init_attn_backend,
    prepare_attn_metadata,
)
from kvoffload.core.interface import KVCacheConfig, ModelLimits
from kvoffload.core.planning import get_kv_cache_config
from kvoffload.core.tensors import canonicalize_kv_caches, init_kv_cache
from kvoffload.demo.decoder import Model
from kvoffload.demo.engine_config import EngineConfig
from kvoffload.demo.engine_request import Work
from kvoffload.errors import ConfigError, InsufficientMemoryError
from kvoffload.messages import CanonicalKVCaches


def plan_kv_cache(config: EngineConfig) -> KVCacheConfig:
    """Decide how many blocks the memory for the KV cache holds, and where they lie.

    Raises:
        ConfigError: it cannot hold one request of the greatest length.
    """
    shape, dtype = config.model, getattr(torch, config.dtype)
    limits = ModelLimits(
        max_model_len=config.max_model_len, max_num_batched_tokens=config.max_num_batched_tokens
    )
    layers = {
        f"model.layers.{i}.self_attn": shape.mixer(i).kept(shape, config.block_size, dtype)
        for i in range(shape.num_layers)
    }
    specs = get_kv_cache_spec(layers, dtype, config.block_size)
    try:
        return get_kv_cache_config(limits, specs, config.kv_cache_bytes)
    except InsufficientMemoryError as error:
        raise ConfigError("kv_cache_bytes", int(config.kv_cache_bytes), str(error)) from error


class Runner:
    """Owns the KV cache's memory; computes, and knows nothing of requests waiting or tiers."""

    def __init__(self, model: Model, kv_cache_config: KVCacheConfig) -> None:
        self.model = model
        self._plan = kv_cache_config
        self._layer_names = [f"model.layers.{i}.self_attn" for i in range(model.config.num_layers)]
        self._mixers = [model.config.mixer(i) for i in range(model.config.num_layers)]
        specs = kv_cache_config.layer_specs
        self._backends = {
            name: mixer.backend(model.config, specs[name])
            for name, mixer in zip(self._layer_names, self._mixers, strict=True)
        }
        self._kv_caches = init_kv_cache(kv_cache_config, self._backends, model.device)
        self._builders = init_attn_backend(kv_cache_config, self._backends, model.device)

    @property
    def attention_name(self) -> str:
        """Which attention computes, for the facts about stored bytes."""
        return "+".join(sorted({backend.get_name() for backend in self._backends.values()}))

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
            [item.block_ids for item in work],
            device,
        )

        def attend(index: int, *given: Any) -> Tensor:
            name = self._layer_names[index]
            return self._mixers[index].attend(
                self._backends[name], self._kv_caches[name], metadata[name], *given
            )

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
