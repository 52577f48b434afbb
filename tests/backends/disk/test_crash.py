"""SIGKILL at random and at named system calls: nothing wrong, phantom, lost or unopenable."""

import json
import subprocess
import sys

import pytest

from tests.support.crash import POINTS


def run_campaigns(folder, cycles, seed):
    """One campaign without eviction, where nothing may be lost, and one with it, side by side.

    The chunks of the second one are encrypted.
    """
    running = []
    for name, extra in (("roomy", []), ("tight", ["--capacity", "400000", "--encrypted"])):
        words = ["--root", str(folder / name), "--cycles", str(cycles), "--seed", str(seed), *extra]
        command = [sys.executable, "-m", "tests.support.crash", *words]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    reports = []
    for process in running:
        out, _ = process.communicate()
        reports.append(json.loads(out))
    return reports


def check(reports, cycles, points):
    reached = set()
    for report in reports:
        bad = "wrong", "phantom", "lost", "unopenable", "leftovers", "over_capacity"
        assert {name: report[name] for name in bad} == dict.fromkeys(bad, 0), report
        assert report["cycles"] == cycles
        assert report["killed"] > cycles / 3
        assert report["reads"] > cycles
        reached |= set(report["at_points"])
    assert len(reached) >= points


@pytest.mark.timeout(1200)  # a busy machine may give it a small part of a core
def test_two_hundred_lives(ram_path):
    assert len(POINTS) >= 20
    check(run_campaigns(ram_path, 100, seed=11), 100, points=20)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_ten_thousand_lives(ram_path):
    check(run_campaigns(ram_path, 5_000, seed=12), 5_000, points=len(POINTS) - 8)
