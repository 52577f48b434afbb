"""The command lines of examples/vllm are ones that vLLM takes, with settings that we take."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import yaml

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # of 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks import vllm as bench
from benchmarks.vllm_parts.engine import Engine, make_model
from kvoffload import registry
from kvoffload.config import convert
from kvoffload.connectors.vllm.start import read_settings
from tests.engines.vllm_engine.api_server import completion
from tests.support.disk_chunks import stored_in
from tests.support.engine_process import kill_group

EXAMPLES = Path(__file__).parents[3] / "examples" / "vllm"
DOCS = (EXAMPLES.parents[1] / "docs" / "guides" / "vllm.md").read_text()
REDIS = EXAMPLES.parent / "redis" / "compose.yaml"


def parse(arguments):
    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)


def settings_of(arguments):
    """Parse the arguments behind ``vllm serve`` as vLLM does; return our settings among them."""
    transfer = parse(arguments).kv_transfer_config
    assert transfer.kv_connector == "KVOffloadConnector"
    assert transfer.kv_load_failure_policy == "recompute"
    settings = read_settings(transfer.kv_connector_extra_config)
    for backend in settings.backends:
        factory = registry.load(registry.BACKENDS, backend.type)
        convert(dict(backend.options), factory.Options)
    return settings


def test_the_script_that_serves(tmp_path):
    """With a Python that prints what it was called with."""
    printer = tmp_path / "python"
    printer.write_text(
        "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    printer.chmod(0o755)
    done = subprocess.run(
        ["sh", str(EXAMPLES / "serve.sh"), "some/model", "--port", "1234"],
        env={**os.environ, "PYTHON": str(printer), "KV_HOST": "2GiB"},
        capture_output=True,
        text=True,
        check=True,
    )
    option, module, *arguments = json.loads(done.stdout)
    assert option == "-m"
    assert importlib.util.find_spec(module)
    settings = settings_of(arguments)
    assert settings.cpu_bytes == 2 << 30
    assert [backend.type for backend in settings.backends] == ["disk"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_script_serves(models, prompts, tmp_path):
    """The server answers, stores what it computed, and serves it again after forgetting it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "server.log"
    options = ("--load-format", "dummy", "--enforce-eager", "--port", str(port))
    with open(log, "w") as output:
        server = subprocess.Popen(
            ["sh", str(EXAMPLES / "serve.sh"), models(), "--block-size", "32", *options],
            env={
                **os.environ,
                "PYTHON": sys.executable,
                "KV_HOST": "64MiB",
                "KV_DISK": "1GiB",
                "KV_ROOT": str(tmp_path / "kv"),
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 600
        while not answers(f"{url}/health"):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        first = ask(url, models(), prompts(1, 1000)[0])
        while not stored_in(tmp_path / "kv")[2:]:  # chunks of 256 tokens
            assert time.monotonic() < until, "not all chunks were stored"
            ask(url, models(), [3, 4, 5])  # the end of a store is heard of in a step
        urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"", timeout=60).close()
        assert ask(url, models(), prompts(1, 1000)[0]) == first
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
            metrics = page.read().decode()
        loaded = re.search(r'cached_by_source_total\{.*source="host"\} (\S+)', metrics)
        assert float(loaded[1]) == 3 * 256
        assert "reset_external=true" in DOCS  # as operators are told
        until_reset(f"{url}/reset_prefix_cache?reset_external=true")
        assert ask(url, models(), prompts(1, 1000)[0]) == first
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
            assert loaded[0] in page.read().decode()  # no more than before
    finally:
        kill_group(server)


def until_reset(url):
    for _ in range(50):  # it is refused while blocks are held
        with urllib.request.urlopen(url, data=b"", timeout=60) as answer:
            if json.load(answer)["success"]:
                return
        time.sleep(0.2)
    raise AssertionError("never reset")


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def ask(url, model, prompt):
    return completion(url, model=model, prompt=prompt, max_tokens=8, ignore_eos=True)


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
    redis = settings.backends[1].options
    given = {f"/run/secrets/{name}" for name in services["vllm"]["secrets"]}
    assert {redis["password_file"], redis["secret_file"]} == given
    assert services["vllm"]["ports"] == ["127.0.0.1:8000:8000"]
    assert services["redis"]["networks"] == ["cache"]
    assert yaml.safe_load(filled)["networks"]["cache"]["internal"]
    assert all("KV_UID" in service["user"] for service in yaml.safe_load(text)["services"].values())


def test_the_manifest_for_kubernetes(monkeypatch, tmp_path):
    """The image's entry point is ``vllm serve``: the arguments begin with the model."""
    text = (EXAMPLES.parent / "kubernetes" / "vllm.yaml").read_text()
    config, deployment, *_ = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    assert parse(arguments).model_tag == "Qwen/Qwen3-8B"
    assert 0 < parse(arguments).shutdown_timeout < pod["terminationGracePeriodSeconds"]
    (tmp_path / "kvoffload.json").write_text(config["data"]["kvoffload.json"])
    monkeypatch.setenv("KVOFFLOAD_CONFIG", str(tmp_path / "kvoffload.json"))
    settings = settings_of(arguments)
    assert settings.cpu_bytes == 32 << 30
    assert [backend.type for backend in settings.backends] == ["disk", "redis"]


def test_the_compose_file_of_redis_and_valkey():
    file = yaml.safe_load(REDIS.read_text())
    assert set(file["services"]) == {"redis", "valkey"}
    for name, service in file["services"].items():
        assert service["command"].startswith(f"{name}-server ")
        assert "--maxmemory-policy allkeys-lru" in service["command"]
        assert service["secrets"] == ["password", "operator_password"]
        assert "KV_UID" in service["user"]
        assert service["ports"] == ["127.0.0.1:6379:6379"]
    assert file["services"]["valkey"]["profiles"] == ["valkey"]
    assert set(file["secrets"]) == {"password", "operator_password"}


def test_the_engine_of_the_benchmark_times_the_call_of_its_scheduler(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "LOOKUP_CHUNKS", 50)
    extra = {"cpu_bytes": "16MiB", "blocks_per_chunk": 1}
    with Engine(make_model(tmp_path / "model"), extra) as engine:
        assert bench.scheduler_call(engine)["value"] > 0
