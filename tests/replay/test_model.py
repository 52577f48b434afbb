"""Bytes a token, as the published figures of known architectures have them."""

import json

import pytest

from kvoffload.errors import ConfigError
from kvoffload.replay.model import bytes_per_token, read_config
from kvoffload.replay.sizing import size_for_share

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def test_grouped_query_attention():
    assert bytes_per_token(LLAMA_8B) == 128 * 1024
    assert bytes_per_token(LLAMA_8B, "fp8") == 64 * 1024


def test_ranks_beyond_the_kv_heads_hold_copies():
    assert bytes_per_token(LLAMA_8B, tensor_parallel=8) == 128 * 1024
    assert bytes_per_token(LLAMA_8B, tensor_parallel=16) == 256 * 1024
    for ranks in (3, 12):  # no engine cuts a head
        with pytest.raises(ConfigError, match=f"tensor_parallel = {ranks}: must divide the 8 KV"):
            bytes_per_token(LLAMA_8B, tensor_parallel=ranks)


def test_latent_attention_keeps_one_latent_a_layer_and_rank():
    assert bytes_per_token(DEEPSEEK_V3) == 61 * 576 * 2
    assert bytes_per_token(DEEPSEEK_V3, tensor_parallel=8) == 8 * 61 * 576 * 2


def test_layers_with_a_recurrent_state_hold_no_tokens():
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    assert bytes_per_token(LLAMA_8B | {"layer_types": kinds}) == 32 * 1024


def test_a_multimodal_model_counts_its_language_half(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA_8B}))
    assert bytes_per_token(read_config(tmp_path)) == 128 * 1024


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"torch_dtype": "posit8"}, "model.torch_dtype"),
        ({"torch_dtype": ["bfloat16"]}, "model.torch_dtype"),
        ({"torch_dtype": None, "dtype": {"a": 1}}, "model.dtype"),
        ({"layer_types": ["mamba"] * 32}, "model.layer_types"),
        ({"layer_types": 32}, "model.layer_types"),
        ({"hidden_size": 8}, "num_attention_heads"),
    ],
)
def test_a_config_that_cannot_be_is_named_by_field(change, field):
    with pytest.raises(ConfigError, match=field):
        bytes_per_token(LLAMA_8B | change)


def test_a_config_without_head_size_is_refused():
    config = {key: value for key, value in LLAMA_8B.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match="hidden_size"):
        bytes_per_token(config)


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '{"a": 1e999}'])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="model"):
        read_config(path)


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model = .*cannot be read"):
        read_config(tmp_path / ("x" * 300))


def test_the_answer_lies_between_the_points_around_it():
    points = [(10, 0.1), (20, 0.2), (40, 0.4)]
    assert size_for_share(points, 0.5).blocks == 20
    assert size_for_share(points, 0.75).blocks == 28  # 20 times the root of 2
    assert size_for_share(points, 1.0).blocks == 40
    assert size_for_share(points, 0.01).blocks == 10
