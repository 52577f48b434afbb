"""The I/O process stopped, out of memory, out of descriptors: misses by value, then hits again."""

import os
import resource
import signal

import psutil
import pytest

from kvoffload.io import client as io_client
from tests.support.older_engine import older_engine
from tests.support.small_engine import SmallEngine


@pytest.fixture
def engine(kv_caches, new_request, tmp_path):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    with older_engine(tmp_path / "kv"):  # so chunks are files, each with a descriptor of its own
        engine = SmallEngine(kv_caches, new_request, disk, slots=24)
        engine.store("p")
        yield engine
        engine.check()
        engine.connector.close()
        assert engine.pid not in engine.held().children


@pytest.mark.parametrize("is_continued", [True, False])
def test_stopped(engine, monkeypatch, until, is_continued):
    monkeypatch.setattr(io_client, "SILENT_S", 10.0 if is_continued else 0.5)
    pid = engine.pid
    engine.wait_at_most(0.3)
    os.kill(pid, signal.SIGSTOP)
    assert engine.load("p") == 0
    engine.store("new")
    engine.wait_at_most(30.0)
    assert engine.connector.stats()["transfer_failures"]["deadline"] >= 10
    if is_continued:
        os.kill(pid, signal.SIGCONT)
        engine.check()
        engine.store("p")  # a store that did not answer in time counts as without the chunk
    else:
        until(lambda: engine.died)
        monkeypatch.setattr(io_client, "SILENT_S", 60.0)  # the next one may be slow
    engine.await_hits("p")
    assert (engine.died, engine.pid == pid) == (not is_continued, is_continued)


@pytest.mark.parametrize(
    "room_bytes", [0, *(pytest.param(n << 20, marks=pytest.mark.chaos) for n in (1, 4))]
)
def test_out_of_memory(engine, room_bytes):
    pid = engine.pid
    limit = psutil.Process(pid).memory_info().vms + room_bytes
    engine.wait_at_most(0.3)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for i in range(5):
        engine.store(f"new {i}")
        engine.load("p")
        engine.load(f"new {i}")
    if engine.pid == pid:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    engine.wait_at_most(30.0)
    engine.store("p")
    engine.await_hits("p")


def test_out_of_descriptors(engine):
    pid = engine.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    engine.wait_at_most(0.3)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    engine.store("new")
    assert engine.load("p") == 0
    assert engine.load("new") == 0
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    engine.wait_at_most(30.0)
    engine.store("p")
    engine.await_hits("p")
    assert (engine.died, engine.pid) == (0, pid)
