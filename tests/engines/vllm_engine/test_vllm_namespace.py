"""Which configurations of a real vLLM share chunks: no two whose KV cache may differ."""

import contextlib
import dataclasses
import enum
import json
import logging
import re
import shutil
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import vllm.config
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.worker import gpu_model_runner

from kvoffload.connectors.vllm import engine_weights, fingerprint, longest_request
from kvoffload.connectors.vllm import harmless_fields as harmless
from kvoffload.connectors.vllm.longest_request import length_fact, long_rope
from kvoffload.connectors.vllm.variables import ELSEWHERE, HARMLESS_OF_KERNELS, is_fact, variables
from kvoffload.errors import ConfigError
from kvoffload.identity import namespace
from tests.engines.vllm_engine import read_elsewhere
from tests.engines.vllm_engine.configs import config_of, facts_of

KNOWN_FACTS = frozenset((Path(__file__).parent / "known_facts.txt").read_text().split())
"""Fields and variables that were looked at, and may change a byte of the KV cache."""
READ_ELSEWHERE = re.compile(
    r"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[(\[]|getenv\()\s*["']([A-Z][A-Z0-9_]+)["']"""
)
LENGTH_WAS_READ_IN = frozenset(
    {
        "model_executor/kernels/attention/dsa/candidate_blocks.py",
        "model_executor/layers/attention/mla_attention.py",
        "model_executor/layers/attention/sparse_mla_attention.py",
        "model_executor/layers/attention/static_sink_attention.py",
        "model_executor/layers/indexer_topk.py",
        "model_executor/layers/quantization/modelopt_block_quant.py",
        "model_executor/layers/rocm_paged_mxfp4_indexer.py",
        "model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py",
        "model_executor/layers/sparse_attn_indexer.py",
        "v1/attention/backends/b12x.py",
        "v1/attention/backends/flashinfer.py",
        "v1/attention/backends/flex_attention.py",
        "v1/attention/backends/hpc_attn.py",
        "v1/attention/backends/mla/flashmla_sparse.py",
        "v1/attention/backends/mla/indexer.py",
        "v1/attention/backends/mla/rocm_aiter_mla.py",
        "v1/attention/backends/mla/rocm_aiter_mla_sparse.py",
        "v1/attention/backends/mla/rocm_paged_mxfp4_indexer.py",
        "v1/attention/backends/mla/sparse_swa.py",
        "v1/attention/backends/mla/sparse_utils.py",
        "v1/attention/backends/mla/triton_mla.py",
        "v1/attention/backends/mla/xpu_mla_sparse.py",
        "v1/attention/backends/rocm_attn.py",
        "v1/attention/backends/rocm_segmented_attn.py",
        "v1/attention/backends/triton_attn.py",
        "v1/attention/backends/turboquant_attn.py",
        "v1/attention/backends/ultraquant_attn.py",
        "v1/attention/backends/utils.py",
        "v1/attention/ops/flydsl_turboquant_decode.py",
        "v1/attention/ops/rocm_aiter_mla_sparse.py",
        "v1/attention/ops/rocm_paged_mxfp4_indexer.py",
    }
)
"""They size buffers by it, but for the rotations of long ropes, which have a fact of their own."""
PLAIN = {"rope_theta": 1e4, "rope_type": "default"}
ROPE = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


@pytest.fixture(autouse=True)
def loaded_models(monkeypatch):
    """Modules of models that count as loaded; other tests of this process may have loaded more."""
    loaded = []
    monkeypatch.setattr(longest_request, "_loaded_models", lambda: loaded)
    return loaded


def known(model, options=None, **settings):
    return namespace(**facts_of(config_of(model, **(options or {})), **settings))


# ---- every field and variable is sorted ----


def configurations(cls=VllmConfig, prefix="", seen=()):
    """Yield the dotted name of each field of vLLM's configuration, and those in it."""
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        yield name
        inner = CLASS_OF.get(field.name)
        if inner and inner not in seen and name not in harmless.FIELDS:
            yield from configurations(inner, f"{name}.", (*seen, inner))


def class_of(name):
    found = getattr(vllm.config, name, None)
    return found if dataclasses.is_dataclass(found) else None


CLASS_OF = {
    "".join("_" * (i > 0) + c.lower() if c.isupper() else c for i, c in enumerate(name)): found
    for name in dir(vllm.config)
    if (found := class_of(name))
}
CLASS_OF |= {
    "lora_config": vllm.config.LoRAConfig,
    "multimodal_config": vllm.config.MultiModalConfig,
    "kv_transfer_config": vllm.config.KVTransferConfig,
    "kv_events_config": vllm.config.KVEventsConfig,
    "ec_transfer_config": vllm.config.ECTransferConfig,
}


def all_names():
    yield from configurations()
    for prefix, cls, left_out in (
        ("lora.", vllm.config.LoRAConfig, harmless.OF_LORA),
        ("speculative_config.", vllm.config.SpeculativeConfig, harmless.OF_SPECULATION),
    ):
        yield from (
            prefix + field.name for field in dataclasses.fields(cls) if field.name not in left_out
        )
    yield from (f"env.{name}" for name in envs.environment_variables)


def is_harmless(name):
    return name in harmless.FIELDS or name.removeprefix("env.") in harmless.VARIABLES


def test_every_field_and_variable_of_this_vllm_is_known_to_be_a_fact_or_harmless():
    """An unknown one counts as a fact; this test says that somebody should look at it."""
    names = set(all_names())
    assert len(names) > 600
    unknown = {name for name in names if not is_harmless(name)} - KNOWN_FACTS
    assert not unknown, f"look at what reads these, then list them: {sorted(unknown)}"
    both = {name for name in KNOWN_FACTS if is_harmless(name)}
    assert not both


def changed(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        others = [each for each in type(value) if each is not value]
        return others[0] if others else "another"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.5
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, dict):
        return {**value, "another": 1}
    if isinstance(value, set):
        return {*value, "another"}
    if isinstance(value, list | tuple):
        return [*value, "another"]
    return "another" if value is None else None


def fields_of(config, prefix=""):
    """Yield a name, an object and its field for each field of a configuration and those in it."""
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not hasattr(value, "to_dict"):
            yield from fields_of(value, f"{name}.")
        else:
            yield name, config, field.name


RESOLVED = frozenset(
    {
        # read again to make facts of their own: what they came to decides
        "model_config.dtype", "model_config.hf_config", "model_config.model_weights",
        "model_config.model", "model_config.generation_config", "model_config.seed",
        "model_config.hf_config_path", "model_config.model_impl",
        "cache_config.block_size", "cache_config.cache_dtype", "cache_config.kv_cache_layout",
        "cache_config.prefix_caching_hash_algo", "load_config.load_format",
        "load_config.model_loader_extra_config", "model_config.override_generation_config",
        "parallel_config.tensor_parallel_size", "parallel_config.rank",
        "compilation_config.static_forward_context", "kv_transfer_config.engine_id",
        "lora_config", "speculative_config",
    }
)  # fmt: skip


def test_another_value_of_a_field_is_another_namespace_unless_the_field_is_harmless(model):
    config = config_of(model)
    first = namespace(**facts_of(config))
    tried, wrong = 0, []
    for name, owner, field in list(fields_of(config)):
        if name in RESOLVED:
            continue
        before = getattr(owner, field)
        object.__setattr__(owner, field, changed(before))
        try:
            differs = namespace(**facts_of(config)) != first
        finally:
            object.__setattr__(owner, field, before)
        tried += 1
        may_share = any(name == each or name.startswith(f"{each}.") for each in harmless.FIELDS)
        if differs is may_share:
            wrong.append(name)
    assert tried > 300
    assert not wrong
    assert namespace(**facts_of(config)) == first


def test_another_value_of_a_variable_is_another_namespace_unless_it_is_harmless(monkeypatch):
    first = variables()
    for name in envs.environment_variables:
        before = getattr(envs, name, None)
        other = "another"

        def told(asked, name=name, other=other, before=before):
            return other if asked == name else before

        with monkeypatch.context() as patched:
            patched.setattr(envs, name, other, raising=False)
            assert (variables() != first) == (name not in harmless.VARIABLES), name


def test_a_variable_that_cannot_be_read_ends_no_start(monkeypatch):
    def fail():
        raise ValueError("must be a number")

    monkeypatch.setitem(envs.environment_variables, "VLLM_BATCH_INVARIANT", fail)
    assert "must be a number" in variables()["env.VLLM_BATCH_INVARIANT"]


def test_a_field_of_tomorrow_is_a_fact(model):
    @dataclasses.dataclass
    class Tomorrow(type(config_of(model).cache_config)):
        rounds_kv: bool = False

    def told(rounds):
        config = config_of(model)
        later = Tomorrow.__new__(Tomorrow)
        later.__dict__.update(vars(config.cache_config), rounds_kv=rounds)
        config.cache_config = later
        return namespace(**facts_of(config))

    assert told(False) != told(True)


# ---- pairs ----


def quantized(how):
    return {"quantization": "online", "quantization_config": {"linear": how}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, {"dtype": "float32"}, id="dtype"),
        pytest.param(
            {}, {"hf_overrides": {"rope_parameters": {**PLAIN, "rope_theta": 5e5}}}, id="theta"
        ),
        pytest.param(
            {},
            {"hf_overrides": {"rope_parameters": {**ROPE, "original_max_position_embeddings": 9}}},
            id="yarn",
        ),
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, id="kv dtype"),
        pytest.param({}, {"prefix_caching_hash_algo": "sha256_cbor"}, id="hash"),
        pytest.param(
            {"enable_lora": True},
            {"enable_lora": True, "lora_target_modules": ["o_proj"]},
            id="target modules",
        ),
        pytest.param(
            {"enable_lora": True}, {"enable_lora": True, "lora_dtype": "float16"}, id="lora dtype"
        ),
        pytest.param({"load_format": "dummy"}, {"load_format": "dummy", "seed": 1}, id="seed"),
        pytest.param({}, {"load_format": "dummy"}, id="dummy"),
        pytest.param({}, {"model_impl": "transformers"}, id="implementation"),
        pytest.param(quantized("fp8_per_tensor"), quantized("mxfp8"), id="quantization"),
        pytest.param(
            {"quantization": "fp8_per_tensor"},
            {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["*attn*"]}},
            id="left out of quantization",
        ),
        pytest.param({}, {"disable_sliding_window": True}, id="windows"),
        pytest.param(
            {},
            {"override_generation_config": {"attn_temperature_tuning": False}},
            id="a setting of generation that a model reads",
        ),
    ],
)
def test_configurations_with_other_kv_have_other_namespaces(model, one, other):
    assert known(model, one) != known(model, other)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_seqs": 7, "max_num_batched_tokens": 4096}, id="sizes"),
        pytest.param({"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 100}, id="memory"),
        pytest.param({"enforce_eager": False}, id="graphs"),
        pytest.param({"enable_chunked_prefill": True}, id="chunked prefill"),
        pytest.param({"served_model_name": "x"}, id="name"),
        pytest.param({"seed": 5}, id="seed of sampling"),
        pytest.param({"kv_cache_dtype": "bfloat16"}, id="the dtype that auto means"),
        pytest.param({"enable_lora": True}, id="adapters allowed"),
        pytest.param({"enable_lora": True, "max_lora_rank": 64, "max_loras": 4}, id="lora sizes"),
        pytest.param({"max_model_len": 2048}, id="length"),
        pytest.param({"model_impl": "vllm"}, id="the implementation that auto means"),
        pytest.param({"enable_prefix_caching": False}, id="prefix caching"),
        pytest.param({"data_parallel_size": 2}, id="replicas"),
        pytest.param({"hf_overrides": {"_name_or_path": "x"}}, id="override of a name"),
        pytest.param({"override_generation_config": {"temperature": 0.1}}, id="temperature"),
        pytest.param({"max_logprobs": 5, "disable_log_stats": True}, id="outputs"),
        pytest.param(
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            id="n-grams",
        ),
    ],
)
def test_configurations_with_the_same_kv_share_chunks(model, options):
    first, second = facts_of(config_of(model)), facts_of(config_of(model, **options))
    differ = {
        name: (first.get(name), second.get(name))
        for name in {*first, *second}
        if first.get(name) != second.get(name) and not name.startswith("label.")
    }
    assert not differ
    assert namespace(**first) == namespace(**second)


def test_settings_of_ours_that_change_no_byte_share_chunks(model):
    first = known(model)
    assert known(model, cpu_bytes="32MiB", policy="arc", io="thread") == first
    assert known(model, offload_prompt_only=False) == first
    assert known(model, blocks_per_chunk=4) != first


# ---- weights ----


@pytest.mark.parametrize(
    "source",
    [
        {"model_weights": "s3://bucket/v1", "load_format": "runai_streamer"},
        {
            "load_format": "tensorizer",
            "model_loader_extra_config": {"tensorizer_uri": "s3://b/v1/model.tensors"},
        },
        {"model_loader_extra_config": {"an_option_of_tomorrow": 1}},
        {"load_format": "modelexpress"},
    ],
)
def test_weights_that_the_folder_does_not_have_are_shared_with_no_other_start(
    model, source, caplog
):
    logging.getLogger("kvoffload").addHandler(caplog.handler)  # where vLLM's logs go otherwise
    try:
        assert known(model, source) != known(model, source)
    finally:
        logging.getLogger("kvoffload").removeHandler(caplog.handler)
    assert "Set weights_id" in caplog.text
    assert known(model, source, weights_id="v1") == known(model, source, weights_id="v1")
    assert known(model, source, weights_id="v1") != known(model, source, weights_id="v2")


def test_weights_that_a_joining_rank_gets_from_the_others_are_no_dummy_ones(model, monkeypatch):
    """In elastic expert parallelism vLLM makes dummy weights first, and keeps the name of those."""

    def make_none(load_config):
        raise LookupError

    def joined(**settings):
        config = config_of(model)
        runner = types.SimpleNamespace(
            model_config=config.model_config,
            parallel_config=config.parallel_config,
            load_config=config.load_config,
        )
        with pytest.raises(LookupError):
            gpu_model_runner.GPUModelRunner.load_model(runner, load_dummy_weights=True)
        assert config.load_config.load_format == "dummy"
        return namespace(**facts_of(config, **settings))

    monkeypatch.setattr(gpu_model_runner, "get_model_loader", make_none)
    monkeypatch.setattr(gpu_model_runner, "DeviceMemoryProfiler", contextlib.nullcontext)
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    assert joined() != joined()
    assert joined(weights_id="v1") == joined(weights_id="v1")


def test_which_files_of_a_folder_are_read_is_a_fact(model, tmp_path):
    """A folder may have the weights of several models, each in a form of its own."""
    folder = tmp_path / "several"
    shutil.copytree(model, folder)
    (folder / "consolidated.safetensors").write_bytes(b"other")
    (folder / "pytorch_model.bin").write_bytes(b"another")
    (folder / "x.pt").write_bytes(b"one more")

    def told(load_format):
        return known(folder, {"load_format": load_format, "config_format": "hf"})

    formats = ("safetensors", "mistral", "pt", "npcache")
    assert len({told(each) for each in formats}) == 4
    assert told("auto") == told("mistral")
    assert told("hf") == told("fastsafetensors") == told("safetensors")


def test_weights_in_a_subfolder_and_those_of_another_model_count(model, tmp_path):
    folder = tmp_path / "audio"
    shutil.copytree(model, folder)
    before = facts_of(config_of(folder))["weights"]
    (folder / "whisper").mkdir()
    (folder / "whisper/model.safetensors").write_bytes(b"an encoder")
    assert facts_of(config_of(folder))["weights"] != before
    named = config_of(folder)
    named.model_config.hf_config.text_model_id = "org/model"
    told = [facts_of(named)["weights"] for _ in range(2)]
    assert told[0] != told[1]
    assert facts_of(named, weights_id="v7")["weights"] == "v7"


def test_a_file_that_says_how_to_quantize_counts_by_its_content(model, tmp_path):
    file, config = tmp_path / "torchao.json", config_of(model)
    config.model_config.hf_overrides = {"quantization_config_file": str(file)}

    def told(text):
        file.write_text(text)
        return namespace(**facts_of(config))

    assert told("8 bits") == told("8 bits") != told("4 bits")


def test_variables_that_vllm_reads_elsewhere_are_sorted():
    """A name that is new here may change a byte of the KV cache: read what it does."""
    home = Path(vllm.config.__file__).parents[1]
    found = {
        name
        for file in home.rglob("*.py")
        for name in READ_ELSEWHERE.findall(file.read_text(errors="replace"))
    } - envs.environment_variables.keys()
    assert len(found) > 50
    harmless = HARMLESS_OF_KERNELS | read_elsewhere.HARMLESS
    assert not {name for name in found if not is_fact(name)} - harmless
    assert not ELSEWHERE & harmless
    assert not any(map(is_fact, harmless))


def test_a_variable_of_a_kernel_is_a_fact_where_it_is_set(model, monkeypatch):
    before = known(model)
    for name in ("FLA_TRIL_PRECISION", "XHS_VIDEO_JPEG_QUALITY", "AITER_OF_TOMORROW"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "tf32")
            assert known(model) != before
    for name in ("OMP_NUM_THREADS", "FA_LOG_LEVEL"):
        monkeypatch.setenv(name, "3")
    assert known(model) == before


def test_an_engine_id_set_by_hand_names_no_weights(model):
    def started():
        config = config_of(model, model_weights="s3://b", load_format="runai_streamer")
        config.kv_transfer_config.engine_id = "decode-0"
        return namespace(**facts_of(config))

    assert started() != started()


def test_the_copy_of_another_hub_names_no_weights(model, monkeypatch):
    config = config_of(model)
    config.model_config.model = "org/name"
    config.model_config.revision = "a" * 40
    first = namespace(**facts_of(config))
    assert first == namespace(**facts_of(config))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert namespace(**facts_of(config)) != namespace(**facts_of(config))


def test_a_loader_of_a_plug_in_under_a_known_name_names_no_weights(model, monkeypatch):
    from vllm.model_executor import model_loader

    class Mine(model_loader.DefaultModelLoader):
        pass

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Mine)
    assert known(model) != known(model)


def test_another_draft_model_is_another_namespace(model, tmp_path):
    from safetensors.torch import load_file, save_file

    def with_draft(folder):
        draft = {"model": str(folder), "num_speculative_tokens": 2, "method": "draft_model"}
        return known(model, {"speculative_config": draft})

    one, copy, other = (tmp_path / name for name in ("one", "copy", "other"))
    for folder in (one, copy, other):
        shutil.copytree(model, folder)
    state = load_file(other / "model.safetensors")
    save_file({name: value * 2 for name, value in state.items()}, other / "model.safetensors")
    assert with_draft(one) == with_draft(copy)
    assert len({with_draft(one), with_draft(other), known(model)}) == 3


def test_the_setting_names_the_weights_of_the_draft_too(model, tmp_path, monkeypatch):
    """Else a draft that nothing tells makes each start cold, whatever the warning asks for."""
    shutil.copytree(model, tmp_path / "draft")
    draft = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    options = {"speculative_config": {**draft, "method": "draft_model"}}
    monkeypatch.setattr(engine_weights, "reads_files", lambda model, loading: False)
    assert known(model, options) != known(model, options)
    assert known(model, options, weights_id="w") == known(model, options, weights_id="w")


# ---- what models read ----


def llama4(folder, model):
    text = {
        "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 64,
        "intermediate_size_mlp": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "num_local_experts": 2,
        "num_experts_per_tok": 1, "max_position_embeddings": 131072,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192,
    }  # fmt: skip
    text |= {"architectures": ["Llama4ForCausalLM"], "torch_dtype": "bfloat16"}
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model) / name, folder)
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def test_llama_4_tunes_its_temperature_by_the_longest_request(model, tmp_path, loaded_models):
    from vllm.model_executor.models import llama4 as code

    loaded_models.append(code)  # as its worker has
    folder = llama4(tmp_path / "llama4", model)

    def told(**options):
        return known(folder, {"load_format": "dummy", **options})

    short, long = told(max_model_len=32768), told(max_model_len=65536)
    overridden = told(
        max_model_len=65536, override_generation_config={"attn_temperature_tuning": False}
    )
    assert len({short, long, overridden}) == 3


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_the_length_of_a_long_rope_model_chooses_its_factors(name):
    def rotated(longest, **more):
        rope = {"rope_type": "longrope", **more}
        config = types.SimpleNamespace(**{name: rope}, original_max_position_embeddings=4096)
        return long_rope(types.SimpleNamespace(hf_config=config, max_model_len=longest))

    assert [rotated(4096), rotated(4097)] == [False, True]
    assert rotated(4097, original_max_position_embeddings=8192) is False


def test_rotations_that_may_depend_on_the_length_make_it_a_fact(model):
    def told(kind, longest):
        config = config_of(model, max_model_len=longest)
        config.model_config.hf_config.rope_parameters = {"rope_type": kind, "factor": 2.0}
        return length_fact(config.model_config)

    assert told("yarn", 2048) is None
    assert [told("dynamic", longest) for longest in (2048, 4096)] == [2048, 4096]
    assert told("of tomorrow", 2048) == 2048


def test_a_model_of_a_plug_in_may_read_the_length(model, monkeypatch):
    from vllm import ModelRegistry

    class Mine:
        pass

    config = config_of(model)
    assert length_fact(config.model_config) is None
    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", Mine)
    assert length_fact(config.model_config) == 4096


def test_the_code_that_reads_the_length_was_read():
    """A file that is new here may compute another KV cache for another length: read it."""
    home = Path(vllm.config.__file__).parents[1]
    found = {
        str(file.relative_to(home))
        for part in ("model_executor/layers", "model_executor/kernels", "v1/attention")
        for file in (home / part).rglob("*.py")
        if "max_model_len" in file.read_text()
    }
    assert found
    assert found <= LENGTH_WAS_READ_IN


def test_an_upgrade_within_a_series_keeps_the_namespace(model, monkeypatch):
    def told(version):
        monkeypatch.setattr(fingerprint, "installed_version", lambda: version)
        return known(model)

    series = ("0.33.0", "0.33.1", "0.33.0+cu130", "0.33.2.post1+cpu")
    assert len({told(version) for version in series}) == 1
    others = ("0.32.0", "0.33.0rc1", "0.33.1.dev4+gabcdef", "0.34.0", "0.34.1", "not installed")
    assert len({told(version) for version in others} - {told("0.33.0")}) == len(others)


def test_dtypes_and_shapes_of_recurrent_states_are_part_of_the_identity():
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs

    def told(*dtypes, shapes=((4, 3), (8, 16)), uniform=False):
        spec = MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes)
        if uniform:
            spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"layers.0": spec})
        group = KVCacheGroupSpec(["layers.0"], spec)
        return fingerprint.recurrent_states(types.SimpleNamespace(kv_cache_groups=[group]))

    half, brain = torch.float16, torch.bfloat16
    for uniform in (False, True):
        assert "layers.0" in told(half, half, uniform=uniform)
        states = {
            told(half, half, uniform=uniform),
            told(half, brain, uniform=uniform),  # mamba_ssm_cache_dtype
            told(brain, brain, uniform=uniform),  # mamba_cache_dtype
            told(half, half, shapes=((3, 4), (8, 16)), uniform=uniform),  # the layout of a state
        }
        assert len(states) == 4


def test_a_scale_file_counts_by_its_content(model, tmp_path):
    from vllm.config import MultiModalConfig

    scales = tmp_path / "scales.json"
    config = config_of(model)

    def told(text):
        scales.write_text(text)
        config.model_config.multimodal_config = MultiModalConfig(
            mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)
        )
        return namespace(**facts_of(config))

    assert told("1") == told("1") != told("2")
    scales.unlink()
    with pytest.raises(ConfigError, match="mm_encoder_fp8_scale_path"):
        facts_of(config)


@pytest.mark.parametrize(
    "media",
    [
        {"video_pruning_rate": 0.5, "video_pruning_method": "evs"},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
    ],
)
def test_how_media_become_tokens_is_a_fact(model, media):
    from vllm.config import MultiModalConfig

    config = config_of(model)
    config.model_config.multimodal_config = MultiModalConfig()
    first = namespace(**facts_of(config))
    config.model_config.multimodal_config = MultiModalConfig(**media)
    assert namespace(**facts_of(config)) != first
    config.model_config.multimodal_config = MultiModalConfig(limit_per_prompt={"image": 3})
    assert namespace(**facts_of(config)) == first


# ---- ranks and platforms ----


def test_a_latent_cache_is_the_same_for_each_number_of_ranks(model):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    latent = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)

    def told(size, rank, replicated, spec):
        config = config_of(model)
        parallel = config.parallel_config
        parallel.tensor_parallel_size = parallel.world_size = size
        parallel.rank = rank
        return namespace(**facts_of(config, spec=spec, replicated=replicated))

    alone = told(1, 0, False, latent)
    assert {told(size, size - 1, True, latent) for size in (2, 4)} == {alone}
    sharded = [told(size, rank, False, None) for size, rank in ((1, 0), (2, 0), (2, 1))]
    assert len({alone, *sharded}) == 4


def test_a_processor_with_another_order_of_bytes_has_another_namespace(model):
    config = config_of(model)

    def told(order):
        layers = config.compilation_config.static_forward_context
        for i in range(4):
            name = f"model.layers.{i}.self_attn.attn"
            layers[name] = types.SimpleNamespace(isa=order, attn_backend=None)
        return facts_of(config)["platform"]

    assert told("amx") != told("vec")
    assert "amx" in told("amx")


def test_the_manifest_names_the_model_and_shows_no_secret(model):
    facts = facts_of(config_of(model, hf_token="hf_secret"))
    assert facts["label.model"] == model
    assert "hf_secret" not in json.dumps(facts)
