"""Two engines, each with an I/O process, on one root: one process dies, the other goes on."""

import os
import signal
import threading

import pytest

from tests.support.crash import _allocated
from tests.support.small_engine import SmallEngine

CAPACITY = 800 << 10
"""For a hundred chunks, which take 8 KiB each on the disk."""


@pytest.mark.parametrize("dies", ["first", pytest.param("second", marks=pytest.mark.chaos)])
def test_one_io_process_dies_and_the_other_goes_on(
    new_kv_caches, new_request, until, tmp_path, dies
):
    disk = {"type": "disk", "root": str(tmp_path), "capacity": CAPACITY, "min_free": 0}
    first = SmallEngine(new_kv_caches(seed=1), new_request, disk)
    first.store("p")
    second = SmallEngine(new_kv_caches(seed=2), new_request, disk)
    second.truth = first.truth
    second.await_hits("p")
    victim, other = (first, second) if dies == "first" else (second, first)
    pid_of_other = other.pid
    killer = threading.Timer(0.05, os.kill, (victim.pid, signal.SIGKILL))
    killer.start()
    loaded = 0
    for i in range(30):  # six times what the root holds
        other.store(f"o{i}")
        loaded += other.load(f"o{i}")
        victim.store(f"v{i}")
        victim.load(f"v{i}")
        assert _allocated(tmp_path) <= CAPACITY + 4 * 8192  # two chunks in flight each
    killer.join()
    until(lambda: victim.died and not victim.client._is_opening)
    assert loaded > 100
    assert (other.died, other.pid) == (0, pid_of_other)
    for writer, reader in ((other, victim), (victim, other)):
        writer.store(f"last {writer is victim}")
        reader.await_hits(f"last {writer is victim}")
    assert other.load("p") == 0
    for engine in (first, second):
        engine.check()
        engine.connector.close()
    assert not engine.held().children
    assert not list((tmp_path / ".writers").iterdir())
