"""How many bytes of KV cache a token takes, from a model's ``config.json``."""

from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import ConfigError

_DTYPE_BYTES = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "half": 2.0,
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0, "float8_e4m3fn": 1.0,
}  # fmt: skip
_WITHOUT_KV = ("linear_attention", "mamba", "recurrent", "conv")
"""Layer types whose state does not grow with the prompt."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a ``config.json``, or the one in a model's folder.

    Raises:
        ConfigError: no such file, or not a JSON object.
    """
    try:
        path = path / "config.json" if path.is_dir() else path
        config = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError("model", str(path), f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("model", str(path), f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError("model", str(path), "is nested too deeply") from error
    if not isinstance(config, dict):
        raise ConfigError("model", str(path), "must be a JSON object")
    inner = config.get("text_config")  # the language half of a multimodal model
    return config | inner if isinstance(inner, dict) else config


def _number(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model.{name}", value, "must be a positive whole number")
            return value
    if default is None:
        raise ConfigError(f"model.{names[0]}", None, "is required")
    return default


def bytes_per_token(
    config: dict[str, Any], kv_dtype: str | None = None, tensor_parallel: int = 1
) -> int:
    """Return the KV cache bytes of one token, all layers and ranks together.

    Layers with a sliding window are counted as if they kept every token, as they do in a store of
    prefixes. Layers with a recurrent state are left out.

    Args:
        config: a model's settings as :func:`read_config` returns them.
        kv_dtype: what the cache is stored in; default: the model's own type.
        tensor_parallel: ranks. What they must replicate (too few KV heads, MLA) is counted often.

    Raises:
        ConfigError: a missing or impossible field, an unknown type, or no layer that counts.
    """
    named = {"kv_dtype": kv_dtype} | {
        f"model.{name}": config.get(name) for name in ("torch_dtype", "dtype")
    }
    field, dtype = next((item for item in named.items() if item[1]), ("kv_dtype", "bfloat16"))
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ConfigError(field, dtype, f"known types: {', '.join(_DTYPE_BYTES)}")
    if tensor_parallel < 1:
        raise ConfigError("tensor_parallel", tensor_parallel, "must be at least 1")
    layers = _number(config, "num_hidden_layers", "n_layer")
    if (kinds := config.get("layer_types")) is not None:
        if not isinstance(kinds, list):
            raise ConfigError("model.layer_types", kinds, "must be a list")
        layers = sum(not any(word in str(kind) for word in _WITHOUT_KV) for kind in kinds)
        if not layers:
            remedy = "no layer keeps what grows with the prompt: there is nothing to size"
            raise ConfigError("model.layer_types", sorted(set(map(str, kinds))), remedy)
    if config.get("kv_lora_rank"):  # multi-head latent attention: one latent a token, on each rank
        latent = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim", default=0)
        return round(layers * latent * _DTYPE_BYTES[dtype]) * tensor_parallel
    heads = _number(config, "num_attention_heads", "n_head")
    kv_heads = _number(config, "num_key_value_heads", default=heads)
    if config.get("head_dim") is None:
        head_dim = _number(config, "hidden_size", "n_embd") // heads
        if not head_dim:
            raise ConfigError("model.num_attention_heads", heads, "is more than hidden_size")
    else:
        head_dim = _number(config, "head_dim")
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        remedy = f"must divide the {kv_heads} KV heads of the model, or be a multiple of them"
        raise ConfigError("tensor_parallel", tensor_parallel, remedy)
    copies = max(1, tensor_parallel // kv_heads)
    return round(2 * layers * kv_heads * copies * head_dim * _DTYPE_BYTES[dtype])
