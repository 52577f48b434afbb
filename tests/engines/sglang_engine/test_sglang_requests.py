"""What a request's pages are stored under, by SGLang's own classes with our hooks on them."""

import contextlib
import dataclasses
import inspect
import json
import re
import types
import unittest.mock

import pytest

pytest.importorskip("sglang.srt.managers.scheduler")  # its processes are hooked
import torch
from safetensors.torch import save_file
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.utils import storage_namespace_seed
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from kvoffload.connectors.sglang import hooks, register, request_keys, weight_hooks
from kvoffload.connectors.sglang.hicache_settings import HiCacheSettings
from kvoffload.connectors.sglang.start_check import check_media
from kvoffload.connectors.sglang.weight_generations import WeightGenerations
from kvoffload.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def hooked():
    """Hook SGLang as its processes do."""
    register()
    HookRegistry.apply_hooks()


@pytest.fixture
def options(monkeypatch):
    """Options of adapters, which SGLang has read."""
    told = {}
    leaf = staticmethod(lambda name: told.get(name))
    monkeypatch.setattr(type(get_context()), "config_leaf", leaf)
    return told


@pytest.fixture
def manager(options):
    """A manager of adapters without a model: what it answers does not matter here."""
    manager = object.__new__(LoRAManager)
    manager.loras, manager.lora_refs = {}, {}
    return manager


@pytest.fixture
def adapter(tmp_path):
    """Write the files of an adapter."""

    def write(name, seed, **config):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        save_file({"q_proj.lora_A": weights}, folder / "adapter_model.safetensors")
        told = json.dumps({"r": 8, "target_modules": ["q_proj"], **config})
        (folder / "adapter_config.json").write_text(told)
        return str(folder)

    return write


def request(extra_key=None, lora_id=None, salt=None):
    """Return what SGLang seeds the page hashes of a request with."""
    made = Req(
        "r", "", [1, 2, 3], SamplingParams(), extra_key=extra_key, lora_id=lora_id, cache_salt=salt
    )
    return storage_namespace_seed(made.extra_key, made.cache_salt)


def test_all_hooks_are_applied():
    hooks.check_hooks()


def test_a_process_without_our_hooks_is_refused(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS"):
        hooks.check_hooks()


def test_requests_without_adapter_and_key_have_the_hashes_of_sglang():
    assert request() is None
    assert request(salt="t1") == storage_namespace_seed(None, "t1")


def test_a_client_cannot_name_an_adapter():
    lora = LoRARef.deterministic_id("tenant-a", "/adapters/a")
    with_adapter = Req("r", "", [1], SamplingParams(), lora_id=lora).extra_key
    for key in (lora, with_adapter, f"adapter:{lora}", with_adapter.removeprefix("adapter:")):
        assert request(extra_key=key) != request(lora_id=lora)
    assert request(extra_key="a", lora_id=lora) != request(extra_key=f"a{lora}")
    assert request(extra_key="a", lora_id=lora) != request(lora_id=lora)


def test_keys_of_clients_separate_as_before():
    assert request(extra_key="a") == request(extra_key="a")
    assert len({request(), request(extra_key="a"), request(extra_key="b")}) == 3
    assert request(extra_key="\ud800") != request(extra_key="\ud801")


def test_an_adapter_is_named_by_its_content(manager, adapter):
    """As --lora-paths does it, and by HTTP, where SGLang's name is another at each start."""

    def seed(path, name="a"):
        ref = LoRARef(lora_name=name, lora_path=path)
        manager._load_lora_adapter(ref)
        return request(lora_id=ref.lora_id)

    first = seed(adapter("a", 1))
    assert seed(adapter("b", 1), name="b") == first
    assert seed(adapter("a", 2)) != first  # trained on in place
    assert seed(adapter("a", 1, lora_alpha=32)) != first
    assert seed(adapter("a", 1)) == first


def test_adapters_that_are_unloaded_are_forgotten(manager, adapter, monkeypatch):
    """SGLang names each load anew: a trainer may load thousands."""
    monkeypatch.setattr(request_keys, "_adapters", {})
    manager.lora_refs = {"kept": LoRARef(lora_id="kept", lora_name="k", lora_path=adapter("k", 1))}
    manager._load_lora_adapter(manager.lora_refs["kept"])
    for number in range(4):
        manager._load_lora_adapter(LoRARef(lora_name="a", lora_path=adapter("a", number)))
    assert len(request_keys._adapters) == 2
    assert "kept" in request_keys._adapters


def test_adapters_of_the_command_line_are_named_by_their_content(manager, adapter, options):
    refs = [LoRARef(lora_id="x", lora_name="a", lora_path=adapter("a", 1))]
    with pytest.raises(RuntimeError, match="base_hf_config"):  # there is no model
        manager.init_lora_adapters(lora_paths=refs)
    assert request_keys._adapters["x"] == request_keys._content(refs[0].lora_path)


def test_options_that_change_what_adapters_compute_are_part_of_their_names(
    manager, adapter, options
):
    path = adapter("a", 1)
    seeds = set()
    for told in ({}, {"lora_target_modules": {"q_proj"}}, {"lora_target_modules": {"o_proj"}}):
        options.clear()
        options.update(told)
        ref = LoRARef(lora_name="a", lora_path=path)
        manager._load_lora_adapter(ref)
        seeds.add(request(lora_id=ref.lora_id))
    assert len(seeds) == 3


def test_what_another_adapter_switches_off_in_an_adapter_is_part_of_its_name(manager, adapter):
    """SGLang adapts the modules of --lora-paths, and leaves out other weights of later adapters."""
    path, seeds = adapter("a", 1), set()
    for modules in ({"q_proj"}, {"q_proj", "o_proj"}, {"o_proj", "q_proj"}):
        ref = LoRARef(lora_name="a", lora_path=path)
        manager._load_lora_adapter(ref)
        manager.target_modules = modules
        seeds.add(request(lora_id=ref.lora_id))
    assert len(seeds) == 2


def test_an_adapter_of_a_hub_is_named_by_its_commit(manager, options, monkeypatch):
    commits = {"adapter_config.json": "a" * 40}
    monkeypatch.setattr(request_keys, "commit_of", lambda path, revision, file: commits.get(file))
    ref = LoRARef(lora_name="a", lora_path="org/adapter")
    manager._load_lora_adapter(ref)
    first = request(lora_id=ref.lora_id)
    commits["adapter_config.json"] = "b" * 40
    manager._load_lora_adapter(ref)
    assert request(lora_id=ref.lora_id) != first
    assert "start" not in request_keys._adapters[ref.lora_id]


def test_an_adapter_that_changes_while_it_is_loaded_is_known_to_one_start(
    manager, adapter, monkeypatch, caplog
):
    path = adapter("a", 1)
    manager.create_lora_update_result = lambda **_: adapter("a", 2)
    ref = LoRARef(lora_name="a", lora_path=path)
    manager._load_lora_adapter(ref)
    one = request(lora_id=ref.lora_id)
    assert request_keys._adapters[ref.lora_id].startswith(ref.lora_id)
    assert "adapter a" in caplog.text
    monkeypatch.setattr(request_keys, "_adapters", {})
    monkeypatch.setattr(request_keys, "start_name", lambda: "another start")
    assert request(lora_id=ref.lora_id) != one


def model(**kinds):
    architectures = types.SimpleNamespace(architectures=["LlavaForConditionalGeneration"])
    return types.SimpleNamespace(
        **{"is_multimodal": False, "is_audio_model": False, "hf_config": architectures, **kinds}
    )


@pytest.mark.parametrize("kind", ["is_multimodal", "is_audio_model"])
def test_a_model_with_media_is_refused_unless_the_operator_vouches_for_their_names(kind):
    backends = [{"type": "memory"}]
    with pytest.raises(ConfigError, match=r"trust_image_hashes.*Llava"):
        check_media(HiCacheSettings(backends=backends), model(**{kind: True}))
    check_media(HiCacheSettings(backends=backends), model())
    check_media(HiCacheSettings(backends=backends, trust_image_hashes=True), model(**{kind: True}))


HARMLESS_OF_MANAGERS = {
    "destroy_weights_update_group", "init_weights_update_group", "get_weights_by_name",
    "flush_cache_after_weight_update", "record_weight_version_after_update", "save_remote_model",
    "save_sharded_model", "receive_weights_from_distributed",
}  # fmt: skip
"""Methods beside those that change weights: groups of processes, reading, and receiving buffers."""


UPDATES_OF_MANAGERS = {
    "begin_weight_update", "update_weights_from_disk", "update_weights_from_distributed",
    "update_weights_from_tensor", "update_weights_from_ipc",
}  # fmt: skip
"""Methods that change weights by hooked calls of a runner."""


def test_each_update_of_a_manager_is_carried_out_by_a_hooked_call_of_a_runner():
    hooked = {target.rpartition(".")[2] for target in weight_hooks.UPDATES}
    for name in UPDATES_OF_MANAGERS:
        source = inspect.getsource(inspect.unwrap(vars(SchedulerWeightUpdaterManager)[name]))
        called = set(re.findall(r"runner\.weight_updater\.(\w+)", source))
        assert "_select_runners" in source
        assert called & hooked, name


@pytest.mark.parametrize("owner", [SchedulerWeightUpdaterManager, WeightUpdater])
def test_each_call_of_sglang_that_changes_weights_is_hooked(owner):
    name = f"{owner.__module__}.{owner.__qualname__}"
    hooked = {t.removeprefix(f"{name}.") for t in HookRegistry._patched if t.startswith(f"{name}.")}
    calls = {call for call, what in vars(owner).items() if callable(what) and call[0] != "_"}
    # Of a runner the manager ends the update.
    others = {"end_weight_update"} if owner is WeightUpdater else UPDATES_OF_MANAGERS
    fields = {field.name for field in dataclasses.fields(owner)}
    assert calls - fields == hooked | others | (HARMLESS_OF_MANAGERS & calls)
    assert not hooked & others


def test_hooks_see_the_arguments_that_sglang_gives(monkeypatch):
    """Each call has its request, as from SGLang's dispatcher; the manager has no engine."""
    weights = WeightGenerations()
    monkeypatch.setattr(weight_hooks, "WEIGHTS", weights)
    scheduler = types.SimpleNamespace(
        forward_ct=3, server_args=types.SimpleNamespace(enable_weights_cpu_backup=False)
    )
    manager = object.__new__(SchedulerWeightUpdaterManager)
    manager.scheduler, manager._session, manager.offload_tags = scheduler, None, set()
    scheduler.weight_updater = manager
    asked = types.SimpleNamespace(tags=["weights"], action="reset_tensors")
    runner = object.__new__(WeightUpdater)
    calls = dict.fromkeys(weight_hooks.UPDATES, runner)
    calls |= dict.fromkeys((weight_hooks.RELEASE, weight_hooks.CHECK), manager)
    for target, owner in calls.items():
        before = weights.name
        with contextlib.suppress(Exception):  # the call itself has no engine
            getattr(owner, target.rpartition(".")[2])(asked)
        assert weights.name != before, target
    storage = unittest.mock.Mock()
    weights.attach(storage)
    weights.emptied(3)
    manager.end_weight_update(asked)  # answers that no update is open
    storage.begin_generation.assert_called_once_with(weights.name)
