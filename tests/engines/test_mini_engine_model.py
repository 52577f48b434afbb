"""The decoder against a dense forward pass; weights from seeds and from checkpoint folders."""

import json
import math

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from kvoffload.demo.decoder import Model, rope_tables
from kvoffload.demo.engine_config import ModelConfig, RopeScaling, parse_engine_config
from kvoffload.demo.sampling import SamplingParams, sample
from kvoffload.demo.tokenizer import ByteTokenizer, open_tokenizer
from kvoffload.demo.weights import (
    expected_shapes,
    fingerprint,
    load_weights,
    random_weights,
    read_model_config,
)
from kvoffload.errors import ConfigError

HF_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "eos_token_id": [7, 9],
}
HF_QWEN2 = {**HF_LLAMA, "model_type": "qwen2", "tie_word_embeddings": True, "eos_token_id": 7}


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


def write_checkpoint(folder, raw, *, shards=1, seed=3):
    """Write a Hugging Face folder of random weights; returns its shape and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    config, _ = read_model_config(folder)
    state = random_weights(config, seed)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return config, state
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        part = {name: state[name] for name in state if weight_map[name] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return config, state


@pytest.mark.parametrize("qwen", [False, True])
def test_logits_equal_those_of_a_dense_forward_pass(tiny, dense_logits, qwen):
    config = ModelConfig(**tiny, qkv_bias=qwen, tie_embeddings=qwen)
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


@pytest.mark.parametrize("raw", [HF_LLAMA, HF_QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_checkpoint_loads_as_it_was(tmp_path, raw, shards):
    config, state = write_checkpoint(tmp_path, raw, shards=shards)
    loaded = load_weights(tmp_path, config)
    assert fingerprint(loaded) == fingerprint(state)
    assert config.qkv_bias == (raw["model_type"] == "qwen2")
    assert config.rope_theta == 5000.0


def test_both_ways_to_write_the_end_token_are_read(tmp_path):
    write_checkpoint(tmp_path / "list", HF_LLAMA)
    write_checkpoint(tmp_path / "one", HF_QWEN2)
    assert read_model_config(tmp_path / "list")[1] == {7, 9}
    assert read_model_config(tmp_path / "one")[1] == {7}


def test_rope_settings_are_read_in_their_old_and_new_places(tmp_path):
    stretch = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = {**HF_LLAMA, "rope_scaling": stretch}
    new = {**HF_LLAMA, "rope_parameters": {**stretch, "rope_theta": 5000.0}}
    del new["rope_theta"]
    configs = [write_checkpoint(tmp_path / str(i), raw)[0] for i, raw in enumerate((old, new))]
    assert configs[0] == configs[1]
    assert configs[0].rope_scaling.kind == "llama3"


def test_llama3_scaling_keeps_fast_waves_and_stretches_slow_ones(tiny):
    plain = ModelConfig(**{**tiny, "head_size": 64})
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_position=128)
    scaled = msgspec.structs.replace(plain, rope_scaling=scaling)
    cpu = torch.device("cpu")
    (_, sin), (_, stretched) = rope_tables(plain, 2, cpu), rope_tables(scaled, 2, cpu)
    angles, new_angles = sin[1].asin().double(), stretched[1].asin().double()
    torch.testing.assert_close(new_angles[1], angles[1])
    torch.testing.assert_close(new_angles[-1], angles[-1] / 8)
    assert (new_angles <= angles * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"vocab_size": 300}, "model.embed_tokens.weight"),
    ],
)
def test_a_checkpoint_this_engine_would_compute_wrongly_is_refused(tmp_path, change, words):
    write_checkpoint(tmp_path, HF_LLAMA)
    (tmp_path / "config.json").write_text(json.dumps({**HF_LLAMA, **change}))
    with pytest.raises(ConfigError, match=words):
        load_weights(tmp_path, read_model_config(tmp_path)[0])


@pytest.mark.parametrize("damage", ["no folder", "no config", "no weights", "broken weights"])
def test_an_incomplete_checkpoint_is_refused_with_its_path(tmp_path, damage):
    folder = tmp_path / "model"
    if damage != "no folder":
        write_checkpoint(folder, HF_LLAMA)
    if damage == "no config":
        (folder / "config.json").unlink()
    if damage == "no weights":
        (folder / "model.safetensors").unlink()
    if damage == "broken weights":
        (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError) as caught:
        load_weights(folder, read_model_config(folder)[0])
    assert caught.value.field == "checkpoint"
    assert str(folder) in str(caught.value)


def test_expected_shapes_name_all_weights_of_random_models(tiny):
    config = ModelConfig(**tiny, qkv_bias=True, output_bias=True)
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
        ({"attention": "flash"}, "attention"),
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


def test_bytes_come_back_as_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Größe ↔ 5")) == "Größe ↔ 5"
    assert tokenizer.decode([104, 105, tokenizer.EOS, 300]) == "hi"


def test_a_checkpoints_own_tokenizer_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?")
    own = tokenizers.Tokenizer(words)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).encode("world hello") == [1, 0]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        open_tokenizer(tmp_path)
