"""The I/O process killed at a named point: misses by value, and hits again soon."""

import os
import signal

import psutil
import pytest

from kvoffload.testing import Plan
from kvoffload.testing.backends import keys_of
from tests.helpers.until import wait
from tests.support import kill_points

ACTS = {
    "Load": "load", "preadv": "load", "Arrived": "load", "Answered": "load",
    "Store": "store", "pwritev": "store", "Figures": "store",
    "Ask": "ask", "Present": "ask", "Forget": "forget", "Remove": "remove", "Cancel": "cancel",
    "Open": "reopen", "store": "reopen", "Opened": "reopen", "greet": "reopen",
    "PresenceChanges": "reopen", "Alive": "reopen",
    "Renewal": "renew", "retire": "renew", "purge": "renew",
    "end": "close", "close": "close",
}  # fmt: skip
"""What an engine does for a point to be reached, by the point's first half."""

ALWAYS = ("preadv:half", "Arrived:sent", "pwritev:half", "Opened:unsent")
"""The points of ``make test``; ``make chaos`` has all."""


@pytest.fixture
def kill_point(tmp_path, monkeypatch):
    return kill_points.installed(tmp_path, monkeypatch)


def act(engine, planned, what):
    if what == "load":
        engine.load("p")
    elif what == "store":
        engine.store(f"new {len(engine.truth)}")
    elif what == "ask":
        engine.load("unknown")
    elif what == "remove":
        engine.client.remove("planned", keys_of(1))
    elif what == "forget":
        planned.set(Plan("miss", frozenset({"read"})))
        engine.load("p")
    elif what == "cancel":
        planned.set(Plan("hang", frozenset({"read"})))
        engine.load("p")
    elif what == "reopen":
        os.kill(engine.pid, signal.SIGKILL)
    elif what == "renew":
        for _ in range(2):  # the second one forgets the generation of the first, once it was open
            engine.connector.reset_cache()
            wait(lambda: engine.died or not engine.client._is_opening)
        engine.forget()
    elif what == "close":
        engine.connector.close()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point in ALWAYS else pytest.mark.chaos)
        for point in kill_points.POINTS
    ],
)
def test_killed_at_a_named_point_it_costs_only_misses(
    small_engine, until, tmp_path, kill_point, planned, point
):
    def start():
        disk = {"type": "planned", "root": str(tmp_path / "kv"), **planned.options}
        shy = {"type": "shy", **planned.options}
        return small_engine(disk, shy, load_timeout_s=0.5)

    others = {child.pid for child in psutil.Process().children()}
    engine, what = start(), ACTS[point.split(":")[0]]
    engine.store("p")
    engine.store("q")
    held = engine.held()
    kill_point.arm(point, 2 if point in ("store:opened", "PresenceChanges:sent") else 1)
    for _ in range(50):
        act(engine, planned, what)
        if kill_point.killed_s or what not in ("load", "store"):
            break
    until(lambda: kill_point.killed_s, 30)
    planned.set()
    engine.wait_at_most(30.0)
    if what == "close":
        assert not engine.held().children & held.children - others
        truth, engine = engine.truth, start()
        engine.truth = truth
    if what == "renew":
        until(lambda: engine.died and not engine.client._is_opening)
        engine.store("p")
    engine.await_hits("p")
    engine.store("p2")
    assert engine.load("p2") == 10
    engine.check()
    if what != "close":
        assert engine.died == 1 + (what == "reopen")
        engine.check_held(held)
    engine.connector.close()
    assert engine.pid not in engine.held().children
