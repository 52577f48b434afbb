"""Writers on two mounts that are killed at any moment; the long campaign is run by make chaos."""

import pytest

from tests.support import folder_crash
from tests.support.folder_crash import ON_DISK, WRITERS, campaign

CAPACITY = 64 * ON_DISK


@pytest.mark.parametrize(
    "kills", [24, pytest.param(10_000, marks=[pytest.mark.chaos, pytest.mark.timeout(3000)])]
)
def test_no_kill_gives_a_wrong_byte_or_breaks_the_capacity(mounts, monkeypatch, kills):
    crash = folder_crash
    for module in (crash.upkeep, crash.evictor, crash.scan, crash.waiting_writes):
        names = ("TURN_S", "LEASE_S", "_RENEW_S", "DEAD_S", "SURELY_S", "LEFTOVER_S", "_ROOM_S")
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    report = campaign([str(mount / "kv") for mount in mounts], kills, seed=1, capacity=CAPACITY)
    assert report.wrong == report.failed == report.leftovers == 0, report
    assert report.stored > kills, report
    assert report.read > kills, report
    assert report.found_after > 0, report
    in_flight = 2 * WRITERS * 2 * ON_DISK
    assert report.most_bytes <= CAPACITY * 1.02 + in_flight, report
