"""Everything that decides what one rank's stored bytes mean, as vLLM has resolved it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvoffload.connectors.model_identity import commit_of, config_digest, weights_identity
from kvoffload.connectors.vllm.settings import VllmConfigSettings
from kvoffload.connectors.vllm.versions import installed_version, release_series
from kvoffload.errors import ConfigError
from kvoffload.offload.namespace import Fact

_REFUSED_LAYOUTS = ("LHBNC",)
"""Where the heads of a block lie apart from each other, outside of the block."""


def resolve_facts(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    settings: VllmConfigSettings,
    is_replicated: bool = False,
) -> dict[str, Fact]:
    """Collect the facts of this rank; the caller adds how chunks are laid out in a slot.

    Ranks that all have the same bytes, which ``is_replicated`` says, have the facts of rank 0.
    """
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    root, shared = hash_root(vllm_config)
    commit = commit_of(model.model, model.revision)
    is_dummy = str(vllm_config.load_config.load_format) == "dummy"
    weights = weights_identity(
        settings.weights_id,
        commit,
        model.model,
        dummy_seed=model.seed if is_dummy else None,
        source=model.model_weights or model.model,
        engine=vllm_config.kv_transfer_config.engine_id,
    )
    facts: dict[str, Fact] = {
        "engine": "vllm",
        "engine_version": release_series(installed_version()),
        "model": model.model,
        "revision": commit,
        "weights": weights,
        "hf_config": config_digest(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization) if model.quantization else None,
        "kv_dtype": str(cache.cache_dtype),
        "kv_scales": None,  # vLLM calculates none any more; without the name all stores go cold
        "kv_layout": str(cache.kv_cache_layout),
        "kv_tensors": _tensor_digest(kv_caches),
        "kv_groups": _groups(kv_cache_config),
        "attention": attention_backends(vllm_config, kv_caches),
        "block_size": cache.block_size,
        "blocks_per_chunk": settings.blocks_per_chunk,
        "rank": 0 if is_replicated else parallel.rank,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "prefill_context_parallel": parallel.prefill_context_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        "lora": vllm_config.lora_config is not None,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_root": root if shared else f"random in {vllm_config.kv_transfer_config.engine_id}",
    }
    # A newer fact is present only where it differs from vLLM's default. So engines with the default
    # keep their digest, and their stored chunks.
    if (interleaved := parallel.cp_kv_cache_interleave_size) != 1:
        facts["context_parallel_interleave"] = interleaved
    if (rotated := long_rope(model)) is not None:
        facts["long_rope"] = rotated
    if media := media_settings(model):
        facts["media"] = media
    if states := recurrent_states(kv_cache_config):
        facts["recurrent_states"] = states
    return facts


def long_rope(model_config: Any) -> bool | int | None:
    """Tell which factors vLLM rotates keys with; None for models that have one set of them.

    Source: ``Phi3LongRoPEScaledRotaryEmbedding`` of vLLM.
    """
    config = getattr(model_config, "hf_text_config", model_config.hf_config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" not in str(rope):
        return None
    name, longest = "original_max_position_embeddings", int(model_config.max_model_len)
    original = rope.get(name) or getattr(config, name, None)
    return longest if original is None else longest > original


def media_settings(model_config: Any) -> str:
    """Spell how the engine makes tokens of images and sounds; empty for the model's own way.

    vLLM's hash of an image has what its request sets, and not what the engine sets.
    """
    config = getattr(model_config, "multimodal_config", None)
    names = ("media_io_kwargs", "mm_processor_kwargs")
    chosen = {name: value for name in names if (value := getattr(config, name, None))}
    return json.dumps(chosen, sort_keys=True, default=str) if chosen else ""


def check_layout(layout: str | None) -> None:
    """Refuse a KV cache layout in which vLLM's canonical view shows a part of a block alone.

    Args:
        layout: a name of vLLM's ``KVCacheLayout``; None where nothing is resolved or wished.

    Raises:
        ConfigError: names the layout and the remedy.
    """
    if layout in _REFUSED_LAYOUTS:
        raise ConfigError(
            "VLLM_KV_CACHE_LAYOUT",
            layout,
            "vLLM's offloading would store one head of one layer of each block in this layout, and "
            "load wrong bytes; set it to LBHNC",
        )


def hash_root(vllm_config: Any) -> tuple[str, bool]:
    """Return what prefix hashes start from, and whether other processes start from the same."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    algorithm = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    # Asked twice: a root that other processes share comes out the same.
    first, second = resolve_none_hash_seed(algorithm), resolve_none_hash_seed(algorithm)
    return first, first == second


def attention_backends(vllm_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """Name the attention backends of the layers that have a KV cache."""
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for layer in kv_caches:
        backend = getattr(layers.get(layer), "attn_backend", None)
        names.add(backend.get_name() if backend is not None else "unknown")
    return " ".join(sorted(names))


def _tensor_digest(kv_caches: Mapping[str, Any]) -> str:
    """Digest each layer's dtype, and shape and strides but for the number of blocks."""
    text = [
        f"{layer} {cache.dtype} {tuple(cache.shape[1:])} {tuple(cache.stride()[1:])}"
        for layer, cache in sorted(kv_caches.items())
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def recurrent_states(kv_cache_config: Any) -> str:
    """Spell shapes and dtypes of recurrent states: vLLM hands their tensors over as plain bytes.

    They say what ``mamba_cache_dtype`` and ``mamba_ssm_cache_dtype`` came to, and in which order
    the dimensions of a convolution's state stand. Empty for models of attention alone.
    """
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        members = getattr(spec, "kv_cache_specs", {"": spec})  # of a group with several specs
        for layer, each in sorted(members.items()):
            if hasattr(each, "dtypes"):
                found.append(f"{layer or ','.join(group.layer_names)}: {each.shapes} {each.dtypes}")
    return "; ".join(found)


def _groups(kv_cache_config: Any) -> str:
    return "; ".join(
        f"{type(group.kv_cache_spec).__name__} {group.kv_cache_spec.block_size}: "
        + ",".join(group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )
