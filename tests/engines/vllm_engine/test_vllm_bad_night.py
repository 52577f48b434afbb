"""A night of an operator with vLLM's API server: what the runbook says of each fault is true.

One server has a disk and a Redis below host memory. A real Prometheus with the example's rules
scrapes vLLM's own page. Each fault shows within 15 seconds while requests run, its alert fires, and
the remedy of the runbook ends it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from tests.engines.vllm_engine.api_server import Server
from tests.support import redis_server
from tests.support.disk_chunks import stored_in
from tests.support.older_engine import older_engine
from tests.support.prometheus import NEEDED, scraping
from tests.support.redis_server import RedisServer
from tests.support.small_disk import small_disk
from tests.support.span_receiver import span_receiver

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason=NEEDED),
    pytest.mark.skipif(redis_server.BINARY is None, reason=redis_server.MISSING),
]
SHOWN_S = 15.0
"""By when a fault must show."""
LENGTH = 500
STORED = 'kvoffload_store_chunks_total{tier="disk"}'


class Night:
    """A server, what watches it, and requests that never end."""

    def __init__(self, server, ask, prompts, root, redis, secret, spans):
        self.server, self.ask, self._prompts = server, ask, prompts
        self.root, self.redis, self.secret, self.spans = root, redis, secret, spans
        self._served = 0

    def prompt(self, seed):
        return self._prompts(1, LENGTH, seed=seed)[0]

    def serve(self):
        """Serve a prompt that no one sent before."""
        self._served += 1
        return self.server.ask(self.prompt(1000 + self._served))

    def shows(self, expression, limit_s=SHOWN_S):
        """Serve until a query has an answer, for as long as a fault may take to show."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            self.serve()
            if self.ask(expression, 0.0):
                return True
        return False

    def fires(self, alert, **labels):
        """Serve until an alert fires."""
        wanted = {"alertname": alert, "alertstate": "firing", **labels}
        pairs = ",".join(f'{name}="{value}"' for name, value in wanted.items())
        return self.shows(f"ALERTS{{{pairs}}}")

    def stores_again(self):
        """Serve until the disk has more chunks than now."""
        stored = self.ask(STORED)[0]["value"][1]
        return self.shows(f"{STORED} > {stored}")


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    with small_disk(folder, "size=64m,mode=0700") as is_small:
        if not is_small:
            pytest.skip("mounting a small tmpfs needs root")
        yield folder


@pytest.fixture(scope="module")
def night(models, prompts, tmp_path_factory, where):
    folder = tmp_path_factory.mktemp("night")
    secret = folder / "password"
    secret.write_text("the first password")
    secret.chmod(0o600)
    redis = RedisServer(folder / "redis", "--requirepass", "the first password")
    root = where / "root"
    extra = {
        "cpu_bytes": 40 * 32768,  # little more than two prompts
        "load_timeout_s": 2.0,
        "store_timeout_s": 2.0,
        "otel_spans": True,
        "backends": [
            {"type": "disk", "root": str(root), "capacity": "48MiB", "min_free": 0},
            {
                "type": "redis",
                "url": redis.url,
                "password_file": str(secret),
                "timeout_s": 0.5,
            },
        ],
    }
    small = ("--max-model-len", "1024", "--num-gpu-blocks-override", "40")
    # A tier without chunks in a full file system: of files, the tests can remove all.
    with older_engine(root), span_receiver() as (endpoint, spans):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "500"}
        server = Server(models(), folder / "server.log", extra, *small, **environment)
        try:
            server.wait_ready()
            with scraping(server.port, folder, 8000) as ask:
                one = Night(server, ask, prompts, root, redis, secret, spans)
                assert one.shows("kvoffload_tier_up == 1", 60)
                time.sleep(3)  # rates need scrapes before a fault
                yield one
        finally:
            server.kill()
            redis.stop()


def chunks_of(root):
    return [path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def test_a_full_disk(night):
    filler = night.root.parent / "filler"
    while chunks := chunks_of(night.root):  # a tier that has chunks evicts them, and goes on
        for chunk in chunks:
            chunk.unlink()
        time.sleep(1)  # writes may be in flight
    filler.write_bytes(bytes(shutil.disk_usage(night.root).free))
    try:
        assert night.fires("KVOffloadWritesRefused", tier="disk")
    finally:
        filler.unlink()
    assert night.stores_again()


def test_a_killed_redis(night):
    night.redis.kill()
    try:
        assert night.fires("KVOffloadTierDown", tier="redis")
        assert night.fires("KVOffloadBreakerOpen", tier="redis")
    finally:
        night.redis.start()
    assert night.shows('kvoffload_tier_up{tier="redis"} == 1')
    assert night.shows('absent(ALERTS{alertname="KVOffloadTierDown", alertstate="firing"})')


def test_flipped_bits(night):
    prompt = night.prompt(1)
    answer = night.server.ask(prompt)
    for _ in range(4):  # neither host memory nor the engine has the first one then
        night.serve()
    for chunk in stored_in(night.root):
        chunk.flip(-100)
    assert night.server.ask(prompt) == answer
    assert night.fires("KVOffloadCorruptChunks", tier="disk", kind="payload")
    command = "from kvoffload.cli.main import main; main()"
    verify = [sys.executable, "-c", command, "verify", str(night.root)]
    assert subprocess.run([*verify, "--repair"], capture_output=True).returncode == 1
    assert subprocess.run(verify, capture_output=True).returncode == 0
    assert night.stores_again()


def test_a_killed_io_process(night):
    family = psutil.Process(night.server.process.pid).children(recursive=True)
    (process,) = [each for each in family if "kvoffload.io.process" in each.cmdline()]
    os.kill(process.pid, signal.SIGKILL)
    assert night.fires("KVOffloadIOProcessRestarts")
    assert night.shows("min(kvoffload_tier_up) == 1")
    assert night.stores_again()


def test_spans_of_requests_reach_the_receiver(night):
    night.serve()
    until_s = time.monotonic() + SHOWN_S
    names = (b"kvoffload.lookup", b"kvoffload.store", b"gen_ai.request.id")
    while not all(any(name in body for _, body in night.spans) for name in names):
        assert time.monotonic() < until_s, night.spans
        time.sleep(0.2)
