"""Fixtures of the mini engine's tests: a tiny model, and the plainest way to compute it."""

import math

import pytest
import torch

from kvoffload.demo.engine_config import ModelConfig

TINY = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "intermediate_size": 96,
    "vocab_size": 272,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    """Settings of a tiny model, as plain data."""
    return dict(TINY)


@pytest.fixture
def dense_logits():
    return _dense_logits


@pytest.fixture
def dense_generate():
    """Greedy decoding with a whole-sequence forward pass for every token."""

    def generate(config, state, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(_dense_logits(config, state, tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])

    return generate


def _dense_logits(config: ModelConfig, state, tokens):
    """Logits of every position, from the formulas: no cache, no batch, no packed weights."""
    n, half = len(tokens), config.head_size // 2
    x = state["model.embed_tokens.weight"][torch.tensor(tokens)]
    angle = torch.outer(
        torch.arange(n, dtype=torch.float32),
        config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half),
    )
    causal = torch.full((n, n), -math.inf).triu(1)

    def norm(v, name):
        return v / torch.sqrt((v * v).mean(-1, keepdim=True) + config.rms_norm_eps) * state[name]

    def turn(v):
        a, b = v[..., :half], v[..., half:]
        c, s = angle.cos(), angle.sin()
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    for i in range(config.num_layers):
        p = f"model.layers.{i}."

        def linear(v, name, p=p):
            return v @ state[f"{p}{name}.weight"].T

        def heads(v, name, linear=linear):
            y = linear(v, f"self_attn.{name}_proj")
            return y.view(n, -1, config.head_size).transpose(0, 1)

        h = norm(x, p + "input_layernorm.weight")
        q, k, v = turn(heads(h, "q")), turn(heads(h, "k")), heads(h, "v")
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        weights = (q @ k.transpose(1, 2) / math.sqrt(config.head_size) + causal).softmax(-1)
        x = x + linear((weights @ v).transpose(0, 1).reshape(n, -1), "self_attn.o_proj")
        h = norm(x, p + "post_attention_layernorm.weight")
        gate = linear(h, "mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm.weight") @ state["lm_head.weight"].T
