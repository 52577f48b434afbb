"""The command lines of examples/vllm are ones that vLLM takes, with settings that we take."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvoffload import registry
from kvoffload.config import convert
from kvoffload.connectors.vllm.settings import read_settings

EXAMPLES = Path(__file__).parents[3] / "examples" / "vllm"
REDIS = EXAMPLES.parent / "redis" / "compose.yaml"


def settings_of(arguments):
    """Parse the arguments behind ``vllm serve`` as vLLM does; return our settings among them."""
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    transfer = parsed.kv_transfer_config
    assert transfer.kv_connector == "KVOffloadConnector"
    assert transfer.kv_load_failure_policy == "recompute"
    settings = read_settings(transfer.kv_connector_extra_config)
    for backend in settings.backends:
        factory = registry.load(registry.BACKENDS, backend.type)
        convert(dict(backend.options), factory.Options)
    return settings


def test_the_script_that_serves(tmp_path):
    """With a ``vllm`` on the path that prints what it was called with."""
    printer = tmp_path / "vllm"
    printer.write_text(
        "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    printer.chmod(0o755)
    done = subprocess.run(
        ["sh", str(EXAMPLES / "serve.sh"), "some/model", "--port", "1234"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "KV_HOST": "2GiB",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    command, *arguments = json.loads(done.stdout)
    assert command == "serve"
    assert arguments[0] == "some/model"
    settings = settings_of(arguments)
    assert settings.cpu_bytes == 2 << 30
    assert [backend.type for backend in settings.backends] == ["disk"]


def test_the_compose_file():
    text = (EXAMPLES / "compose.yaml").read_text()
    # As Docker Compose fills in variables: ${NAME:-default}, ${NAME:?message}.
    filled = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", re.sub(r"\$\{\w+:\?[^}]*\}", "some/model", text))
    services = yaml.safe_load(filled)["services"]
    assert set(services) == {"vllm", "redis"}
    settings = settings_of(services["vllm"]["command"])
    assert [backend.type for backend in settings.backends] == ["disk", "redis"]
    mounted = [volume.rpartition(":")[2] for volume in services["vllm"]["volumes"]]
    assert settings.backends[0].options["root"] in mounted
    assert services["vllm"]["depends_on"] == ["redis"]
    assert "--maxmemory-policy allkeys-lru" in services["redis"]["command"]


def test_the_compose_file_of_redis_and_valkey():
    file = yaml.safe_load(REDIS.read_text())
    assert set(file["services"]) == {"redis", "valkey"}
    for name, service in file["services"].items():
        (script,) = service["command"]
        assert f"exec {name}-server" in script
        assert "--maxmemory-policy allkeys-lru" in script
        assert service["secrets"] == ["password"]
        assert service["ports"] == ["127.0.0.1:6379:6379"]
    assert file["services"]["valkey"]["profiles"] == ["valkey"]
    assert set(file["secrets"]) == {"password"}
