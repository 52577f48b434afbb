"""The extra config of SGLang's HiCache: one object, of which SGLang reads a part."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvoffload.config import ByteSize
from kvoffload.connectors.sglang.hicache_settings import read_settings
from kvoffload.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples/sglang"
DISK = {"type": "disk", "root": "/kv"}
OF_SGLANG = {
    "backend_name": "kvoffload", "module_path": "m", "class_name": "c", "interface_v1": 1,
    "prefetch_threshold": 64, "allocator": "shm",
}  # fmt: skip


def test_the_keys_are_those_under_vllm_and_sglangs_own_are_left_to_it(monkeypatch):
    monkeypatch.delenv("KVOFFLOAD_SETTING_IO", raising=False)  # of this folder's other tests
    settings = read_settings({**OF_SGLANG, "backends": [DISK], "load_timeout_s": 2.0})
    assert settings.load_timeout_s == 2.0
    assert settings.io == "process"
    assert settings.backends[0].options == {"root": "/kv"}


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"cpu_bytes": "8GiB"}, "cpu_bytes.*--hicache-size"),
        ({"policy": "lru"}, "--radix-eviction-policy"),
        ({"blocks_per_chunk": 4}, "--page-size"),
        ({"otel_spans": True}, "shows no requests to its storage"),
        ({"batched_copies": False}, "HiCache copies"),
        ({"metrics_port": 0}, "must be 1 to 65535"),
        ({"control_socket": False}, "the endpoint clear of SGLang"),
        ({"tp_lcm_size": 8}, "tp_lcm_size.*--tp-size"),
        ({"load_timeout": 1}, "did you mean 'load_timeout_s'"),
        ({"load_timeout_s": "soon"}, "number of seconds"),
        ({"load_timeout_s": 8.5}, "load_timeout_s.*at most 8 under SGLang"),
        ({"lookup_timeout_s": 9}, "lookup_timeout_s.*at most 8 under SGLang"),
        ({"backends": [{"type": "dsk"}]}, "did you mean 'disk'"),
        ({"backends": [{**DISK, "capacty": 1}]}, "did you mean 'capacity'"),
        ({"backends": []}, "name a tier"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(extra, says):
    with pytest.raises(ConfigError, match=says):
        read_settings({**OF_SGLANG, "backends": [DISK], **extra})


def test_settings_come_from_the_environment_and_its_file_as_well(tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    file.write_text("load_timeout_s = 3.0\nlookup_timeout_s = 3.0\nstore_timeout_s = 3.0\n")
    monkeypatch.setenv("KVOFFLOAD_CONFIG", str(file))
    monkeypatch.setenv("KVOFFLOAD_SETTING_LOOKUP_TIMEOUT_S", "2.0")
    monkeypatch.setenv("KVOFFLOAD_SETTING_STORE_TIMEOUT_S", "2.0")
    monkeypatch.setenv("KVOFFLOAD_SETTING_BACKENDS", json.dumps([DISK]))
    settings = read_settings({**OF_SGLANG, "store_timeout_s": 1.0, "metrics_port": 9401})
    found = settings.load_timeout_s, settings.lookup_timeout_s, settings.store_timeout_s
    assert found == (3.0, 2.0, 1.0)
    assert settings.backends[0].options == {"root": "/kv"}
    assert settings.metrics_port == 9401


def test_what_the_environment_cannot_set_here_is_refused_with_its_source(monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_SETTING_CPU_BYTES", "8GiB")
    with pytest.raises(ConfigError, match=r"cpu_bytes.*source: environment.*--hicache-size"):
        read_settings({**OF_SGLANG, "backends": [DISK]})


def test_the_script_for_a_server_has_settings_that_can_be_read():
    command = ["sh", str(EXAMPLES / "serve.sh"), "MODEL"]
    env = {**os.environ, "PYTHON": "echo"}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    (disk,) = read_settings(json.loads(said[said.index("{") :])).backends
    assert ByteSize.parse(disk.options["capacity"]) <= 20 << 30
    assert ByteSize.parse(disk.options["min_free"]) >= 10 << 30


def test_the_compose_file_has_settings_that_can_be_read_and_installs_what_they_need():
    text = (EXAMPLES / "compose.yaml").read_text()
    start = text.index('{"backend_name"')
    extra = text[start : text.index("]}", start) + 2].replace("${KV_DISK:-200GiB}", "200GiB")
    settings = read_settings(json.loads(extra))
    assert [tier.type for tier in settings.backends] == ["disk", "redis"]
    installed = set(text.partition("&& pip install")[2].splitlines()[0].split())
    assert "secret_file" in settings.backends[1].options
    assert {"redis", "blake3"} <= installed
    assert settings.metrics_port is not None
