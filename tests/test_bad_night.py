"""A night of an operator: each fault raises the alert of the runbook, and its remedy ends it.

Real files, a real redis-server, a real I/O process and a real Prometheus with the example's rules.
"""

import os
import shutil
import signal
import time

import pytest

from kvoffload.connectors.local import LocalConnector
from tests.support.disk_chunks import stored_in
from tests.support.moto import moto_server
from tests.support.prometheus import NEEDED, scraping
from tests.support.redis_server import free_port
from tests.support.server_faults import killed
from tests.support.small_disk import small_disk

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason=NEEDED),
]
SHOWN_S = 60.0
"""By when a fault must show, also on a busy machine."""


class Night:
    """An engine that serves, and a Prometheus that watches it."""

    def __init__(self, connector, ask, new_request):
        self.connector, self.ask, self._new_request = connector, ask, new_request
        self._served = 0

    def serve(self, name=None):
        """Store one prompt; return the tokens of it that could be loaded before."""
        self._served += 1
        name = name or f"prompt {self._served}"
        request = self._new_request(name, 41, request_id=f"{name} {self._served}")
        until_s = time.monotonic() + 60
        while (found := self.connector.get_num_new_matched_tokens(request, 0)) is None:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        if found:
            self.connector.update_state_after_alloc(request, [list(range(5, 16))], found)
            while not (ended := self.connector.poll()):
                assert time.monotonic() < until_s
                time.sleep(0.01)
            found = ended[0].num_loaded_tokens
        self.connector.after_forward(request, [list(range(5, 15))], 40)
        self.connector.flush(5)
        self.connector.request_finished(request)
        return found

    def shows(self, expression):
        """Serve until a query has an answer, for as long as a fault may take to show."""
        until_s = time.monotonic() + SHOWN_S
        while time.monotonic() < until_s:
            self.serve()
            if self.ask(expression, 0.0):
                return True
        return False

    def fires(self, alert):
        """Serve until an alert fires."""
        return self.shows(f'ALERTS{{alertname="{alert}", alertstate="firing"}}')


@pytest.fixture
def night(kv_caches, new_request, tmp_path):
    """Returns a function that begins a night with these tiers."""
    connectors, watchers = [], []

    def begin(*tiers, **settings):
        settings = {
            "cpu_bytes": "40KiB",
            "blocks_per_chunk": 2,
            "io": "process",
            "backends": tiers,
            "metrics_port": free_port(),
            "store_timeout_s": 2.0,
            "load_timeout_s": 1.0,
            **settings,
        }
        connector = LocalConnector(settings, kv_caches, block_size=4, facts={"model": "m"})
        connectors.append(connector)
        watcher = scraping(settings["metrics_port"], tmp_path)
        ask = watcher.__enter__()
        watchers.append(watcher)
        assert ask('up{job="kvoffload"} == 1')
        one = Night(connector, ask, new_request)
        one.serve()
        time.sleep(2.5)  # rates need scrapes before the fault
        return one

    yield begin
    for watcher in watchers:
        watcher.__exit__(None, None, None)
    for connector in connectors:
        connector.close()


def disk(root, capacity="64MiB", **more):
    return {"type": "disk", "root": str(root), "capacity": capacity, **more}


def redis(server, **more):
    return {"type": "redis", "url": server.url, "timeout_s": 0.5, **more}


def test_a_killed_redis(night, own_redis):
    night = night(redis(own_redis))
    with killed(own_redis):
        assert night.fires("KVOffloadTierDown")
        assert night.ask('ALERTS{alertname="KVOffloadBreakerOpen", alertstate="firing"}', 5)
    assert night.shows("kvoffload_tier_up == 1")


def test_a_wrong_password(night, tmp_path, own_redis):
    secret = tmp_path / "password"
    secret.write_text("wrong")
    secret.chmod(0o600)
    own_redis.cli("config", "set", "requirepass", "right")
    night = night(redis(own_redis, password_file=str(secret)))
    assert night.fires("KVOffloadTierDown")
    secret.write_text("right")
    assert night.shows("kvoffload_tier_up == 1")


def test_a_killed_io_process(night):
    night = night({"type": "memory", "capacity": "1MiB"})
    os.kill(int(night.connector.stats()["io_server"].split()[-1]), signal.SIGKILL)
    assert night.fires("KVOffloadIOProcessRestarts")
    assert night.shows("kvoffload_tier_up == 1")


def test_a_bucket_that_hangs(night):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
    pytest.importorskip("moto", reason="moto is not installed: the extra dev has it")
    with moto_server() as server:
        night = night({"type": "object", **server.options(timeout_s=0.5)})
        with server.paused():
            assert night.fires("KVOffloadTierDown")
            assert night.ask('ALERTS{alertname="KVOffloadBreakerOpen", alertstate="firing"}', 5)
        assert night.shows("kvoffload_tier_up == 1")


@pytest.mark.parametrize("kind", ["disk", "folder"])
def test_a_full_disk(night, tmp_path, kind):
    where = tmp_path / "small"
    where.mkdir()
    with small_disk(where, "size=4m,mode=0700") as is_small:
        if not is_small:
            pytest.skip("mounting a small tmpfs needs root")
        tier = disk(where / "root", "3MiB", min_free=0)
        if kind == "folder":
            tier = {"type": "folder", "root": str(where / "root"), "capacity": "16MiB"}
        night = night(tier)
        filler = where / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(where).free))
        if kind == "folder":  # the disk tier writes on: where a chunk of its own was
            assert night.fires("KVOffloadWritesRefused")
            filler.unlink()
        stored = night.ask(f'kvoffload_store_chunks_total{{tier="{kind}"}}')[0]["value"][1]
        assert night.shows(f'kvoffload_store_chunks_total{{tier="{kind}"}} > {stored}')
        night.connector.close()


def test_a_removed_folder(night, tmp_path):
    root = tmp_path / "root"
    night = night(disk(root))
    while left := list(root.iterdir()):  # the engine may be writing
        for entry in left:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
    assert night.shows('kvoffload_tier_events_total{reason="remade"} > 0')
    stored = night.ask('kvoffload_store_chunks_total{tier="disk"}')[0]["value"][1]
    assert night.shows(f'kvoffload_store_chunks_total{{tier="disk"}} > {stored}')


@pytest.mark.parametrize("kind", ["disk", "encrypted disk", "folder"])
def test_flipped_bits(night, tmp_path, kind):
    tier = disk(tmp_path / "root", type=kind.split()[-1])
    if "encrypted" in kind:
        keys = tmp_path / "keys"
        keys.touch(0o600)
        keys.write_text("0123456789abcdef" * 4)
        tier["encryption"] = {"key_file": str(keys)}
    night = night(tier)
    for chunk in stored_in(tmp_path / "root"):
        chunk.flip(-100)
    night.serve()
    night.serve()  # host memory has room for two prompts
    assert night.serve("prompt 1") < 40
    assert night.fires("KVOffloadCorruptChunks")
