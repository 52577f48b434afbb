"""The I/O process killed at random moments, over and over, while an engine loads and stores."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from kvoffload.io import backoff

RECOVERY_S = 2.0
"""From a kill to the next whole hit, without the new process's waits for a processor: 99 of 100."""


def waited_s(pid):
    """How long the process could have run, but no processor was free."""
    counted = Path(f"/proc/{pid}/schedstat")  # some kernels count nothing
    return int(counted.read_text().split()[1]) / 1e9 if counted.exists() else 0.0


def kill_while_it_works(engine, draw):
    """Kill after some milliseconds of work; return when."""
    killed_s = []

    def kill(pid):
        killed_s.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    died = engine.died
    threading.Timer(0.04 * draw.random(), kill, [engine.pid]).start()
    while engine.died == died:
        name = f"n{draw.randrange(40)}"
        if draw.random() < 0.3 or name not in engine.truth:
            engine.store(name)
        else:
            engine.load(name)
    return killed_s[0]


def kill_while_it_starts(engine, draw):
    """Kill the next process after some milliseconds; return when."""
    died = engine.died
    while not engine.client._link.is_up:
        engine.load("p")
    time.sleep(0.5 * draw.random() ** 2)
    os.kill(engine.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    while engine.died == died:
        engine.load("p")
    return killed_s


@pytest.mark.parametrize(
    ("slots", "kills"),
    [
        (6, 4),
        *(
            pytest.param(slots, 250, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)])
            for slots in (3, 6, 12, 40)
        ),
    ],
)
def test_killed_at_random_it_costs_only_misses(small_engine, tmp_path, monkeypatch, slots, kills):
    monkeypatch.setattr(backoff, "STEADY_S", 0.0)  # each death counts as a first one
    disk = {"type": "disk", "root": str(tmp_path), "capacity": "64MiB", "min_free": 0}
    engine, draw = small_engine(disk, slots=slots), random.Random(slots)
    engine.store("p")
    held, times_s, waits_s = engine.held(), [], []
    while len(times_s) < kills:
        if len(times_s) % 25 == 20:
            engine.connector.reset_cache()
            engine.store("p")
        killed_s = kill_while_it_works(engine, draw)
        if draw.random() < 0.2:
            killed_s = kill_while_it_starts(engine, draw)
        recovered_s = engine.await_hits("p") - killed_s
        waits_s.append(waited_s(engine.pid))
        times_s.append(recovered_s - waits_s[-1])
        engine.check()
    engine.check_held(held)
    engine.connector.close()
    assert engine.pid not in engine.held().children
    times_s.sort()
    print(f"{engine.died} deaths, {engine.connector.stats()['transfer_failures']}")
    print("seconds to hits again: median", times_s[len(times_s) // 2], "longest", times_s[-5:])
    print("and for a processor: median", sorted(waits_s)[kills // 2], "longest", max(waits_s))
    if kills == 250:
        assert times_s[len(times_s) * 99 // 100] < RECOVERY_S
