"""The decoder against a dense forward pass; weights from seeds."""

import math

import pytest
import torch

from kvoffload.demo.decoder import Model
from kvoffload.demo.engine_config import ModelConfig, parse_engine_config
from kvoffload.demo.random_weights import expected_shapes, fingerprint, random_weights
from kvoffload.demo.sampling import SamplingParams, sample
from kvoffload.errors import ConfigError


def forward(model, tokens):
    """Logits of all positions, with attention over nothing but the call's own keys and values."""

    def attend(layer, q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        causal = torch.full(scores.shape[1:], -math.inf).triu(1)
        return ((scores + causal).softmax(-1) @ v).transpose(0, 1)

    ids = torch.tensor(tokens)
    return model.logits(model.forward(ids, torch.arange(len(tokens)), attend))


def make_model(config, state, dtype=torch.float32):
    return Model(config, state, device=torch.device("cpu"), dtype=dtype, max_len=256)


def test_logits_equal_those_of_a_dense_forward_pass(tiny, dense_logits):
    config = ModelConfig(**tiny)
    state = random_weights(config, seed=1)
    tokens = torch.randint(0, 256, (77,), generator=torch.Generator().manual_seed(5)).tolist()
    torch.testing.assert_close(
        forward(make_model(config, state), tokens),
        dense_logits(config, state, tokens),
        atol=1e-4,
        rtol=1e-4,
    )


def test_equal_seeds_give_equal_weights_and_other_seeds_others(tiny):
    config = ModelConfig(**tiny)
    assert fingerprint(random_weights(config, 1)) == fingerprint(random_weights(config, 1))
    assert fingerprint(random_weights(config, 1)) != fingerprint(random_weights(config, 2))


def test_one_changed_weight_changes_the_fingerprint(tiny):
    state = random_weights(ModelConfig(**tiny), 1)
    before = fingerprint(state)
    state["model.norm.weight"][5] += 1e-6
    assert fingerprint(state) != before


def test_expected_shapes_name_all_weights_of_random_models(tiny):
    config = ModelConfig(**tiny)
    state = random_weights(config, 0)
    assert {name: tuple(t.shape) for name, t in state.items()} == expected_shapes(config)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"block_sise": 16}, "block_sise"),
        ({"model": {"hiden_size": 3}}, "model.hiden_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 48, "max_model_len": 256}, "block_size"),
        ({"kv_cache_bytes": "many"}, "kv_cache_bytes"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_batched_tokens"),
        ({"dtype": "int4"}, "dtype"),
        ({"model": {"num_heads": 4, "num_kv_heads": 3}}, "model.num_kv_heads"),
        ({"model": {"head_size": 7}}, "model.head_size"),
        ({"offload": {"cpu_bytes": 1}, "enable_prefix_caching": False}, "enable_prefix_caching"),
    ],
)
def test_a_bad_setting_is_named_with_a_remedy(settings, field):
    with pytest.raises(ConfigError) as caught:
        parse_engine_config(settings)
    assert caught.value.field == field
    assert caught.value.remedy


def test_greedy_takes_the_likeliest_token():
    assert sample(torch.tensor([0.0, 3.0, 1.0]), SamplingParams(), 0) == 1


def test_a_draw_depends_on_seed_and_place_alone():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.0, seed=4)
    draws = [sample(logits, params, i) for i in range(40)]
    assert draws == [sample(logits, params, i) for i in range(40)]
    assert len(set(draws)) > 10
    assert draws != [sample(logits, SamplingParams(temperature=1.0, seed=5), i) for i in range(40)]


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    params = SamplingParams(temperature=1.0, seed=1)
    draws = torch.tensor([sample(logits, params, i) for i in range(3000)])
    shares = torch.bincount(draws, minlength=3) / 3000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.04, rtol=0)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temperature": -1.0}])
def test_sampling_settings_that_mean_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingParams(**bad)
