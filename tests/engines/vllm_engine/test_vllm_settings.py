"""Settings, versions, and what is said of a configuration that will not do."""

import multiprocessing
import os
import queue
import random
import subprocess
import types
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.fault_tolerance import EngineCoreSentinel
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
)

from benchmarks.vllm_parts.halves import BLOCK
from kvoffload.connectors.vllm import register
from kvoffload.connectors.vllm.client_requests import is_trusted, refuse_weak_hashes, warn_of_images
from kvoffload.connectors.vllm.connector import (
    KVOffloadConnector,
    warn_of_settings,
)
from kvoffload.connectors.vllm.fingerprint import hash_root
from kvoffload.connectors.vllm.kv_caches import check_groups, check_prefixes
from kvoffload.connectors.vllm.start import (
    check_layout,
    check_parallel,
    check_version,
    is_tested,
    read_settings,
)
from kvoffload.errors import ConfigError
from tests.engines.vllm_engine.configs import config_of

DISK = {"type": "disk", "root": "/nowhere", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"backends": [DISK, {**DISK, "capacty": 1}]},
            r"backends\[1\]\.capacty = .*: .*did you mean 'capacity'",
        ),
        ({"backends": [{**DISK, "io": "fast"}]}, r"backends\[0\]\.io = 'fast': must be one of"),
        ({"backends": [{"type": "disc"}]}, r"backends\[0\]\.type = 'disc': .*did you mean 'disk'"),
        ({"backends": [{"type": "redis", "url": "http://x"}]}, r"backends\[0\]\.url"),
        ({"backends": [{"type": "disk"}]}, r"backends\[0\]\.root = None: is required"),
        ({"policy": "lur"}, r"policy = 'lur'"),
    ],
)
def test_the_options_of_every_tier_are_checked_before_a_model_is_loaded(changed, sentence):
    config = KVTransferConfig(
        kv_connector="KVOffloadConnector",
        kv_connector_module_path="kvoffload.connectors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes": "1GiB", **changed},
    )
    register()  # as vLLM does it, before it has read its command line
    with pytest.raises(ConfigError, match=sentence):
        KVConnectorFactory.get_connector_class(config)
    with pytest.raises(ConfigError, match=sentence):  # where vLLM tells the class itself
        KVOffloadConnector.requires_piecewise_for_cudagraph(config.kv_connector_extra_config)
    assert not Path("/nowhere").exists()


def test_a_layout_that_cannot_be_offloaded_is_refused_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LHBNC")
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT"):
        KVOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes": "1GiB"})


def test_lookups_of_vllm_are_wrapped_once_and_those_of_other_connectors_are_as_they_were():
    register()
    wrapped = KVConnectorFactory.get_connector_class
    register()
    assert KVConnectorFactory.get_connector_class is wrapped
    other = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_producer")
    assert KVConnectorFactory.get_connector_class(other).__name__ == "ExampleConnector"


def test_vllm_has_called_us_before_it_has_a_configuration(models, imported):
    """In a process of its own: the tests before have called ``register`` in this one."""
    config = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"cpu_byte": "1GiB"}
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs({str(models())!r}, kv_transfer_config={config}).create_engine_config()"
    )
    ended = subprocess.run([*imported.command, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "did you mean 'cpu_bytes'" in ended.stderr


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "not installed"])
def test_an_untested_vllm_is_refused_and_the_message_names_range_and_override(version):
    with pytest.raises(ConfigError, match=r"0\.32 to 0\.33.*allow_untested_vllm"):
        check_version(allow_untested=False, text=version)
    check_version(allow_untested=True, text=version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1"])
def test_tested_versions_pass(version):
    assert is_tested(version)


def _vllm_config(algorithm="sha256", policy="recompute"):
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(prefix_caching_hash_algo=algorithm),
        kv_transfer_config=types.SimpleNamespace(kv_load_failure_policy=policy),
    )


def test_a_failure_policy_that_fails_requests_is_warned_about(caplog):
    settings = read_settings({"cpu_bytes": 1 << 20})
    warn_of_settings(_vllm_config(policy="fail"), settings)
    assert "A FAILED LOAD WILL FAIL ITS REQUEST" in caplog.text


def test_a_random_hash_root_is_found_out_and_the_remedy_named(caplog, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    settings = read_settings({"cpu_bytes": 1 << 20, "backends": [{"type": "memory"}]})
    assert not hash_root(_vllm_config("xxhash"))[1]
    warn_of_settings(_vllm_config("xxhash"), settings)
    assert "--prefix-caching-hash-algo sha256" in caplog.text
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_root(_vllm_config("xxhash")) == ("7", True)
    caplog.clear()
    warn_of_settings(_vllm_config("sha256"), settings)
    assert not caplog.text


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_clients_can_collide_are_refused_where_tiers_keep_chunks(algorithm):
    tiers = {"cpu_bytes": 1 << 20, "backends": [{"type": "memory"}]}
    config = _vllm_config(algorithm)
    with pytest.raises(ConfigError, match=rf"{algorithm}.*sha256.*allow_weak_hashes"):
        refuse_weak_hashes(config, read_settings(tiers))
    refuse_weak_hashes(config, read_settings({**tiers, "allow_weak_hashes": True}))
    refuse_weak_hashes(config, read_settings({"cpu_bytes": 1 << 20}))
    refuse_weak_hashes(_vllm_config("sha256"), read_settings(tiers))


@pytest.mark.parametrize("trusts", [False, True])
def test_the_start_says_what_becomes_of_images(caplog, trusts):
    caplog.set_level("INFO")
    settings = read_settings({"cpu_bytes": 1 << 20, "trust_image_uuids": trusts})
    media = types.SimpleNamespace(mm_processor_cache_gb=4, allow_missing_mm_embeddings=False)
    model = types.SimpleNamespace(is_multimodal_model=True, multimodal_config=media)
    cache = types.SimpleNamespace(enable_prefix_caching=False)
    config = types.SimpleNamespace(model_config=model, cache_config=cache)
    warn_of_images(config, settings)
    (record,) = caplog.records
    assert ("WARNING" if trusts else "INFO") == record.levelname
    assert "trust_image_uuids" in record.getMessage()
    media.mm_processor_cache_gb = 0
    warn_of_images(config, settings)
    assert "by a counter" in caplog.records[-1].getMessage()
    media.allow_missing_mm_embeddings = True
    warn_of_images(config, settings)
    assert "type ends in _embeds" in caplog.records[-2].getMessage()
    model.is_multimodal_model = False
    warn_of_images(config, settings)
    assert len(caplog.records) == 4


def test_the_option_that_takes_vllms_own_connector_is_refused_with_the_remedy(models):
    """It would do so without a word."""
    with pytest.raises(ValueError, match=r"kv_offloading_size = 1.*: .*set cpu_bytes"):
        config_of(models(), kv_offloading_size=1)


@pytest.mark.parametrize("asked", [False, True])
def test_clients_send_embeddings_of_media_only_where_vllm_is_asked_to_take_them(models, asked):
    """For vLLM each engine with a connector of both roles gets them; a wrong one ends an engine."""
    config = config_of(models("blip2"), enable_mm_embeds=asked)
    media = config.model_config.multimodal_config
    assert media.enable_mm_embeds is asked
    assert not media.allow_missing_mm_embeddings
    assert config.kv_transfer_config.kv_connector == "KVOffloadConnector"
    several = {"connectors": [{"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}]}
    config.kv_transfer_config.kv_connector = "MultiConnector"
    config.kv_transfer_config.kv_connector_extra_config = several
    config._resolve_mm_embedding_inputs()
    assert media.allow_missing_mm_embeddings, "another one of them may bring what is left out"


@pytest.mark.parametrize(
    ("request_", "takes_media", "trusted"),
    [
        ({}, True, True),
        ({"mm_features": ["an image"]}, True, False),
        ({"mm_features": ["an image"], "cache_salt": "tenant"}, True, True),
        ({"resumable": True}, True, False),  # its later parts may have images
        ({"resumable": True}, False, True),
    ],
)
def test_requests_whose_images_a_client_may_name_are_not_trusted(request_, takes_media, trusted):
    some = types.SimpleNamespace
    media = some(mm_processor_cache_gb=4) if takes_media else None
    config = some(model_config=some(multimodal_config=media), cache_config=some())
    asked = some(**{"mm_features": [], "cache_salt": None, "resumable": False, **request_})
    settings = read_settings({"cpu_bytes": 1 << 20})
    assert is_trusted(asked, settings, config) is trusted


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"tensor_parallel_size": 2}),
        (2, {"data_parallel_size": 2}),
        (6, {"tensor_parallel_size": 2, "data_parallel_size": 3}),
        (2, {"data_parallel_size": 3, "data_parallel_size_local": 2}),
        (2, {"data_parallel_size": 2, "_api_process_count": 2, "_api_process_rank": -1}),
    ],
)
def test_ranks_and_replicas_that_ask_for_more_than_there_is_together_are_refused(
    models, kernel_files, num_ranks, options, is_inside
):
    """Before any is started: inside ``MultiConnector`` as well."""
    register()
    options |= {"distributed_executor_backend": "mp"}
    if is_inside:
        mine = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
        mine["kv_connector_extra_config"] = {"cpu_bytes": "16MiB"}
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [mine]},
        )
    kernel_files.available(num_ranks << 24)
    config_of(models(), **options)
    kernel_files.available((num_ranks << 24) - 1024)
    with pytest.raises(ConfigError, match=f"cpu_bytes of {num_ranks} ranks"):
        config_of(models(), **options)


def test_an_api_server_that_starts_no_ranks_looks_for_no_memory(models, kernel_files):
    """Ranks of the process that started it may have had theirs by then."""
    register()
    kernel_files.available(1024)
    config_of(models(), data_parallel_size=2, _api_process_count=2, _api_process_rank=0)
    with pytest.raises(ConfigError, match=r"^cpu_bytes = "):
        config_of(models())


def test_an_engine_in_a_child_process_looks_for_the_memory_of_its_ranks(models, kernel_files):
    register()
    kernel_files.available(1 << 24)
    config_of(models())  # what one rank takes

    def start():
        try:
            config_of(models(), tensor_parallel_size=2, distributed_executor_backend="mp")
        except ConfigError as error:
            os._exit("cpu_bytes of 2 ranks" in str(error))

    child = multiprocessing.get_context("fork").Process(target=start)
    child.start()
    child.join()
    assert child.exitcode == 1, "not refused"


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC", "BHLNC", None])
def test_layouts_whose_blocks_lie_in_one_piece_are_taken(layout):
    check_layout(layout)


def test_a_layout_with_heads_outside_of_blocks_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"VLLM_KV_CACHE_LAYOUT = 'LHBNC'.*set it to LBHNC"):
        check_layout("LHBNC")
    resolved = types.SimpleNamespace(cache_config=types.SimpleNamespace(kv_cache_layout="LHBNC"))
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT"):
        KVOffloadConnector(resolved, None, None)


def test_a_model_whose_kv_cache_vllm_offloads_in_part_alone_is_refused_with_the_remedy():
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    roles = KVCacheGroupRole
    pages = KVCacheGroupSpec(["pages"], spec, host_resident=True, role=roles.HISPARSE_SOURCE)
    index = KVCacheGroupSpec(["index"], spec, role=roles.HISPARSE_INDEXER)
    copies = KVCacheGroupSpec(["copies"], spec, enable_kv_transfer=False)
    check_groups(KVCacheConfig(8, [], [pages, copies]))  # vLLM makes the copies anew
    sparse = KVCacheConfig(8, [], [pages, index, copies], hisparse_host_num_blocks=8)
    with pytest.raises(ConfigError, match=r"leaves out the KV cache of pages.*HiSparseConnector"):
        check_groups(sparse)
    usual = types.SimpleNamespace(cache_config=types.SimpleNamespace(kv_cache_layout=None))
    with pytest.raises(ConfigError, match="leaves out the KV cache of pages"):
        KVOffloadConnector(usual, None, sparse)


HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def _model(runner="generate", supported=True):
    pooler = types.SimpleNamespace(seq_pooling_type="CLS", tok_pooling_type="ALL")
    return types.SimpleNamespace(
        runner_type=runner, is_prefix_caching_supported=supported, pooler_config=pooler
    )


def _caches(*specs):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(**HEADS, non_causal=True), RSWASpec(**HEADS, rswa_window=128)]
)
def test_a_model_whose_kv_cache_depends_on_later_tokens_is_refused_with_the_remedy(spec):
    usual = FullAttentionSpec(**HEADS)
    check_prefixes(_model(), _caches(usual, usual))
    with pytest.raises(ConfigError, match=r"layer\.1.*take this connector out"):
        check_prefixes(_model(), _caches(usual, spec))
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": usual, "b": spec})
    with pytest.raises(ConfigError, match=r"layer\.0"):
        check_prefixes(_model(), _caches(mixed))


def test_a_pooler_for_which_vllm_keeps_no_prefixes_is_refused_with_the_remedy():
    caches = _caches(FullAttentionSpec(**HEADS))
    check_prefixes(_model("pooling"), caches)
    check_prefixes(_model("generate", supported=False), caches)
    with pytest.raises(ConfigError, match=r"pooler_config = 'CLS, ALL'.*take this connector out"):
        check_prefixes(_model("pooling", supported=False), caches)


def test_an_engine_that_goes_on_after_a_failed_step_is_refused_with_the_remedy(models):
    config = config_of(models("llama"))
    config.parallel_config.enable_fault_tolerance = True
    remedy = "leave --enable-fault-tolerance out"
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match=f"enable_fault_tolerance = True: .*{remedy}"):
            KVOffloadConnector(config, role, _caches(FullAttentionSpec(**HEADS)))


def test_an_engine_with_a_scheduler_for_each_rank_is_refused_with_the_remedy(models):
    config = config_of(models("llama"))
    parallel = config.parallel_config
    parallel.distributed_executor_backend = "external_launcher"
    check_parallel(parallel)
    parallel.tensor_parallel_size = parallel.world_size = 2
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match=r"'external_launcher': .*set it to mp"):
            KVOffloadConnector(config, role, _caches(FullAttentionSpec(**HEADS)))


def test_what_a_failed_step_has_computed_stays_in_the_prefix_cache_of_vllm(halves):
    """Which is why such engines are refused: what is found there is stored."""
    rig = halves()
    prompt = random.Random(1).choices(range(3, 512), k=10 * BLOCK + 1)
    rig.add(prompt, 2)
    rig.scheduler.schedule()
    aborted = []
    core = types.SimpleNamespace(
        engine_index=0,
        batch_queue=None,
        scheduler=rig.scheduler,
        model_executor=None,
        _send_abort_outputs=aborted.extend,
        output_queue=queue.Queue(),
    )
    faults = types.SimpleNamespace(engine_recovery_timeout_sec=1)
    parallel = types.SimpleNamespace(fault_tolerance_config=faults)
    EngineCoreSentinel(core, parallel).on_fault(RuntimeError("a rank is gone"))
    assert len(aborted) == 1
    again = rig.add(prompt, 2)
    _, found, *_ = rig.scheduler.kv_cache_manager.get_computed_blocks(again)
    assert found == 10 * BLOCK
