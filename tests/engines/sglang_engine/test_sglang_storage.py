"""HiCache over kvoffload's tiers in a real engine: same outputs, hits after a kill, faults."""

import os
import signal
import time
from pathlib import Path

import pytest

from kvoffload.testing import Plan
from tests.support import redis_server
from tests.support.disk_chunks import stored_in
from tests.support.host_server import HostServer
from tests.support.planned_store import installed
from tests.support.redis_engine import PATIENT

pytestmark = pytest.mark.timeout(900)

STORED = 592
"""Tokens of a prompt of 600 that lie in whole pages before its last one."""
MINUTE_S = 60.0
NOTICED_S = 3.0
"""By then an engine has noticed what another one has stored in the same place."""


@pytest.fixture(scope="module")
def told(start, prompt):
    """What an engine without HiCache answers to four prompts."""
    plain = start()
    answers = [plain.generate(prompt(i))["tokens"] for i in range(4)]
    plain.kill()
    return answers


def test_disk_serves_after_a_flush_a_kill_and_another_page_size_never(
    start, prompt, told, tiers, disk, io_process, tmp_path
):
    first = start("dynamic", tiers(disk(tmp_path / "kv")))
    for i in range(3):
        assert first.generate(prompt(i))["tokens"] == told[i]
    for i in range(3):
        first.wait_stored(prompt(i), told[i])
    first.kill()
    second = start("dynamic", tiers(disk(tmp_path / "kv")))
    for i in range(3):
        answer = second.generate(prompt(i))
        assert answer["tokens"] == told[i]
        assert answer["storage"] == [STORED]

    # Chunks are damaged while the engine runs: each request is answered, and computed again.
    for i, chunk in enumerate(stored_in(tmp_path / "kv")):
        if i % 3 == 0:
            chunk.wipe()
        elif i % 3 == 1:
            chunk.cut(100)
        else:
            chunk.flip(-10)
    for i in range(3):
        second.forget()
        answer = second.generate(prompt(i))
        assert answer["tokens"] == told[i]
        assert answer["storage"] == [0]
    second.wait_stored(prompt(0), told[0])

    # The I/O process is killed: a miss, and hits again once it is back.
    os.kill(io_process(second), signal.SIGKILL)
    second.forget()
    assert second.generate(prompt(1))["tokens"] == told[1]
    second.wait_stored(prompt(1), told[1])
    second.kill()

    other = start("dynamic", tiers(disk(tmp_path / "kv")), page_size=32)
    answer = other.generate(prompt(1))
    assert answer["tokens"] == told[1]
    assert answer["storage"] == [0]
    other.kill()
    coarser = start("dynamic", tiers(disk(tmp_path / "kv")), dtype="float16")
    assert coarser.generate(prompt(1))["storage"] == [0]


@pytest.mark.skipif(redis_server.BINARY is None, reason=redis_server.MISSING)
def test_redis_serves_a_new_process_and_may_die(start, prompt, told, tiers, disk, tmp_path):
    server = redis_server.RedisServer(tmp_path / "redis")
    backend = {"type": "redis", "url": server.url, **PATIENT}
    first = start("dynamic", tiers(backend))
    assert first.generate(prompt(0))["tokens"] == told[0]
    first.wait_stored(prompt(0), told[0])
    first.kill()
    second = start("dynamic", tiers(backend))
    answer = second.generate(prompt(0))
    assert answer["tokens"] == told[0]
    assert answer["storage"] == [STORED]
    server.kill()
    for i in range(2):
        second.forget()
        answer = second.generate(prompt(i))
        assert answer["tokens"] == told[i]
        assert answer["storage"] == [0]
        assert answer["time_s"] < MINUTE_S


@pytest.mark.long
def test_a_server_of_the_host_outlives_an_engine_and_may_die(start, prompt, told, tiers, tmp_path):
    server = HostServer(tmp_path, memory="64MiB")
    first = start("dynamic", tiers(serve=server.path))
    first.wait_stored(prompt(0), told[0])
    first.kill()
    second = start("dynamic", tiers(serve=server.path))
    answer = second.generate(prompt(0))
    assert [answer["tokens"], answer["storage"]] == [told[0], [STORED]]
    server.kill()
    second.forget()
    answer = second.generate(prompt(0))
    assert [answer["tokens"], answer["storage"]] == [told[0], [0]]
    server.start()
    second.wait_stored(prompt(1), told[1])
    second.kill()
    server.kill()


@pytest.mark.long
def test_hanging_reads_cost_a_timeout_and_no_output(
    start, prompt, told, tiers, tmp_path, monkeypatch
):
    planned = installed(tmp_path, monkeypatch)
    backend = {"type": "planned", **planned.options, "root": str(tmp_path / "kv")}
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join([str(tmp_path / "site"), root])
    engine = start("dynamic", tiers(backend), env={"PYTHONPATH": paths})
    assert engine.generate(prompt(0))["tokens"] == told[0]
    engine.wait_stored(prompt(0), told[0])
    planned.set(Plan("hang", frozenset({"read"})))
    engine.forget()
    answer = engine.generate(prompt(0))
    assert answer["tokens"] == told[0]
    assert answer["storage"] == [0]
    assert answer["time_s"] < MINUTE_S  # the read hangs for ever
    planned.set()
    assert engine.generate(prompt(2))["tokens"] == told[2]
    engine.wait_stored(prompt(2), told[2])


@pytest.mark.long
def test_random_delays_and_failures_of_sglangs_own_injector(
    start, prompt, told, tiers, disk, tmp_path
):
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    engine = start("dynamic", tiers(disk(tmp_path / "kv")), env=faults)
    for _ in range(3):
        engine.forget()
        for i in range(4):
            assert engine.generate(prompt(i))["tokens"] == told[i]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_two_engines_share_a_store(start, prompt, told, tiers, disk, kind, tmp_path):
    """One stores, the other one hits at its first request, and the other way round."""
    backend = disk(tmp_path / "kv")
    if kind == "redis":
        if redis_server.BINARY is None:
            pytest.skip(redis_server.MISSING)
        server = redis_server.RedisServer(tmp_path / "redis")
        backend = {"type": "redis", "url": server.url, **PATIENT}
    engines = [start("dynamic", tiers(backend)) for _ in range(2)]
    for i, (one, other) in enumerate([engines, engines[::-1]]):
        one.wait_stored(prompt(i), told[i])
        time.sleep(NOTICED_S)
        answer = other.generate(prompt(i))
        assert answer["tokens"] == told[i]
        assert answer["storage"] == [STORED]
    for engine in engines:
        engine.kill()
    if kind == "redis":
        server.kill()
