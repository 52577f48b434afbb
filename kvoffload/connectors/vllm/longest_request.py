"""What the longest request, ``max_model_len``, changes in a model's KV cache: mostly nothing.

An operator changes it often, and most models compute the same KV cache then. Some rotate keys by
it, or tune the temperature of attention. A model whose code names the length counts as such a
model, unless its code was read.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_MODELS = "vllm.model_executor.models."
_NAMED_FOR_SIZES = frozenset(
    {
        # sizes of CUDA graphs of an image encoder, or of the largest dummy image
        "cohere_compass", "deepseek_ocr", "deepseek_vl2", "ernie45_vl", "gemma3_mm", "gemma4_mm",
        "glm4_1v", "idefics3", "internvl", "kimi_k25", "kimi_vl", "lfm2_vl", "minicpmv", "mllama4",
        "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "step3_vl",
        # sizes of an indexer's buffers
        "deepseek_v2",
        # the length of a table of rotations; see _ROTATE_BY_POSITION_ALONE
        "minimax_m2", "plamo3",
        # limits of encoders and of recurrent states' blocks, which have facts of their own
        "config", "colpali",
        # whether rotations that depend on the length can be switched off
        "transformers.utils",
    }
)  # fmt: skip
"""Modules that name the length, and compute the same KV cache for each length."""
_ROTATE_BY_POSITION_ALONE = frozenset(
    {"default", "linear", "llama3", "yarn", "mrope", "deepseek_yarn", "proportional", "longrope"}
)


def length_fact(model_config: Any) -> bool | int | None:
    """Tell what the longest request changes; None for a model that it does not concern."""
    longest = int(model_config.max_model_len)
    types = set(_rope_types(model_config.hf_config.to_dict()))
    if types - _ROTATE_BY_POSITION_ALONE or not _is_of_vllm(model_config):
        return longest
    if any(map(_reads_length, _loaded_models())):
        return longest
    return long_rope(model_config) if "longrope" in types else None


def long_rope(model_config: Any) -> bool | int:
    """Tell which factors vLLM rotates keys with.

    Source: ``Phi3LongRoPEScaledRotaryEmbedding`` of vLLM.
    """
    config = getattr(model_config, "hf_text_config", model_config.hf_config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    name, longest = "original_max_position_embeddings", int(model_config.max_model_len)
    original = rope.get(name) or getattr(config, name, None)
    return longest if original is None else longest > original


def _rope_types(value: Any, in_rope: bool = False) -> Iterator[str]:
    """Yield how a configuration, and those in it, rotate keys."""
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        if in_rope and name in ("rope_type", "type") and isinstance(inner, str):
            yield inner
        yield from _rope_types(inner, in_rope or str(name).startswith("rope_"))


def _is_of_vllm(model_config: Any) -> bool:
    """Whether the model's code is vLLM's, and no plug-in's."""
    from vllm import ModelRegistry

    entries = [ModelRegistry.models.get(name) for name in model_config.architectures]
    homes = [getattr(entry, "module_name", "") for entry in entries if entry is not None]
    return all(str(home).startswith(_MODELS) for home in homes)


def _loaded_models() -> list[ModuleType]:
    """Return the modules of models that this process has imported, the engine's own among them."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(_MODELS)]


def _reads_length(module: ModuleType) -> bool:
    if module.__name__.removeprefix(_MODELS) in _NAMED_FOR_SIZES:
        return False
    try:
        return "max_model_len" in Path(str(module.__file__)).read_text()
    except (OSError, ValueError):
        return True
