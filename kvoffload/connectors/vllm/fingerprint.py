"""The facts of one rank of vLLM: its whole configuration, but what changes no byte of a KV cache.

:mod:`kvoffload.connectors.vllm.harmless_fields` lists what is left out. What the worker resolves is
a fact in its resolved form, so that an option may be spelled in several ways.
"""

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvoffload.connectors.configuration import fact, facts_of
from kvoffload.connectors.hf_config import hf_facts
from kvoffload.connectors.vllm import harmless_fields as harmless
from kvoffload.connectors.vllm.engine_weights import format_read, weights_of
from kvoffload.connectors.vllm.longest_request import length_fact
from kvoffload.connectors.vllm.start import VllmConfigSettings, installed_version, release_series
from kvoffload.connectors.vllm.variables import variables
from kvoffload.connectors.weight_samples import file_digest
from kvoffload.connectors.weights import files_digest, generation_facts, tokenizer_identity
from kvoffload.errors import ConfigError
from kvoffload.identity import Fact

_PLAIN_KV = ("auto", "float16", "bfloat16", "float32")
"""Kinds of KV caches that are not quantized."""

READERS_OF_TOKENIZERS = (
    "vllm.models.deepseek_v41.common.engram",
    "vllm.model_executor.models.minicpmv4_7",
)
"""Modules of models that make a table by the tokenizer; a test of vLLM's source finds them."""


def resolve_facts(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    settings: VllmConfigSettings,
    is_replicated: bool,
    unknown_weights: str = "",
) -> dict[str, Fact]:
    """Collect the facts of this rank; the caller adds how chunks are laid out in a slot.

    Args:
        vllm_config: vLLM's, of the worker.
        kv_cache_config: vLLM's.
        kv_caches: the tensors of each layer.
        settings: ours.
        is_replicated: whether all tensor parallel ranks have the same bytes, and so the same facts.
        unknown_weights: a name that these ranks share, for weights that nothing tells.
    """
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    root, shared = hash_root(vllm_config)
    dtype = str(model.dtype).removeprefix("torch.")
    facts: dict[str, Fact] = {
        "label.model": model.model,
        "engine": "vllm",
        "engine_version": release_series(installed_version()),
        "weights": weights_of(model, vllm_config.load_config, settings.weights_id, unknown_weights),
        "load_format": format_read(model, vllm_config.load_config),
        "dtype": dtype,
        "kv_dtype": dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        "kv_layout": str(cache.kv_cache_layout),
        "kv_tensors": _tensor_digest(kv_caches),
        "kv_groups": _groups(kv_cache_config),
        "attention": attention_backends(vllm_config, kv_caches),
        "platform": platform_fact(vllm_config, kv_caches),
        "block_size": cache.block_size,
        "blocks_per_chunk": settings.blocks_per_chunk,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_root": root if shared else f"random in {vllm_config.kv_transfer_config.engine_id}",
        "recurrent_states": recurrent_states(kv_cache_config),
        "request_length": length_fact(model),
        "generation_config": fact("generation_config", _generation(model)),
        "code": _code_of(model),
        "experts": _choice_of_experts(vllm_config),
        "media": _readers_of_media(model),
        "token_table": token_table(model),
        "files": settings.weights_id and files_digest(Path(model.model)),
        "media_scales": _content("mm_encoder_fp8_scale_path", _media_scales(model)),
        "quantization_file": _content("hf_overrides", _quantization_file(model)),
    }
    facts |= hf_facts(model.hf_config)
    facts |= facts_of(vllm_config, harmless.FIELDS)
    facts |= _lora(vllm_config.lora_config, model.dtype)
    facts |= _speculation(
        vllm_config.speculative_config, model, facts["weights"], settings.weights_id
    )
    facts |= variables()
    if is_replicated or has_latent_cache_alone(vllm_config, kv_cache_config):
        facts["rank"] = facts["tensor_parallel"] = "any"
    else:
        facts["rank"] = parallel.rank
        facts["tensor_parallel"] = parallel.tensor_parallel_size
    return facts


def platform_fact(vllm_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """Name what decides the order of the bytes in a block, next to the attention backend.

    CUDA has one order for each backend. Kernels of a quantized model may round activations
    otherwise on another generation, and those of a quantized KV cache queries. On CPUs vLLM chooses
    an order by the instruction set. Other devices have formats of their own, as some of AMD's have
    for 8-bit floats.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        is_plain = vllm_config.cache_config.cache_dtype in _PLAIN_KV
        if vllm_config.model_config.quantization is None and is_plain:
            return "cuda"
        return f"cuda {current_platform.get_device_capability()}"
    if not current_platform.is_cpu():
        return f"{current_platform.device_name} {current_platform.get_device_name()}"
    layers = vllm_config.compilation_config.static_forward_context
    orders = {getattr(layers.get(name), "isa", None) or _cpu_features() for name in kv_caches}
    told = [platform.machine(), *sorted(orders)]
    if platform.machine() not in ("x86_64", "AMD64"):
        told.append(_cpu_features())  # there a wheel's compiled form decides further
    elif vllm_config.model_config.quantization is not None:
        told += [torch.backends.cpu.get_cpu_capability(), str(torch.cpu._is_amx_tile_supported())]
    return " ".join(("cpu", *told))


def _cpu_features() -> str:
    """Digest the instruction sets of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as info:
            lines = {line for line in info if line.lower().startswith(("flags", "features"))}
    except OSError:
        lines = {platform.processor()}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def has_latent_cache_alone(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether one tensor parallel rank has what each of several would have."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    parallel = vllm_config.parallel_config
    specs = list(_layer_specs(kv_cache_config))
    return (
        bool(specs)
        and parallel.tensor_parallel_size == parallel.world_size == 1
        and all(type(spec) is MLAAttentionSpec for _, spec in specs)
    )


def _lora(lora_config: Any, dtype: Any) -> dict[str, Fact]:
    """Return what changes an adapter's effect; nothing where it is as vLLM has it by default.

    So engines that serve the base model share its chunks, with adapters and without.
    """
    if lora_config is None:
        return {}
    default = facts_of(type(lora_config)(), harmless.OF_LORA)
    default["lora_dtype"] = fact("lora_dtype", dtype)
    told = facts_of(lora_config, harmless.OF_LORA)
    return {f"lora.{name}": value for name, value in told.items() if default[name] != value}


def _speculation(config: Any, model: Any, weights: Fact, weights_id: str | None) -> dict[str, Fact]:
    """Return the draft model's facts: its layers lie in the same chunks as the target's."""
    draft = getattr(config, "draft_model_config", None)
    if draft is None or draft is config.target_model_config or draft is model:
        return {}  # n-grams and suffixes have no layers
    is_own = draft.model == model.model and draft.revision == model.revision
    loading = getattr(config, "draft_load_config", None)
    return {
        **{
            f"speculative_config.{name}": value
            for name, value in facts_of(config, harmless.OF_SPECULATION).items()
        },
        **hf_facts(draft.hf_config, "speculative_config.hf_config."),
        "speculative_config.weights": weights if is_own else weights_of(draft, loading, weights_id),
        "speculative_config.load_format": format_read(draft, loading),
    }


def _code_of(model: Any) -> str:
    """Name the code that computes a model, as vLLM has resolved it, and what it is used for."""
    from vllm import ModelRegistry

    entry = ModelRegistry.models.get(model.architecture)
    kind = getattr(entry, "model_cls", None)
    home = getattr(entry, "module_name", None) or getattr(kind, "__module__", "unknown")
    return f"{home} {model.architecture}, {model.runner_type} {model.convert_type}"


def _choice_of_experts(vllm_config: Any) -> str | None:
    """Tell what vLLM chooses kernels of quantized experts by; None for other models.

    The kernels round activations to other formats: to 16, 8 or 4 bits.
    Source: ``is_supported_config`` of vLLM's ``FusedMoEExperts``.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.quantization is None or not model.get_num_experts():
        return None
    chosen_by = {
        "adapters": vllm_config.lora_config is not None,
        "expert parallel": parallel.enable_expert_parallel,
        "balancing": parallel.enable_eplb,
        "data parallel": parallel.data_parallel_size > 1,
        "two batches": parallel.enable_dbo,
        "weights in host memory": _has_offloaded_weights(vllm_config),
    }
    return f"by {', '.join(name for name, is_so in chosen_by.items() if is_so) or 'nothing'}"


def token_table(model_config: Any) -> str | None:
    """Tell the tokenizer of a model that computes with it; None for other models.

    Engrams have a table in which tokens of equal text are one. A canvas of images finds its special
    tokens by name. All other models compute with the token ids of prompts alone.
    """
    if not any(name in sys.modules for name in READERS_OF_TOKENIZERS):
        return None
    revision = model_config.tokenizer_revision or model_config.revision
    told = tokenizer_identity(model_config.tokenizer, revision)
    return f"{told}, tokenizers {version('tokenizers')}"


def _has_offloaded_weights(vllm_config: Any) -> bool:
    # Source: ``_heterogeneous_shared_expert_enabled`` of DeepSeek V4 on AMD's devices.
    config = vllm_config.offload_config
    return bool(config.uva.cpu_offload_gb > 0 or config.prefetch.offload_group_size > 0)


def _readers_of_media(model: Any) -> str | None:
    """Tell what reads media after their hash is made; None for a model of text.

    Transformers has the code of most processors, and of some models. A tokenizer of Mistral's form
    says how images and audio are cut.
    """
    has_media = getattr(model, "multimodal_config", None) is not None
    if not has_media and not model.using_transformers_backend():
        return None
    told = f"transformers {version('transformers')}"
    if has_media and model.tokenizer != model.model:
        told += f", tokenizer {model.tokenizer} {model.tokenizer_mode}"
    return told


def _generation(model: Any) -> dict[str, Any]:
    """Return what a model may read of the settings of generation.

    The file in the model's own folder counts with its weights.
    """
    source = getattr(model, "generation_config", "auto")
    is_of_model = source in ("auto", "vllm") and not model.hf_config_path
    settings = {} if is_of_model else (model.try_get_generation_config() or {})
    return generation_facts(settings | (model.override_generation_config or {}))


def _media_scales(model: Any) -> str | None:
    """Return the file of scales for an encoder of media in 8-bit floats."""
    media = getattr(model, "multimodal_config", None)
    return getattr(media, "mm_encoder_fp8_scale_path", None)


def _quantization_file(model: Any) -> str | None:
    """Return the file that says how weights are quantized while they are loaded."""
    overrides = model.hf_overrides
    return overrides.get("quantization_config_file") if isinstance(overrides, dict) else None


def _content(field: str, path: str | None) -> str | None:
    """Digest a file that an option names."""
    if not path:
        return None
    try:
        return file_digest(Path(path))
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read: {error}") from error


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
    return "; ".join(
        f"{layer}: {spec.shapes} {spec.dtypes}"
        for layer, spec in _layer_specs(kv_cache_config)
        if hasattr(spec, "dtypes")
    )


def _layer_specs(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the spec of each layer, or of the layers of a group that have it in common."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        members = getattr(spec, "kv_cache_specs", None)  # of a group with several specs
        yield from sorted(members.items()) if members else [(",".join(group.layer_names), spec)]


def _groups(kv_cache_config: Any) -> str:
    return "; ".join(
        f"{type(group.kv_cache_spec).__name__} {group.kv_cache_spec.block_size}: "
        + ",".join(group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )
