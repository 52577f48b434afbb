"""Engines, ranks and servers killed at each named point: right bytes, and nothing is lost or grows.

``make kills`` is the long form; the server's memory is kept for the next one.
"""

import os

import pytest

from tests.support import kill_campaign

MEMORY = "1MiB"
"""It has no room for all that engines store."""
AT_EACH_POINT = int(os.environ.get("KILLS_AT_EACH_POINT", "20"))


def kills(few, points):
    """Few kills, and a campaign."""
    many = AT_EACH_POINT * len(points)
    marks = [pytest.mark.chaos, pytest.mark.timeout(7200 + 10 * many)]
    return pytest.mark.parametrize("kills", [few, pytest.param(many, marks=marks, id="many")])


@kills(10, kill_campaign.ENGINE_POINTS)
@pytest.mark.parametrize("rank", [False, True], ids=["engines", "ranks"])
def test_engines_killed_at_named_points_leave_right_bytes_and_nothing_else(
    new_server, until, kills, rank
):
    server = new_server(memory=MEMORY, policy="lru")
    print(kill_campaign.kill_engines(server, kills, until, rank))
    assert "Traceback" not in server.log


@kills(len(kill_campaign.SERVER_POINTS), kill_campaign.SERVER_POINTS)
def test_servers_killed_at_named_points_cost_engines_misses_and_nothing_else(
    tmp_path, until, kills
):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    server = kill_campaign.Server(tmp_path, memory=MEMORY, policy="lru", backends=[disk])
    try:
        print(kill_campaign.kill_servers(server, kills, until))
        log = server.log.read_text()
        assert log.count("chunks of the server before are adopted") == kills
        assert "Traceback" not in log
    finally:
        server.close()
