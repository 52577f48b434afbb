"""Random weights from a seed, under the names of a Hugging Face Llama."""

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvoffload.demo.engine_config import ModelConfig


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
        shapes[f"{at}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
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
