"""An engine killed while it loads and stores leaves nothing behind."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.preloaded import Fork

ENGINE = """
import sys
from tests.conftest import FakeRequest, make_kv_caches
from tests.support.small_engine import SmallEngine

disk = {"type": "disk", "root": sys.argv[1], "capacity": "64MiB", "min_free": 0}
engine = SmallEngine(make_kv_caches(), FakeRequest, disk)
engine.store("p")
print(engine.pid, flush=True)
while True:
    for i in range(50):
        engine.store(f"p{i}")
        engine.load("p")
"""
LEFT_BY_S = 20.0
ROOT = Path(__file__).parents[2]


def has_slab(process):
    return "memfd:kvoffload-slab" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_nothing_is_left_of_a_killed_engine(until, tmp_path, preloaded, is_stopped):
    root = tmp_path / "kv"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    streams = [None, subprocess.PIPE, None]
    engine = Fork(preloaded, ["-c", ENGINE, str(root)], streams, cwd=ROOT, env=environment)
    with engine.stdout:
        process = psutil.Process(int(engine.stdout.readline()))
    time.sleep(0.3 * random.random())
    assert has_slab(process)
    assert list((root / ".writers").iterdir())
    if is_stopped:
        os.kill(process.pid, signal.SIGSTOP)
    engine.kill()
    engine.wait()
    until(lambda: not process.is_running() or process.status() == "zombie", LEFT_BY_S)
    assert not list((root / ".writers").iterdir()), "temporary files are left"
    assert set(os.listdir(tmp_path)) == {"kv"}
