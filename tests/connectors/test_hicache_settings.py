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


def test_the_keys_are_those_under_vllm_and_sglangs_own_are_left_to_it():
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
        ({"metrics_port": 9401}, "--enable-metrics"),
        ({"load_timeout": 1}, "did you mean 'load_timeout_s'"),
        ({"load_timeout_s": "soon"}, "number of seconds"),
        ({"backends": [{"type": "dsk"}]}, "did you mean 'disk'"),
        ({"backends": [{**DISK, "capacty": 1}]}, "did you mean 'capacity'"),
        ({"backends": []}, "name a tier"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(extra, says):
    with pytest.raises(ConfigError, match=says):
        read_settings({**OF_SGLANG, "backends": [DISK], **extra})


def test_the_script_for_a_server_has_settings_that_can_be_read():
    command = ["sh", str(EXAMPLES / "serve.sh"), "MODEL"]
    env = {**os.environ, "PYTHON": "echo"}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    (disk,) = read_settings(json.loads(said[said.index("{") :])).backends
    assert ByteSize.parse(disk.options["capacity"]) <= 20 << 30
    assert ByteSize.parse(disk.options["min_free"]) >= 10 << 30


def test_the_compose_file_has_settings_that_can_be_read():
    text = (EXAMPLES / "compose.yaml").read_text()
    start = text.index('{"backend_name"')
    extra = text[start : text.index("]}", start) + 2].replace("${KV_DISK:-200GiB}", "200GiB")
    assert [tier.type for tier in read_settings(json.loads(extra)).backends] == ["disk", "redis"]
