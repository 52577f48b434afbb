"""Which configurations of SGLang share pages: on its own arguments, each field and variable."""

import dataclasses
import enum
import json
import os
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt.server_args")
import huggingface_hub
import sglang
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.environ import Envs
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from kvoffload.connectors.sglang import engine_facts
from kvoffload.connectors.sglang import harmless_arguments as harmless
from kvoffload.connectors.sglang.hicache_settings import HiCacheSettings
from kvoffload.identity import namespace
from tests.engines.sglang_engine import known_facts

DECLARED = {name for name, field in vars(Envs).items() if type(field).__name__.startswith("Env")}
READ = re.compile(
    r"""(?:environ(?:\.get|\.setdefault)?\s*[(\[]|getenv\(|get_\w+_env_var\(|env_\w+\()
        \s*f?["']([A-Z][A-Z0-9_]{2,})["']""",
    re.VERBOSE,
)
PLAIN = PretrainedConfig()
COMMITS = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def _new_files(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(engine_facts, "BEGUN_NS", 1 << 63)  # models are made after the import


@pytest.fixture
def facts(model):
    """Collect the facts of an engine with these arguments."""

    def collect(settings=None, **arguments):
        options = {
            "model_path": model, "device": "cpu", "attention_backend": "torch_native",
            "skip_tokenizer_init": True, "page_size": 16, "dtype": "bfloat16",
        }  # fmt: skip
        args = ServerArgs(**(options | arguments))
        args.resolve_once()
        ours = HiCacheSettings(backends=[{"type": "memory"}], **(settings or {}))
        values = engine_facts.resolved(args)
        return engine_facts.facts_of_engine(args, values, model_config_of(args), ours)

    return collect


@pytest.fixture
def same(facts):
    """Tell whether two engines share a namespace."""
    return lambda one, other: namespace(**facts(**one)) == namespace(**facts(**other))


def test_each_argument_of_this_sglang_is_sorted():
    assert {*ServerArgs.__struct_fields__} == harmless.ARGUMENTS | known_facts.ARGUMENTS
    assert not harmless.ARGUMENTS & known_facts.ARGUMENTS


def test_each_variable_that_this_sglang_reads_is_sorted():
    package = Path(sglang.__file__).parent
    files = [
        file
        for folder in ("srt", "kernels", "jit_kernel")
        for file in (package / folder).rglob("*.py")
    ]
    read = {name for file in files for name in READ.findall(file.read_text(errors="replace"))}
    facts = harmless.READ_ELSEWHERE | known_facts.VARIABLES
    assert (read | DECLARED) - harmless.VARIABLES - facts == known_facts.UNSEEN
    assert not harmless.VARIABLES & facts
    for name in harmless.VARIABLES | known_facts.VARIABLES - DECLARED:
        is_seen = name in DECLARED or name.startswith(engine_facts._PREFIXES)
        assert is_seen, f"{name} would not be seen at run time"


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, enum.Enum) or value is None or isinstance(value, str):
        return f"{value} changed"
    return {"changed": 1} if isinstance(value, dict) else ["changed"]


def test_each_changed_argument_changes_the_namespace_unless_it_is_harmless(model):
    args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    values = engine_facts.resolved(args)
    before = namespace(**engine_facts.argument_facts(ServerArgs, values))
    for name in values:
        after = engine_facts.argument_facts(ServerArgs, values | {name: changed(values[name])})
        assert (namespace(**after) == before) is (name in harmless.ARGUMENTS), name


def test_an_argument_of_a_later_sglang_is_a_fact(model):
    before = engine_facts.argument_facts(ServerArgs, {})
    after = engine_facts.argument_facts(ServerArgs, {"kv_rotation": "hadamard"})
    assert namespace(**before) != namespace(**after)


def other_text(field):
    """Return a text that the parser of a variable takes for another value than its default."""
    kind = type(field).__name__
    if "Bool" in kind:
        return "0" if field._resolve_default() else "1"
    told = {"Int": "17", "Float": "1.7", "JSON": '{"changed": 1}'}
    return next((text for part, text in told.items() if part in kind), "changed")


def test_each_changed_variable_changes_the_namespace_unless_it_is_harmless(monkeypatch):
    kept = harmless.VARIABLES | known_facts.UNSEEN
    names = kept | harmless.READ_ELSEWHERE | known_facts.VARIABLES
    for name in (*names, "SGLANG_ALL_NEW"):
        monkeypatch.delenv(name, raising=False)
    before = engine_facts.variable_facts()
    for name in sorted((*names, "SGLANG_ALL_NEW")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, other_text(vars(Envs).get(name)))
            after = engine_facts.variable_facts()
        assert (after == before) is (name in kept), name


def test_a_variable_at_its_default_is_no_fact(monkeypatch):
    before = engine_facts.variable_facts()
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "false")
    assert engine_facts.variable_facts() == before
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert engine_facts.variable_facts() != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": "auto"}, {"dtype": "bfloat16"}),
        ({}, {"kv_cache_dtype": "bfloat16"}),
        ({}, {"served_model_name": "x"}),
        ({}, {"max_running_requests": 3, "mem_fraction_static": 0.5, "chunked_prefill_size": 1024}),
        ({"random_seed": 1}, {"random_seed": 3}),
        ({}, {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}),
        ({}, {"context_length": 1024}),
        (
            {"json_model_override_args": '{"rope_theta": 5}'},
            {"json_model_override_args": '{ "rope_theta":  5.0}'},
        ),
        ({}, {"host": "0.0.0.0", "port": 31000, "log_level": "debug", "nccl_port": 29000}),
        ({}, {"disable_cuda_graph": True}),
        ({}, {"model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 4}'}),
        ({}, {"attention_backend": None}),  # resolved to the same one
        ({}, {"weight_version": "v2"}),
    ],
    ids=str,
)
def test_what_changes_no_byte_is_shared(same, one, other):
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"mamba_ssm_dtype": "bfloat16"}, {"mamba_ssm_dtype": "float16"}),
        ({}, {"mm_process_config": {"image": {"max_pixels": 1000}}}),
        ({}, {"model_impl": "transformers"}),
        ({}, {"is_embedding": True}),
        (
            {"json_model_override_args": '{"rope_theta": 5}'},
            {"json_model_override_args": '{"rope_theta": 6}'},
        ),
        ({}, {"page_size": 32}),
        ({}, {"triton_attention_reduce_in_fp32": True}),
        ({}, {"forward_hooks": '[{"name": "x"}]'}),
    ],
    ids=str,
)
def test_what_may_change_bytes_is_not_shared(same, one, other):
    assert not same(one, other)


def test_dtypes_of_one_size_are_told_apart(facts, monkeypatch):
    """SGLang's pools of both kinds of 8 bits say that they hold bytes."""
    resolved, told = engine_facts.resolved, {}
    for kind in ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "mxfp8"):
        values = {"kv_cache_dtype": kind}
        monkeypatch.setattr(engine_facts, "resolved", lambda args, v=values: resolved(args) | v)
        told[kind] = namespace(**facts())
    assert told.pop("auto") == told["bfloat16"]
    assert len({*told.values()}) == 4


def test_what_changes_how_kernels_of_fewer_bits_round_is_a_fact(facts, model, monkeypatch):
    """One generation of devices rounds activations and queries, the next one does not."""
    monkeypatch.setattr(
        engine_facts, "platform_name", lambda device, is_quantized: f"quantized: {is_quantized}"
    )
    args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    config, values = model_config_of(args), engine_facts.resolved(args)
    ours = HiCacheSettings(backends=[{"type": "memory"}])

    def told(quantization=None, **more):
        monkeypatch.setattr(config, "quantization", quantization)
        return engine_facts.facts_of_engine(args, values | more, config, ours)

    plain, adapted = told(), told(enable_lora=True)
    assert namespace(**plain) == namespace(**adapted)
    assert plain["platform"] == "quantized: False"
    assert told("fp8")["platform"] == told(kv_cache_dtype="fp8_e4m3")["platform"]
    assert told("fp8")["platform"] == "quantized: True"
    assert namespace(**told("fp8")) != namespace(**told("fp8", enable_lora=True))


def test_a_name_of_the_weights_does_not_tell_how_media_are_read(facts, model, tmp_path):
    folder = tmp_path / "named"
    shutil.copytree(model, folder)

    def told(mean):
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean}))
        return namespace(**facts({"weights_id": "v1"}, model_path=str(folder)))

    assert told(0.5) == told(0.5) != told(0.4)


SCALED = '{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,'
SCALED += ' "high_freq_factor": 4.0, "original_max_position_embeddings": 512}}'


def test_the_tokenizer_counts_where_a_model_has_engrams(model, tmp_path):
    folder = tmp_path / "tokenized"
    shutil.copytree(model, folder)
    args = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    settings = HiCacheSettings(backends=[{"type": "memory"}])
    config = model_config_of(args)

    def told(text):
        (folder / "tokenizer.json").write_text(text)
        values = engine_facts.resolved(args)
        return namespace(**engine_facts.facts_of_engine(args, values, config, settings))

    assert told("1") == told("2")
    config.hf_config.engram_layer_ids = [1]
    assert told("1") == told("1") != told("2")


def test_a_limit_of_lengths_is_a_fact_where_positions_are_scaled(same):
    scaled = {"json_model_override_args": SCALED}
    assert not same(scaled, {**scaled, "context_length": 1024})


@pytest.mark.parametrize(
    "source",
    [
        {"load_format": "presharded", "model_loader_extra_config": '{"presharded_path": "/w"}'},
        {
            "load_format": "remote_instance",
            "remote_instance_weight_loader_seed_instance_ip": "10.0.0.1",
            "remote_instance_weight_loader_seed_instance_service_port": 1,
            "remote_instance_weight_loader_send_weights_group_ports": [1],
        },
        {"custom_weight_loader": ["my.loader"]},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"modelopt_checkpoint_restore_path": "/other"},
        {"model_loader_extra_config": '{"source": "s3://bucket"}'},
        {"load_format": "private"},
        {"kt_weight_path": "/w"},
        {"weight_cache_mode": "client"},
    ],
    ids=lambda source: next(iter(source)) + str(next(iter(source.values()))),
)
def test_weights_from_elsewhere_are_known_to_one_start_unless_they_have_a_name(
    model, source, monkeypatch, caplog
):
    args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    values = engine_facts.resolved(args)

    def weights(start, **settings):
        monkeypatch.setattr(engine_facts, "start_name", lambda: start)
        ours = HiCacheSettings(backends=[{"type": "memory"}], **settings)
        return engine_facts.weights_facts(values | source, ours, PLAIN)["weights"]

    assert weights("one") == weights("one")  # all ranks of a start
    assert weights("one") != weights("two")
    assert "Set weights_id" in caplog.text
    assert weights("one", weights_id="v7") == weights("two", weights_id="v7") == "v7"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make a cache of a hub with one repository; return how another commit becomes its main."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--name"
    (home / "refs").mkdir(parents=True)

    def pull(commit):
        (home / "refs/main").write_text(commit)
        (home / "snapshots" / commit).mkdir(parents=True)
        for name in ("config.json", "map.pt"):
            (home / "snapshots" / commit / name).write_text("{}")

    pull(COMMITS[0])
    return pull


def hub_weights(loaded=None, **values):
    told = {"load_format": "auto", "random_seed": 0, "model_path": "org/name", **values}
    config = PretrainedConfig()
    config._commit_hash = loaded
    ours = HiCacheSettings(backends=[{"type": "memory"}])
    return engine_facts.weights_facts(told, ours, config)


def test_the_commit_of_a_hub_is_the_one_that_was_loaded(hub, monkeypatch):
    """Another process may pull a newer one into a cache that they share, long before the attach."""
    assert hub_weights(COMMITS[0])["weights"] == f"commit {COMMITS[0]}"
    hub(COMMITS[1])
    assert hub_weights(COMMITS[0])["weights"].startswith("known to this start alone")
    assert hub_weights(COMMITS[1])["weights"] == f"commit {COMMITS[1]}"
    draft = {"model_path": "org/other", "speculative_draft_model_path": "org/name"}
    assert hub_weights(**draft)["draft_weights"] == f"commit {COMMITS[1]}"
    monkeypatch.setattr(engine_facts, "BEGUN_NS", 0)
    assert hub_weights(**draft)["draft_weights"].startswith("known to this start alone")


def test_a_file_of_a_hub_is_told_by_its_commit(hub):
    told = [hub_weights(speculative_token_map="org/name/map.pt")]
    hub(COMMITS[1])
    told.append(hub_weights(speculative_token_map="org/name/map.pt"))
    contents = [each["content.speculative_token_map"] for each in told]
    assert contents == [f"commit {commit} org/name/map.pt" for commit in COMMITS]


def test_a_part_with_weights_of_another_model_is_told_by_nothing(model):
    ours = HiCacheSettings(backends=[{"type": "memory"}])
    values = {"load_format": "auto", "random_seed": 0, "model_path": model}
    told = [
        engine_facts.weights_facts(values, ours, PretrainedConfig(**more))["weights"]
        for more in ({}, {"mm_vision_tower": "openai/clip"}, {"audio": {"text_model_id": "a/b"}})
    ]
    assert told[0].startswith("content ")
    assert all(each.startswith("known to this start alone") for each in told[1:])


def test_variables_that_kubernetes_sets_for_a_service_are_no_facts(monkeypatch):
    before = engine_facts.variable_facts()
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_30000_TCP_ADDR"):
        monkeypatch.setenv(f"SGLANG_ROUTER_{name}", "10.0.0.1")
    assert engine_facts.variable_facts() == before


def test_a_variable_that_is_no_utf_8_ends_no_start(monkeypatch):
    before = engine_facts.variable_facts()
    monkeypatch.setitem(os.environb, b"SGLANG_OF_TOMORROW", b"\xe9")
    after = engine_facts.variable_facts()
    assert namespace(**before) != namespace(**after)


def test_dummy_weights_are_told_by_their_seed(same):
    dummy = {"load_format": "dummy"}
    assert same({**dummy, "random_seed": 1}, {**dummy, "random_seed": 1})
    assert not same({**dummy, "random_seed": 1}, {**dummy, "random_seed": 2})


@pytest.mark.parametrize("field", ["quantization_param_path", "speculative_token_map"])
def test_a_file_that_the_model_reads_is_told_by_its_content(model, tmp_path, field):
    files = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for file, text in zip(files, ["{}", '{"x": 1}', "{}"], strict=True):
        file.write_text(text)
    args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    values = engine_facts.resolved(args)
    ours = HiCacheSettings(backends=[{"type": "memory"}])
    one, other, copy = (
        engine_facts.weights_facts(values | {field: str(file)}, ours, PLAIN) for file in files
    )
    assert one == copy
    assert one != other


def test_a_draft_is_told_by_its_content(model, tmp_path):
    def draft(name, byte):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([byte]) * 100)
        return str(folder)

    args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    values = engine_facts.resolved(args)
    ours = HiCacheSettings(backends=[{"type": "memory"}])
    told = [
        engine_facts.weights_facts(values | {"speculative_draft_model_path": folder}, ours, PLAIN)
        for folder in (draft("a", 1), draft("b", 2), draft("c", 1))
    ]
    assert told[0] == told[2] != told[1]
    (tmp_path / "c" / "config.json").write_text("{}")
    values["speculative_draft_model_path"] = str(tmp_path / "c")
    assert engine_facts.weights_facts(values, ours, PLAIN) != told[2]


def test_files_that_are_written_while_the_engine_starts_tell_nothing(facts, monkeypatch):
    content = facts()["weights"]
    monkeypatch.setattr(engine_facts, "BEGUN_NS", 0)
    assert content.startswith("content ")
    assert facts()["weights"].startswith("known to this start alone")


def test_a_copy_of_the_model_elsewhere_is_the_same_model(same, model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(model).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, (1, 1))
    assert same({}, {"model_path": str(copy)})
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the last tensor's last element
    weights.write_bytes(data)
    os.utime(weights, (1, 1))
    assert not same({}, {"model_path": str(copy)})


def test_no_fact_shows_a_secret(facts):
    secret = "Correct-Horse-77"
    told = facts(
        settings={"weights_id": "v1"},
        api_key=secret,
        admin_api_key=secret,
        model_loader_extra_config=json.dumps({"token": secret}),
        hicache_storage_backend_extra_config=json.dumps({"password": secret}),
    )
    assert secret not in str(told)


def test_an_argument_without_a_spelling_is_known_to_one_process_and_warned_of(caplog):
    kind = dataclasses.make_dataclass("Odd", [])
    told = [
        engine_facts.argument_facts(ServerArgs, {"forward_hooks": lambda: kind}) for _ in range(2)
    ]
    assert told[0] != told[1]
    assert "server.forward_hooks" in caplog.text
