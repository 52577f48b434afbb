"""An adapter is in the hashes by its content; what nothing tells any more is not stored."""

import functools
import types
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore

from kvoffload.connectors.vllm import engine_weights
from kvoffload.connectors.vllm.engine_weights import hash_adapters, is_told
from kvoffload.connectors.vllm.withheld_stores import bar_changed_adapters
from kvoffload.connectors.weights import changes_of


@pytest.fixture(autouse=True)
def hashing(monkeypatch):
    """vLLM's functions as they are before an engine starts, and then with ours."""
    for owner, name in (
        (kv_cache_utils, "_gen_lora_extra_hash_keys"),
        (EngineCore, "add_lora"),
        (EngineCore, "remove_lora"),
    ):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(plain, "__wrapped__", plain))
    hash_adapters()


def write_adapter(folder, seed=0):
    folder.mkdir(exist_ok=True)
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    save_file({"q_proj.lora_A": weights}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def request(path, name="r"):
    lora = LoRARequest("a", 1, str(path))
    return types.SimpleNamespace(lora_request=lora, request_id=name)


def keys(asked):
    return kv_cache_utils._gen_lora_extra_hash_keys(asked)


def test_the_content_of_an_adapter_is_in_the_hashes(tmp_path):
    one, copy, other = (
        request(write_adapter(tmp_path / name, seed))
        for name, seed in (("one", 0), ("copy", 0), ("other", 1))
    )
    assert keys(one)[0][-1] == keys(copy)[0][-1] != keys(other)[0][-1]
    assert is_told(one)


def test_an_adapter_of_a_hub_stays_out_because_each_load_may_bring_another_commit(
    tmp_path, monkeypatch, caplog
):
    """vLLM's workers ask the hub for its newest files, also when an adapter left memory."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--adapter"
    (home / "refs").mkdir(parents=True)
    (home / "refs/main").write_text("a" * 40)
    write_adapter(home / "snapshots")  # the folder above
    (home / "snapshots" / ("a" * 40)).mkdir()
    write_adapter(home / "snapshots" / ("a" * 40))
    asked = request("org/adapter")
    keys(asked)
    assert not is_told(asked)
    assert "A folder of this machine would" in caplog.text


def half_with(asked):
    status = types.SimpleNamespace(req=asked, max_offload_tokens=None)
    return types.SimpleNamespace(_req_status={asked.request_id: status}), status


@pytest.mark.parametrize(
    "step",
    [
        {"num_scheduled_tokens": {"r": 1}, "finished_req_ids": set()},
        {"num_scheduled_tokens": {}, "finished_req_ids": {"r"}},
        {"num_scheduled_tokens": {"gone": 1}, "finished_req_ids": {"r", "gone"}},
    ],
)
def test_a_request_whose_adapter_changed_since_its_hash_stores_nothing_more(tmp_path, step):
    """It may wait meanwhile, and vLLM then loads the files that are there."""
    asked = request(write_adapter(tmp_path / "a"))
    keys(asked)
    half, status = half_with(asked)
    bar_changed_adapters(half, types.SimpleNamespace(**step))
    assert status.max_offload_tokens is None
    write_adapter(tmp_path / "a", seed=1)
    bar_changed_adapters(half, types.SimpleNamespace(**step))
    assert status.max_offload_tokens == 0
    assert not is_told(asked)


def test_a_step_looks_at_the_files_of_an_adapter_once(tmp_path, monkeypatch):
    """A look is some system calls on the scheduler's thread, and hundreds of requests may run."""
    folders, looked = [write_adapter(tmp_path / name) for name in ("a", "b")], []
    asked = [request(folders[i % 2], f"r{i}") for i in range(20)]
    for each in asked:
        keys(each)
    monkeypatch.setattr(
        engine_weights, "changes_of", lambda folder: looked.append(folder) or changes_of(folder)
    )
    statuses = {each.request_id: half_with(each)[1] for each in asked}
    step = types.SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(statuses, 1), finished_req_ids=()
    )
    write_adapter(tmp_path / "b", seed=1)
    half = types.SimpleNamespace(_req_status=statuses)
    bar_changed_adapters(half, step)
    assert sorted(looked) == folders
    assert [status.max_offload_tokens for status in statuses.values()] == [None, 0] * 10


def test_a_request_of_the_base_model_is_never_barred():
    asked = types.SimpleNamespace(lora_request=None, request_id="r")
    half, status = half_with(asked)
    step = types.SimpleNamespace(num_scheduled_tokens={"r": 1}, finished_req_ids=None)
    bar_changed_adapters(half, step)
    assert status.max_offload_tokens is None


def test_hashes_that_another_plug_in_has_wrapped_get_the_content_too_and_once(
    tmp_path, monkeypatch
):
    plain = kv_cache_utils._gen_lora_extra_hash_keys.__wrapped__
    monkeypatch.setattr(
        kv_cache_utils,
        "_gen_lora_extra_hash_keys",
        functools.wraps(plain)(lambda asked: plain(asked)),
    )
    hash_adapters()
    hash_adapters()
    asked = request(write_adapter(tmp_path / "a"))
    (key,) = keys(asked)
    assert len(key) == len(plain(asked)[0]) + 1
    assert is_told(asked)
    assert Path(asked.lora_request.lora_path).is_dir()


def test_an_adapter_counts_as_it_was_loaded_where_a_plug_in_has_replaced_the_hashes_since(
    tmp_path, monkeypatch
):
    """Its files may be others before its first request, whose KV is that of the loaded ones."""
    plain = kv_cache_utils._gen_lora_extra_hash_keys.__wrapped__
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda asked: plain(asked))
    hash_adapters()  # as the next engine of the process does
    asked = request(write_adapter(tmp_path / "a"))
    executor = types.SimpleNamespace(add_lora=lambda lora: True)
    assert EngineCore.add_lora(types.SimpleNamespace(model_executor=executor), asked.lora_request)
    write_adapter(tmp_path / "a", seed=1)
    keys(asked)
    assert not is_told(asked)
