"""Pairs of configurations that a hostile reader found; each is red without its fact."""

import json
import shutil
import sys
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
import vllm.platforms
from vllm import ModelRegistry
from vllm.config import LoRAConfig, MultiModalConfig

from kvoffload.connectors.vllm import fingerprint
from kvoffload.connectors.vllm.fingerprint import platform_fact
from kvoffload.identity import namespace
from tests.engines.vllm_engine.configs import config_of, facts_of


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


def known(config, **settings):
    return namespace(**facts_of(config, **settings))


def experts(model, quantization, **parallel):
    config = config_of(model, kv_cache_dtype="bfloat16")
    config.model_config.quantization = quantization
    config.model_config.model_arch_config.num_experts = 8
    if parallel.pop("lora", False):
        config.lora_config = LoRAConfig(max_lora_rank=8)
        config.lora_config.lora_dtype = config.model_config.dtype
    config.offload_config.uva.cpu_offload_gb = parallel.pop("cpu_offload_gb", 0)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return known(config)


@pytest.mark.parametrize(
    "choice",
    [
        {"lora": True},
        {"enable_expert_parallel": True},
        {"enable_eplb": True},
        {"data_parallel_size": 2},
        {"enable_dbo": True},
        {"cpu_offload_gb": 4},
    ],
)
def test_what_chooses_the_kernels_of_quantized_experts_is_a_fact(model, choice):
    """One rounds activations to 8 bits, the next one to 16: not the same sums in another order."""
    assert experts(model, "mxfp4", **choice) != experts(model, "mxfp4")
    assert experts(model, None, **choice) == experts(model, None)


def test_a_quantized_kv_cache_is_of_one_generation_of_devices(model, monkeypatch):
    """Attention rounds queries to the format of the cache on some, and on others it does not."""

    def told(kind, capability):
        platform = types.SimpleNamespace(
            is_cuda=lambda: True, get_device_capability=lambda: capability
        )
        monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
        config.cache_config.cache_dtype = kind
        return platform_fact(config, {})

    config = config_of(model)
    assert told("auto", "9.0") == told("auto", "10.0") == told("bfloat16", "9.0") == "cuda"
    assert told("fp8", "9.0") != told("fp8", "10.0")


def test_kernels_of_a_quantized_model_follow_the_instruction_set(model, monkeypatch):
    """The order of bytes does not: layers of 32-bit floats have one with AMX and without."""
    config = config_of(model)

    def told(quantization, has_amx):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
        config.model_config.quantization = quantization
        layer = types.SimpleNamespace(isa="vec")
        config.compilation_config.static_forward_context["attn"] = layer
        return platform_fact(config, {"attn": None})

    assert told(None, True) == told(None, False)
    assert told("int8", True) != told("int8", False)


def test_settings_of_generation_of_another_folder_count(model, tmp_path):
    """They come with the configuration of ``--hf-config-path``, and not with the weights."""

    def told(**settings):
        folder = tmp_path / "config"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(f"{model}/config.json", folder)
        (folder / "generation_config.json").write_text(json.dumps(settings))
        return known(config_of(model, hf_config_path=str(folder)))

    assert told(attn_temperature_tuning=True) != told(attn_temperature_tuning=False)
    assert told(temperature=0.5) == told(temperature=0.7)


def test_variables_that_no_source_of_vllm_names_but_kernels_read_are_facts(model, monkeypatch):
    config = config_of(model)
    before = known(config)
    for name in (
        "FLASHINFER_NVFP4_4OVER6",
        "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TRITON_F32_DEFAULT",
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert known(config) != before, name
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/cache")
    assert known(config) == before


def test_the_library_that_reads_media_is_a_fact_of_models_with_media(model, monkeypatch):
    """Its processors turn equal pixels, under one hash, into other features from time to time."""
    config = config_of(model)

    def told(number):
        found = {"transformers": number}
        monkeypatch.setattr(fingerprint, "version", lambda name: found[name])
        return known(config)

    assert told("5.19.0") == told("5.20.0")
    config.model_config.multimodal_config = MultiModalConfig()
    assert told("5.19.0") != told("5.20.0")
    before = told("5.19.0")
    config.model_config.tokenizer = "org/other"  # of Mistral's form, it has sizes of images
    assert told("5.19.0") != before
    transformers = config_of(model, model_impl="transformers")
    config = transformers
    assert told("5.19.0") != told("5.20.0")


def test_a_name_of_the_weights_does_not_tell_how_media_are_read(model, tmp_path):
    folder = tmp_path / "named"
    shutil.copytree(model, folder)

    def told(mean):
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean}))
        return known(config_of(folder), weights_id="v1")

    assert told(0.5) == told(0.5) != told(0.4)
    before = told(0.5)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert told(0.5) == before


@pytest.mark.parametrize("reader", fingerprint.READERS_OF_TOKENIZERS)
def test_the_tokenizer_counts_where_a_model_computes_with_it(model, tmp_path, monkeypatch, reader):
    """An engram's rows are found by the texts of tokens: another tokenizer is another KV cache."""
    folder = tmp_path / "tokenized"
    shutil.copytree(model, folder)

    config = config_of(folder)

    def told(text):
        (folder / "tokenizer.json").write_text(text)
        return known(config)

    assert told("1") == told("2")
    module = types.ModuleType(reader)
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, reader, module)
    assert told("1") == told("1") != told("2")


def test_the_code_that_computes_a_model_is_told_as_it_is_resolved(model, monkeypatch):
    def code(**options):
        config = config_of(model, **options)
        return known(config)

    first = code()
    assert code(model_impl="vllm") == code(runner="generate") == first
    assert code(model_impl="transformers") != first
    assert code(runner="pooling") != first

    class Mine:
        """The model of a plug-in, under a name that vLLM has."""

    architecture = "LlamaForCausalLM"
    entry = types.SimpleNamespace(model_cls=Mine)
    config = config_of(model)
    monkeypatch.setitem(ModelRegistry.models, architecture, entry)
    assert known(config) != first
