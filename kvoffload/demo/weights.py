"""Where weights come from: a Hugging Face checkpoint folder, or a seed.

Both give the same thing: tensors under their Hugging Face names, ``model.layers.0.mlp...``.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvoffload.demo.engine_config import ModelConfig, RopeScaling
from kvoffload.errors import ConfigError
from kvoffload.replay.model import read_config

ARCHITECTURES = ("llama", "qwen2")
"""``model_type`` of the checkpoints this engine computes correctly."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name every weight of a model of this shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        mixer = config.mixer(i)
        for name, shape in mixer.weight_shapes(config).items():
            shapes[f"{at}self_attn.{name}"] = shape
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, mixer.output_size(config))
        if config.output_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (hidden,)
        shapes[f"{at}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Build float32 weights on the CPU: equal seeds and shapes give equal weights.

    Their sizes make attention look at few tokens and answers depend on all of the prompt, as in a
    trained model. So a wrong page in the cache shows in the output.
    """
    generator = torch.Generator().manual_seed(seed)
    residual = 1 / math.sqrt(2 * config.num_layers)
    gains = {"q_proj": 1.7, "k_proj": 1.7, "o_proj": residual, "down_proj": residual}
    gains["lm_head"] = 3.0
    state = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            state[name] = 1 + 0.1 * values
        elif len(shape) == 1:
            state[name] = 0.1 * values
        elif "embed_tokens" in name:
            # Small, so that a token's own embedding does not outweigh what attention adds.
            state[name] = 0.3 * values
        else:
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            state[name] = values * (gain / math.sqrt(shape[1]))
    return state


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Digest every byte of the weights: what KV cache bytes of two runs must share to be equal."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_model_config(folder: Path) -> tuple[ModelConfig, frozenset[int]]:
    """Read a checkpoint's ``config.json``.

    Returns:
        The model's shape, and the token ids that end an answer.

    Raises:
        ConfigError: no such file, or a model this engine would compute wrongly.
    """
    raw = read_config(folder / "config.json", "checkpoint")
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise _wrong(folder, f"config.json: model_type is {kind!r}; this engine computes {known}")
    for name in ("quantization_config", "use_sliding_window", "mlp_bias"):
        if raw.get(name):
            raise _wrong(folder, f"config.json sets {name}, which is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise _wrong(folder, "config.json: hidden_act must be silu")
    rope = raw.get("rope_parameters") or {}
    try:
        heads = raw["num_attention_heads"]
        config = ModelConfig(
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            max_position=raw.get("max_position_embeddings", 2048),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, folder),
            qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias")),
            output_bias=kind == "llama" and bool(raw.get("attention_bias")),
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise _wrong(folder, f"its config.json has no {error}") from error
    ends = raw.get("eos_token_id")
    return config, frozenset([ends] if isinstance(ends, int) else ends or [])


def load_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Load ``model.safetensors``, or the shards its index names, in the checkpoint's own dtype.

    Raises:
        ConfigError: a file or a weight is missing, or a weight has another shape than
            ``config.json`` says.
    """
    files = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(read_config(index, "checkpoint").get("weight_map", {}).values())
    wanted = expected_shapes(config)
    state = {
        name: tensor
        for file in sorted(files)
        for name, tensor in _tensors(folder / file)
        if name in wanted
    }
    for name, shape in wanted.items():
        found = tuple(state[name].shape) if name in state else "nothing"
        if found != shape:
            raise _wrong(folder, f"{name} should be {shape}, the folder has {found}")
    return state


def _wrong(path: Path, why: str) -> ConfigError:
    return ConfigError("checkpoint", str(path), why)


def _rope_scaling(raw: Mapping[str, Any], folder: Path) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=raw["factor"])
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=raw["factor"],
            low_freq_factor=raw["low_freq_factor"],
            high_freq_factor=raw["high_freq_factor"],
            original_max_position=raw["original_max_position_embeddings"],
        )
    raise _wrong(folder, f"its RoPE scaling {kind!r} is none of default, linear, llama3")


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        remedy = "reading it needs an extra: pip install 'kvoffload[checkpoints]'"
        raise _wrong(path, remedy) from error
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
