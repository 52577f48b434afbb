"""``kvoffload config``: what it refuses, what it shows, and where settings come from."""

import json
import os
import re
import sys
import traceback
from functools import partial

import disk_commands
import fastjsonschema
import pytest
from disk_commands import answered

from kvoffload.cli.config_command import Engine, json_schema
from kvoffload.config import OffloadConfig, parse_config
from kvoffload.config_sources import gather, read_file
from kvoffload.connectors.vllm.start import VllmConfigSettings
from kvoffload.errors import ConfigError
from kvoffload.registry import read_options
from tests.support import redis_server

GOOD = {"cpu_bytes": "1GiB", "backends": [{"type": "memory", "capacity": "2GiB"}]}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVOFFLOAD_")]:
        monkeypatch.delenv(name)


def kvoffload(*words, command="config", **env):
    return disk_commands.kvoffload(command, *words, **env)


doctor = partial(kvoffload, command="doctor")
SAME_ROOT = [{"type": "disk", "root": root, "capacity": "1GiB"} for root in ("/x/kv", "/x/kv/")]


# ---- check ----


@pytest.mark.parametrize("ending", ["json", "toml", "yaml"])
def test_a_right_file_is_right(tmp_path, ending):
    path = tmp_path / f"settings.{ending}"
    path.write_text(
        {
            "json": json.dumps(GOOD),
            "toml": 'cpu_bytes = "1GiB"\n[[backends]]\ntype = "memory"\ncapacity = "2GiB"\n',
            "yaml": "cpu_bytes: 1GiB\nbackends:\n- {type: memory, capacity: 2GiB}\n",
        }[ending]
    )
    if ending == "yaml":
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    code, out, _ = kvoffload("check", str(path))
    assert (code, out) == (0, "the settings are right; host memory: 1.0 GiB, tiers: memory\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_byte": 1}, "did you mean 'cpu_bytes'?"),
        ({"cpu_bytes": "1GiB", "policy": "LUR"}, "did you mean"),
        ({"cpu_bytes": 1, "backends": [{"type": "disk", "capacty": 1}]}, "backends[0].capacty"),
        (
            {"cpu_bytes": 1, "backends": SAME_ROOT},
            "backends[1].root = '/x/kv/': is where backends[0]",
        ),
        (
            {"cpu_bytes": 1, "backends": [SAME_ROOT[0], {**SAME_ROOT[1], "type": "folder"}]},
            "backends[1].root = '/x/kv/': is where backends[0]",
        ),
        ({}, "cpu_bytes = None: is required"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy_and_exit_code_2(settings, message):
    code, out, err = kvoffload("check", json.dumps(settings))
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("root", [{}, {"root": "/"}])
def test_tiers_of_a_plug_in_may_have_one_root_each_in_another_store(planned, root):
    """It may be no folder; ``place`` of the open store says what two tiers must not share."""
    tiers = [{"type": "planned", "plan": plan, **root} for plan in "ab"]
    code, _, err = kvoffload("check", json.dumps({"cpu_bytes": 1, "backends": tiers}))
    assert (code, err) == (0, "")


REDIS = {"type": "redis", "url": "redis://h", "secret_file": "/secret"}


@pytest.mark.parametrize(
    ("settings", "module", "message"),
    [
        ({"metrics_port": 9401}, "prometheus_client", "metrics_port = 9401: needs its extra"),
        ({"otel_spans": True}, "opentelemetry", "otel_spans = True: needs its extra"),
        ({"backends": [REDIS]}, "blake3", "backends[0].secret_file = '/secret': needs its extra"),
    ],
)
def test_an_extra_that_is_missing_is_named_as_at_the_start(monkeypatch, settings, module, message):
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = kvoffload("check", json.dumps(GOOD | settings))
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "must end in .toml"),
        ("a.toml", "x = ", "is damaged"),
        ("a.json", "[1]", "must be an object of settings"),
        ("a.json", None, "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = kvoffload("check", str(tmp_path / name))
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "backends:\n- password: 'hunter2\n", "line 3"),
        ("a.yaml", "cpu_bytes: 1\npassword: *hunter2\n", "line 2"),
        ("a.yaml", "password: !!int hunter2\n", "is damaged: ValueError"),
        ("a.toml", "cpu_bytes = 1\npassword = hunter2\n", "line 2"),
        ("a.json", '{"password": "hunter2"', "line 1"),
    ],
)
def test_a_damaged_file_is_told_by_its_line_without_what_is_in_it(tmp_path, name, text, message):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml", reason="needs PyYAML")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path / name))
    assert message in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("rest", ["", ', "a": {"a":' + "[" * 3000])
def test_damaged_json_on_the_command_line_is_not_repeated(rest):
    code, _, err = kvoffload("check", '{"password": "hunter2"' + rest)
    assert code == 2
    assert "is damaged" in err
    assert "hunter2" not in err


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("KVOFFLOAD_SETTING_REDIS_PASSWORD", "hunter2"),
        ("KVOFFLOAD_SETTING_BACKENDS", '[{"type": "redis", "password": "hunter2"}'),
        ("KVOFFLOAD_SETTING_BACKENDS", """'[{"type": "redis", "password": "hunter2"}]'"""),
        ("KVOFFLOAD_SETTING_BACKENDS", '"redis hunter2"'),
        ("KVOFFLOAD_SETTING_BACKENDS", "redis hunter2"),
        ("KVOFFLOAD_SETTING_BACKENDS", "type: redis\npass: hunter2"),
        ("KVOFFLOAD_SETTING_BACKENDS", '{"type": "redis", "pass": "hunter2"}'),
    ],
)
def test_a_wrong_variable_is_named_without_its_value(variable, text):
    with pytest.raises(ConfigError, match=variable) as caught:
        gather({}, ["backends"], {variable: text})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "backends",
    [
        "redis hunter2",
        {"type": "redis", "pass": "hunter2"},
        ["redis hunter2"],
        [{"typ": "redis", "pass": "hunter2"}],
        [{"type": {"redis": "hunter2"}}],
    ],
)
def test_what_is_no_tier_is_told_without_its_value(backends):
    with pytest.raises(ConfigError, match="backends") as caught:
        parse_config({"cpu_bytes": 1, "backends": backends})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "name",
    [
        "pasword",
        "Password",
        "passwort",
        "redis_password",
        "api_key",
        "AUTH_PASS",
        "pw",
        "credentials",
    ],
)
def test_a_misspelt_password_is_not_repeated(name):
    options = {"url": "redis://h", name: "hunter2"}
    for kind in ("redis", "no such plug-in"):
        settings = {"cpu_bytes": 1, "backends": [{"type": kind, **options}]}
        for command, result in (("check", 2), ("show", 0)):
            code, out, err = kvoffload(command, json.dumps(settings))
            assert code == result
            assert "hunter2" not in out + err
    with pytest.raises(ConfigError, match=rf"{name} = '\*\*\*': unknown key") as caught:
        read_options("redis", options, "backends[0].")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", ["password_env", "sentinel_password_env"])
def test_a_password_in_place_of_its_variables_name_is_not_repeated(name):
    options = {"type": "redis", "url": "redis://127.0.0.1:1"}
    settings = {"cpu_bytes": 1, "backends": [{**options, name: "hunter2"}]}
    _, out, err = kvoffload("check", json.dumps(settings), "--probe")
    assert f"{name}" in out
    assert "environment variable is not set" in out
    assert "hunter2" not in out + err + kvoffload("show", json.dumps(settings))[1]
    settings["backends"][0][name] = "REDIS_PASSWORD_2"
    assert "REDIS_PASSWORD_2" in kvoffload("show", json.dumps(settings))[1]


def test_the_whole_transfer_config_of_vllm_is_checked_too():
    whole = {"kv_connector": "KVOffloadConnector", "kv_connector_extra_config": GOOD}
    code, out, _ = kvoffload("check", json.dumps(whole))
    assert code == 0
    assert out.startswith('warning: without "kv_load_failure_policy": "recompute"')
    whole["kv_load_failure_policy"] = "recompute"
    assert "warning" not in kvoffload("check", json.dumps(whole))[1]


@pytest.mark.parametrize(
    "options",
    [
        *({"url": url} for url in ("hunter2@h", "//hunter2@h:1", "h?password=hunter2", "hunter2")),
        *({"url": "redis://h", name: "hunter2"} for name in ("username", "sentinel_username")),
        {"root": "/kv", "username": "hunter2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["redis", "disk"])
def test_a_url_without_scheme_and_a_user_name_are_not_shown(kind, options):
    settings = {"cpu_bytes": 1, "backends": [{"type": kind, **options}]}
    for command in ("show", "check"):
        _, out, err = kvoffload(command, json.dumps(settings))
        assert "hunter2" not in out + err
    assert "hunter2" not in repr(parse_config(settings))


def test_a_probe_examines_each_tier(tmp_path):
    (tmp_path / "root").mkdir(0o700)
    disk = {"type": "disk", "root": str(tmp_path / "root"), "capacity": "1GiB"}
    dead = {"type": "redis", "url": f"redis://127.0.0.1:{redis_server.free_port()}"}
    right = {"cpu_bytes": "1GiB", "backends": [disk]}
    code, out, _ = kvoffload("check", json.dumps(right), "--probe", "--json")
    assert code == 0, out
    assert {each["check"] for each in json.loads(out)["tiers"]["backends[0] disk"]} >= {"space"}
    wrong = {"cpu_bytes": "1GiB", "backends": [disk, dead]}
    code, out, _ = kvoffload("check", json.dumps(wrong), "--probe")
    assert code == 1
    assert "backends[1] redis: " in out
    last = "no setting is wrong, but a tier failed: backends[1] redis"
    assert out.splitlines()[-1] == last
    absent = {"cpu_bytes": 1, "backends": [disk | {"root": str(tmp_path / "absent")}, disk]}
    code, out, _ = kvoffload("check", json.dumps(absent), "--probe", "--json")
    assert code == 1
    assert next(each[0]["verdict"] for each in json.loads(out)["tiers"].values()) == "failed"
    assert "backends[1] disk" in out
    assert "failed" in out


def test_settings_of_a_server_are_known_as_such(tmp_path):
    file, root = tmp_path / "serve.json", tmp_path / "root"
    root.mkdir(0o700)
    disk = {"type": "disk", "root": str(root), "capacity": "1GiB"}
    settings = {"socket": f"{tmp_path}/s", "memory": "1GiB", "backends": [disk]}
    file.write_text(json.dumps(settings))
    code, _, err = kvoffload("check", str(file))
    assert (code, "kvoffload serve --config FILE --check" in err) == (2, True)
    found = answered("doctor", "--config", str(file), code=1)["tiers"]
    (server,), tier = found[f"serve {tmp_path}/s"], found["backends[0] disk"]
    assert (server["verdict"], "start kvoffload serve" in server["remedy"]) == ("failed", True)
    assert {each["check"] for each in tier} >= {"space", "throughput"}


# ---- sources ----


def test_a_doctor_examines_every_tier_of_a_configuration_with_one_exit_code(tmp_path, monkeypatch):
    (tmp_path / "root").mkdir(0o700)
    disk = {"type": "disk", "root": str(tmp_path / "root"), "capacity": "1GiB"}
    dead = {"type": "redis", "url": f"redis://127.0.0.1:{redis_server.free_port()}"}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"cpu_bytes": "1GiB", "backends": [disk]}))
    code, out, _ = doctor("--config", str(file), "--json")
    assert code == 0, out
    found = json.loads(out)
    assert found["warnings"] == []
    assert {each["check"] for each in found["tiers"]["backends[0] disk"]} >= {"space", "rights"}
    both = json.dumps({"cpu_bytes": "1GiB", "backends": [disk, dead]})
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = doctor("--config", both)
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"^backends\[0\] disk$.*^backends\[1\] redis$", out, re.M | re.S)
    assert "reachable" in out
    code, out, err = doctor("--config", json.dumps({"cpu_bytes": 1, "backends": [{"type": "d"}]}))
    assert (code, out) == (2, "")
    assert "backends[0].type" in err
    whole = {"kv_connector": "KVOffloadConnector", "kv_connector_extra_config": {"cpu_bytes": 1}}
    code, out, _ = doctor("--config", json.dumps(whole))
    assert code == 0
    assert out.startswith('warning: without "kv_load_failure_policy"')
    assert out.endswith("the settings name no tier: there is nothing to examine\n")


def test_a_doctor_of_a_path_with_nothing_there_names_a_folder_and_a_server(tmp_path):
    """Whoever makes a folder where the socket belongs keeps the server from starting."""
    code, _, err = doctor(str(tmp_path / "s"))
    assert code == 2
    remedy = "; a server's socket is there once kvoffload serve runs"
    assert f"mkdir -p -m 700 {tmp_path}/s{remedy}" in err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("more", [["/tmp"], ["--type", "disk"], ["-o", "capacity=1GiB"]])
def test_a_doctor_examines_a_configuration_or_a_store(more):
    code, out, err = doctor("--config", "{}", *more)
    assert (code, out) == (2, "")
    assert "--config" in err


def test_a_doctor_takes_what_a_reboot_has_removed_for_a_server():
    code, out, _ = doctor("/run/kvoffload-none/s", "--json")
    (found,) = json.loads(out)["findings"]
    assert (code, found["verdict"]) == (1, "failed")
    assert "No such file or directory" in found["detail"]
    assert found["remedy"] == (
        "start kvoffload serve there, as the user of the engines; "
        "a disk tier begins with an empty folder: mkdir -p -m 700 /run/kvoffload-none/s"
    )


def test_dictionary_precedes_environment_precedes_file_precedes_default(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('cpu_bytes = "1GiB"\npolicy = "lru"\nblocks_per_chunk = 2\n')
    env = {
        "KVOFFLOAD_CONFIG": str(path),
        "KVOFFLOAD_SETTING_POLICY": "arc",
        "KVOFFLOAD_SETTING_BLOCKS_PER_CHUNK": "4",
    }
    code, out, _ = kvoffload("show", '{"blocks_per_chunk": 8}', "--json", **env)
    assert code == 0
    told = json.loads(out)
    assert told["blocks_per_chunk"] == {"value": 8, "source": "the command line"}
    assert told["policy"] == {"value": "arc", "source": "environment"}
    assert told["cpu_bytes"] == {"value": 1 << 30, "source": f"file {path}"}
    assert told["promote"] == {"value": True, "source": "default"}


def test_a_variable_that_names_no_setting_is_an_error():
    with pytest.raises(ConfigError, match="did you mean 'KVOFFLOAD_SETTING_POLICY'"):
        gather({}, ["policy"], {"KVOFFLOAD_SETTING_POLCY": "lru"})


def test_connectors_read_the_same_sources(kv_caches, monkeypatch, tmp_path):
    from kvoffload.connectors.local import LocalConnector

    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"cpu_bytes": "20KiB", "blocks_per_chunk": 1}))
    monkeypatch.setenv("KVOFFLOAD_CONFIG", str(path))
    connector = LocalConnector({"policy": "lru"}, kv_caches, block_size=4, facts={"model": "m"})
    assert (connector.config.cpu_bytes, connector.config.policy) == (20 << 10, "lru")
    connector.close()


def test_a_list_in_the_environment_is_json(tmp_path):
    settings, _ = gather({}, ["backends"], {"KVOFFLOAD_SETTING_BACKENDS": '[{"type": "memory"}]'})
    assert settings == {"backends": [{"type": "memory"}]}
    with pytest.raises(ConfigError, match="must end in"):
        read_file("nothing")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o644, False), (0o664, True)])
def test_a_settings_file_that_others_may_change_is_warned_about(tmp_path, caplog, mode, warned):
    path = tmp_path / "settings.json"
    path.write_text("{}")
    path.chmod(mode)
    for _ in range(2):  # as an engine does
        read_file(str(path))
    assert caplog.text.count(f"chmod go-w {path}") == warned


def test_a_settings_file_of_another_user_is_warned_about(tmp_path, caplog):
    if os.geteuid():
        pytest.skip("needs root to give a file to another user")
    path = tmp_path / "settings.json"
    path.write_text("{}")
    os.chown(path, 12345, 12345)
    read_file(str(path))
    assert "belongs to user 12345" in caplog.text


OF_SGLANG = {
    "backend_name": "kvoffload", "module_path": "kvoffload.connectors.sglang",
    "class_name": "KVOffloadHiCache", "interface_v1": 1, "prefetch_threshold": 64,
}  # fmt: skip
ON_DISK = {"backends": [{"type": "disk", "root": "/kv", "capacity": "1TiB"}]}


def test_the_extra_config_of_sglang_is_checked_as_its_engine_does(tmp_path):
    check = partial(kvoffload, "check", "--engine", "sglang")
    code, out, _ = check(json.dumps({**OF_SGLANG, **ON_DISK}))
    assert (code, out) == (0, "the settings are right; host memory: 256.0 MiB, tiers: disk\n")
    file = tmp_path / "extra.json"
    file.write_text(json.dumps({**OF_SGLANG, **ON_DISK, "staging_bytes": "1GiB"}))
    assert "host memory: 1.0 GiB" in check(f"@{file}")[1]
    for wrong, says in (
        ({"cpu_bytes": "8GiB"}, "does not apply under SGLang (source: the command line); host"),
        ({"prefetch_treshold": 64}, "unknown key"),
        ({"backends": []}, "name a tier"),
        ({"backends": [{"type": "disk", "root": "/kv", "capacty": 1}]}, "did you mean 'capacity'?"),
    ):
        code, _, errors = check(json.dumps({**OF_SGLANG, **ON_DISK, **wrong}))
        assert (code, says in errors) == (2, True)
    code, _, errors = check(json.dumps(OF_SGLANG), KVOFFLOAD_SETTING_POLICY="lru")
    assert (code, "(source: environment)" in errors) == (2, True)


def test_what_sglang_needs_to_find_the_storage_is_warned_of():
    code, out, _ = kvoffload("check", "--engine", "sglang", json.dumps(ON_DISK), "--json")
    assert code == 0
    warnings = " ".join(json.loads(out)["warnings"])
    wanted = ("backend_name", "module_path", "class_name", "interface_v1")
    assert all(name in warnings for name in wanted)


def test_settings_of_sglang_in_the_environment_are_shown_with_their_source():
    env = {"KVOFFLOAD_SETTING_BACKENDS": json.dumps(ON_DISK["backends"])}
    code, out, _ = kvoffload("show", "--engine", "sglang", "--json", **env)
    assert code == 0
    shown = json.loads(out)
    assert shown["backends"]["source"] == "environment"
    assert shown["io"] == {"value": "process", "source": "default"}
    assert not {"cpu_bytes", "policy", "record"} & shown.keys()
    assert kvoffload("check", "--engine", "sglang", **env)[1].startswith("the settings are right")


# ---- show and schema ----


def test_show_has_every_setting_and_fits_eighty_columns():
    code, out, _ = kvoffload("show", json.dumps(GOOD), COLUMNS="80")
    assert code == 0
    assert all(name in out for name in ("cpu_bytes", "1.0 GiB", "load_timeout_s", "default"))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("engine", "kind"), [(Engine.VLLM, VllmConfigSettings), (Engine.LOCAL, OffloadConfig)]
)
def test_the_schema_takes_right_settings_and_refuses_wrong_ones(engine, kind):
    check = fastjsonschema.compile(json_schema(kind), use_default=False)
    check(GOOD)
    check({"cpu_bytes": 0, "backends": [{"type": "disk", "root": "/kv", "capacity": "1TiB"}]})
    for wrong in (
        {"cpu_bytes": "1 parsec"},
        {"cpu_bytes": 1, "backends": [{"type": "disk", "root": "/kv", "capacty": 1}]},
        {"cpu_bytes": 1, "backends": [{"type": "none"}]},
        {"cpu_bytes": 1, "unknown": 1},
    ):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            check(wrong)


def test_the_schema_is_printed():
    code, out, _ = kvoffload("schema", "--engine", "local")
    assert code == 0
    assert "canary" not in json.loads(out)["$defs"]["OffloadConfig"]["properties"]


def test_the_schema_of_sglang_takes_its_whole_extra_config():
    code, out, _ = kvoffload("schema", "--engine", "sglang")
    assert code == 0
    check = fastjsonschema.compile(json.loads(out), use_default=False)
    check({**OF_SGLANG, **ON_DISK, "metrics_port": 9401})
    for wrong in ({"cpu_bytes": 1}, {"prefetch_treshold": 64}):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            check({**OF_SGLANG, **ON_DISK, **wrong})
