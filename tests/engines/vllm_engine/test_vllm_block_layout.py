"""Which KV cache layout is asked for, and what vLLM makes of the wish."""

import copy
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from kvoffload.connectors.vllm import register, start
from tests.engines.vllm_engine.configs import config_of

ANY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
"""What backends support that declare nothing, as FlashAttention."""
OURS = {
    "kv_connector": "KVOffloadConnector",
    "kv_connector_module_path": "kvoffload.connectors.vllm",
    "kv_role": "kv_both",
}


@pytest.fixture
def resolve(models, monkeypatch):
    """Let vLLM resolve the layout for a model, as its engine does, with the backends' layouts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(start._Lookups, "are_shared", False)
    register()

    def resolve(supported=ANY, *, kind="llama", on_cuda=True, transfer=None, **settings):
        config = copy.copy(config_of(models(kind)))
        extra = {"cpu_bytes": "16MiB", **settings}
        transfer = transfer or {**OURS, "kv_connector_extra_config": extra}
        config.kv_transfer_config = KVTransferConfig(**transfer)
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.kv_cache_layout = None
        with monkeypatch.context() as patched:
            patched.setattr(type(current_platform), "is_cuda", lambda platform: on_cuda)
            return resolve_kv_cache_layout(config, [supported]).name

    return resolve


def test_on_nvidia_gpus_a_block_is_one_piece(resolve):
    assert resolve() == "BLHNC"
    assert resolve(["LBHNC", "BLHNC"]) == "BLHNC"  # FlashInfer on Blackwell
    assert resolve(kind="sliding") == "BLHNC"


def test_a_setting_leaves_the_layout_and_the_environment_of_vllm_decides_before_all(
    resolve, monkeypatch
):
    assert resolve(one_piece_blocks=False) == "LBHNC"
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert resolve() == "LBNHC"


def test_where_attention_has_no_such_layout_the_choice_is_vllms(resolve):
    assert resolve(["LBNHC"]) == "LBNHC"
    # On another platform the wish would be dropped for the first layout, here one that we refuse.
    assert resolve(["LHBNC", "LBHNC"], on_cuda=False) == "LBHNC"


def test_recurrent_states_are_not_padded(resolve):
    assert resolve(kind="conv") == "LBHNC"


@pytest.mark.parametrize("trait", ["is_hybrid", "is_attention_free"])
def test_nor_are_those_of_a_model_without_attention(monkeypatch, trait):
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda platform: True)
    traits = {"is_hybrid": False, "is_attention_free": False}
    settings = SimpleNamespace(one_piece_blocks=True)
    config = SimpleNamespace(model_config=SimpleNamespace(**traits))
    assert start.wished_layout(config, settings) == "BLHNC"
    setattr(config.model_config, trait, True)
    assert start.wished_layout(config, settings) is None


def test_beside_a_connector_with_another_wish_the_engine_starts(resolve):
    """vLLM refuses connectors that wish for different layouts."""
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 20}
    ours = {**OURS, "kv_connector_extra_config": {"cpu_bytes": "16MiB"}}
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": [ours, other]}
    assert resolve(transfer=several) == "LBHNC"
