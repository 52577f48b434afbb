"""The server of a host killed at a named point, with engines attached: it costs misses only."""

import pytest

from tests.support import kill_points

pytestmark = pytest.mark.chaos

POINTS = (
    "Load:received", "Load:taken", "Store:received", "Store:taken",
    "preadv:half", "Arrived:sent", "Answered:unsent", "Answered:half", "Answered:sent",
    "pwritev:half", "Figures:unsent", "Alive:sent",
    "Open:received", "store:opening", "store:opened", "Opened:unsent", "Opened:sent",
    "PresenceChanges:sent", "end:begun",
)  # fmt: skip
ATTACHING = ("Open:received", "store:opening", "store:opened", "Opened:unsent", "Opened:sent")


@pytest.mark.parametrize("point", kill_points.LOAN_POINTS + POINTS)
def test_a_server_killed_at_a_named_point_costs_only_misses(
    tmp_path, new_server, attach, until, kill_point, point
):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    # Chunks are lent that are in memory; the rest is reached by loads from the disk.
    memory = "1MiB" if point in kill_points.LOAN_POINTS else "64KiB"
    server = new_server(memory=memory, backends=[disk])
    engine, other = attach(server.path), attach(server.path)
    engine.store("p")
    other.truth = engine.truth
    other.await_hits("p")
    kill_point.arm(point)
    for i in range(50):
        if point in ATTACHING or point.startswith(("Borrow", "Passed")):
            attach(server.path, model=f"another {i}")
        elif point == "end:begun":
            other.connector.close()
        engine.store(f"new {i}")
        engine.load("p")
        if kill_point.killed_s:
            break
    until(lambda: kill_point.killed_s)
    server.process.wait(30)
    server.start()
    engine.await_hits("p")
    engine.store("p2")
    assert engine.load("p2") == 10
