"""Settings, versions, and what is said of a configuration that will not do."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from kvoffload.connectors.vllm.client_images import refuse_weak_hashes, warn_of_images
from kvoffload.connectors.vllm.connector import (
    KVOffloadConnector,
    check_memory_of_ranks,
    warn_of_settings,
)
from kvoffload.connectors.vllm.fingerprint import (
    check_layout,
    config_digest,
    hash_root,
    long_rope,
    media_settings,
    resolve_facts,
)
from kvoffload.connectors.vllm.settings import read_settings
from kvoffload.connectors.vllm.versions import check_version, is_tested
from kvoffload.errors import ConfigError
from kvoffload.offload.namespace import namespace
from kvoffload.transfer.slab import available_host_bytes


def test_a_misspelt_setting_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'cpu_bytes'"):
        read_settings({"cpu_byte": "1GiB"})


DISK = {"type": "disk", "root": "/nowhere", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"backends": [DISK, {**DISK, "capacty": 1}]},
            r"backends\[1\]\.capacty = 1: .*did you mean 'capacity'",
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
    with pytest.raises(ConfigError, match=sentence):
        KVConnectorFactory.get_connector_class(config)
    with pytest.raises(ConfigError, match=sentence):  # where vLLM tells the class itself
        KVOffloadConnector.requires_piecewise_for_cudagraph(config.kv_connector_extra_config)
    assert not Path("/nowhere").exists()


def test_a_layout_that_cannot_be_offloaded_is_refused_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LHBNC")
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT"):
        KVOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes": "1GiB"})


def test_the_class_can_be_imported_without_settings():
    kv_transfer_config = None  # a name that vLLM uses, and others may
    from kvoffload.connectors.vllm import KVOffloadConnector as again

    assert again is KVOffloadConnector
    assert kv_transfer_config is None


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
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(is_multimodal_model=True))
    warn_of_images(config, settings)
    (record,) = caplog.records
    assert ("WARNING" if trusts else "INFO") == record.levelname
    assert "trust_image_uuids" in record.getMessage()
    config.model_config.is_multimodal_model = False
    warn_of_images(config, settings)
    assert len(caplog.records) == 1


def test_ranks_that_ask_for_more_than_there_is_together_are_refused():
    most = available_host_bytes()
    settings = read_settings({"cpu_bytes": most // 3})
    check_memory_of_ranks(settings, 2)
    with pytest.raises(ConfigError, match="cpu_bytes of 4 ranks"):
        check_memory_of_ranks(settings, 4)


def test_json_of_the_documentation_is_accepted():
    text = (Path(__file__).parents[3] / "docs/guides/vllm.md").read_text()
    examples = [part.split("```")[0] for part in text.split("```json")[1:]]
    assert examples
    extras = [json.loads(example).get("kv_connector_extra_config", {}) for example in examples]
    of_several = [extra["connectors"] for extra in extras if "connectors" in extra]
    inner = [
        each["kv_connector_extra_config"]
        for each in itertools.chain(*of_several)
        if each["kv_connector"] == "KVOffloadConnector"
    ]
    assert inner
    for extra in [each for each in extras if each and "connectors" not in each] + inner:
        read_settings(extra)  # the others are requests


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """Return a function that resolves the facts of an engine; arguments say what differs."""
    monkeypatch.setattr(
        "kvoffload.connectors.vllm.fingerprint.hash_root", lambda config: ("root", True)
    )
    monkeypatch.setattr(
        "kvoffload.connectors.vllm.fingerprint.attention_backends", lambda *_: "cpu"
    )
    some = types.SimpleNamespace

    def resolve(engine="engine", groups=(), interleave=1, rank=1, replicated=False, **more):
        # As vLLM has it for a URL: a folder with the configuration alone, named after the URL.
        model = some(
            model=str(tmp_path),
            model_weights="s3://bucket/model",
            revision=None,
            hf_config=some(to_dict=dict, _commit_hash=None),
            dtype="bfloat16",
            quantization=None,
            seed=0,
        )
        cache = some(
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
            block_size=32,
            prefix_caching_hash_algo="sha256",
        )
        sizes = dict.fromkeys(
            (
                "rank",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
            ),
            1,
        )
        config = some(
            model_config=model,
            cache_config=cache,
            parallel_config=some(**sizes, cp_kv_cache_interleave_size=interleave),
            load_config=some(load_format="runai_streamer"),
            lora_config=None,
            kv_transfer_config=some(engine_id=engine),
        )
        config.parallel_config.rank = rank
        settings = read_settings({"cpu_bytes": 1, **more})
        return resolve_facts(config, some(kv_cache_groups=groups), {}, settings, replicated)

    return resolve


def test_weights_that_nothing_tells_apart_are_shared_with_nobody(facts, caplog):
    assert facts("before a restart")["weights"] != facts("after it")["weights"]
    assert "Set weights_id" in caplog.text
    assert facts("a", weights_id="v7")["weights"] == facts("b", weights_id="v7")["weights"]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_the_length_of_a_long_rope_model_chooses_its_factors(name):
    def rotated(longest, kind="longrope", **more):
        rope = {"rope_type": kind, **more}
        config = types.SimpleNamespace(**{name: rope}, original_max_position_embeddings=4096)
        return long_rope(types.SimpleNamespace(hf_config=config, max_model_len=longest))

    assert [rotated(4096), rotated(4097)] == [False, True]
    assert rotated(4097, original_max_position_embeddings=8192) is False
    assert rotated(4097, "yarn") is None


def test_how_the_engine_reads_images_is_told_unless_it_is_the_models_own_way():
    def told(**chosen):
        return media_settings(
            types.SimpleNamespace(multimodal_config=types.SimpleNamespace(**chosen))
        )

    assert media_settings(types.SimpleNamespace(multimodal_config=None)) == ""
    assert told(mm_processor_kwargs=None, media_io_kwargs={}) == ""
    assert told(mm_processor_kwargs={"num_crops": 4}) != told(mm_processor_kwargs={"num_crops": 16})
    assert told(mm_processor_kwargs={"a": 4}, media_io_kwargs={"video": {"num_frames": 4}}) == (
        '{"media_io_kwargs": {"video": {"num_frames": 4}}, "mm_processor_kwargs": {"a": 4}}'
    )


def test_an_upgrade_that_keeps_what_bytes_mean_keeps_the_namespace(facts, monkeypatch):
    def known(version):
        monkeypatch.setattr(
            "kvoffload.connectors.vllm.fingerprint.installed_version", lambda: version
        )
        return namespace(**facts(weights_id="v7"))

    series = ("0.33.0", "0.33.1", "0.33.0+cu130", "0.33.2.post1+cpu")
    assert len({known(version) for version in series}) == 1
    others = ("0.32.0", "0.33.0rc1", "0.33.1.dev4+gabcdef", "0.34.0", "0.34.1", "not installed")
    assert len({known(version) for version in others} - {known("0.33.0")}) == len(others)


def test_ranks_with_the_same_bytes_have_one_namespace(facts):
    def known(rank, replicated):
        return namespace(**facts(weights_id="v7", rank=rank, replicated=replicated))

    assert len({known(rank, replicated=False) for rank in range(4)}) == 4
    # What rank 0 of an earlier version stored is served.
    assert {known(rank, replicated=True) for rank in range(4)} == {known(0, replicated=False)}


def test_how_context_parallel_ranks_interleave_tokens_is_part_of_the_identity(facts):
    assert facts(interleave=16) != facts(interleave=1)
    # The stores of engines that leave the default do not go cold.
    assert "context_parallel_interleave" not in facts(interleave=1)


def test_dtypes_and_shapes_of_recurrent_states_are_part_of_the_identity(facts):
    def group(*dtypes, shapes=((4, 3), (8, 16)), uniform=False):
        spec = MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes)
        if uniform:
            spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"layers.0": spec})
        return (KVCacheGroupSpec(["layers.0"], spec),)

    half, brain = torch.float16, torch.bfloat16
    for uniform in (False, True):
        known = [
            facts(groups=group(half, half, uniform=uniform)),
            facts(groups=group(half, brain, uniform=uniform)),  # mamba_ssm_cache_dtype
            facts(groups=group(brain, brain, uniform=uniform)),  # mamba_cache_dtype
            # VLLM_SSM_CONV_STATE_LAYOUT
            facts(groups=group(half, half, shapes=((3, 4), (8, 16)), uniform=uniform)),
        ]
        assert len({namespace(**each) for each in known}) == len(known)
    attention = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=half)
    assert "recurrent_states" not in facts(groups=(KVCacheGroupSpec(["layers.0"], attention),))


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC", "BHLNC", None])
def test_layouts_whose_blocks_lie_in_one_piece_are_taken(layout):
    check_layout(layout)


def test_a_layout_with_heads_outside_of_blocks_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"VLLM_KV_CACHE_LAYOUT = 'LHBNC'.*set it to LBHNC"):
        check_layout("LHBNC")
    resolved = types.SimpleNamespace(cache_config=types.SimpleNamespace(kv_cache_layout="LHBNC"))
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT"):
        KVOffloadConnector(resolved, None, None)


class _Plain:
    """As models that bring their own code keep in their configurations; its text is its address."""

    def __init__(self, size):
        self.size = size


def test_the_digest_of_a_configuration_has_no_addresses_and_no_random_order():
    def digest(value):
        return config_digest(types.SimpleNamespace(to_dict=lambda: {"torch": 1, "x": value}))

    assert digest(_Plain(1)) == digest(_Plain(1)) != digest(_Plain(2))
    assert digest([_Plain(_Plain(1))]) == digest([_Plain(_Plain(1))]) != digest([_Plain(_Plain(2))])
    assert digest(_Plain) == digest(_Plain) != digest(namespace)
    itself = _Plain(1)
    itself.size = itself
    assert digest(itself) == digest(itself)


def test_the_digest_of_a_set_is_the_same_in_every_process():
    code = (
        "import types; from kvoffload.connectors.vllm.fingerprint import config_digest as digest; "
        "print(digest(types.SimpleNamespace(to_dict=lambda: {'x': {'a', 'b', 'c', 'd', 'e'}})))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(digests) == 1


def test_the_digest_of_an_ordinary_configuration_is_what_it_was():
    plain = {"dtype": torch.bfloat16, "sizes": [1, 2], "_name_or_path": "anything"}
    config = types.SimpleNamespace(to_dict=lambda: plain)
    text = '{"dtype": "torch.bfloat16", "sizes": [1, 2]}'
    assert config_digest(config) == hashlib.sha256(text.encode()).hexdigest()
