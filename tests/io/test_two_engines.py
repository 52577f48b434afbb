"""Two engines, each with an I/O process, on one root: one process dies, the other goes on."""

import os
import signal
import threading

import pytest

from tests.support.crash import allocated
from tests.support.small_engine import SmallEngine

CAPACITY = 800 << 10
"""For a hundred chunks, which take 8 KiB each on the disk."""
SEEN_S = 30.0
"""How long a process that is starved of processor time may take to see another's chunks."""


@pytest.fixture
def engines(new_kv_caches, new_request, tmp_path):
    disk = {"type": "disk", "root": str(tmp_path), "capacity": CAPACITY, "min_free": 0}
    first = SmallEngine(new_kv_caches(seed=1), new_request, disk)
    first.store("p")
    second = SmallEngine(new_kv_caches(seed=2), new_request, disk)
    second.truth = first.truth
    yield first, second
    for engine in (first, second):
        engine.check()
        engine.connector.close()
    assert not {first.pid, second.pid} & first.held().children
    assert not list((tmp_path / ".writers").iterdir())


@pytest.mark.parametrize("first_dies", [True, pytest.param(False, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.chaos)])
def test_one_io_process_dies_and_the_other_goes_on(engines, until, tmp_path, first_dies, rounds):
    victim, other = engines if first_dies else engines[::-1]
    engines[1].await_hits("p")
    pid, loaded = other.pid, 0
    killer = threading.Timer(0.05, os.kill, (victim.pid, signal.SIGKILL))
    killer.start()
    for i in range(rounds):
        other.store(f"o{i}")
        loaded += other.load(f"o{i}")
        victim.store(f"v{i}")
        victim.load(f"v{i}")
        assert allocated(tmp_path) <= CAPACITY + 4 * 8192  # two chunks in flight each
    killer.join()
    until(lambda: victim.died and not victim.client._is_opening)
    assert (other.died, other.pid) == (0, pid)
    if rounds == 3:  # nothing is evicted yet
        assert loaded == 30
        victim.await_hits("p")
    else:
        assert loaded > 100
        for writer, reader in ((other, victim), (victim, other)):
            writer.store(f"last {writer is victim}")
            reader.await_hits(f"last {writer is victim}", SEEN_S)
        assert other.load("p") == 0, "the oldest is not evicted"
