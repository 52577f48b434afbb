"""The guide to a memory that all engines of a host share: a disk tier on a tmpfs."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from kvoffload.config import ByteSize
from kvoffload.config_sources import read_file
from tests.support.preloaded import Fork
from tests.support.small_disk import small_disk
from tests.support.small_engine import SmallEngine

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "examples" / "systemd"
FIRST = """
import json, sys, time
from tests.conftest import FakeRequest, make_kv_caches
from tests.support.small_engine import SmallEngine

engine = SmallEngine(make_kv_caches(), FakeRequest, json.loads(sys.argv[1]))
engine.store("p")
print([t.tolist() for t in engine.truth["p"]], flush=True)
time.sleep(60)
"""


@pytest.fixture
def unit():
    text = (UNITS / "mnt-kvoffload.mount").read_text()
    return dict(re.findall(r"^(\w+)=(.+)$", text, re.MULTILINE))


@pytest.fixture
def memory():
    """The example's tier in memory."""
    return read_file(str(UNITS / "host-memory.toml"))["backends"][0]


def test_the_unit_mounts_the_root_of_the_settings_and_has_room_for_its_capacity(unit, memory):
    options = dict(part.partition("=")[::2] for part in unit["Options"].split(","))
    assert unit["Where"] == memory["root"]
    assert options["mode"] == "0700"
    capacity = ByteSize.parse(memory["capacity"])
    assert 1.02 * capacity < ByteSize.parse(options["size"] + "iB") < 1.2 * capacity
    steps = (ROOT / "docs" / "guides" / "host-memory.md").read_text()
    assert f"-o {unit['Options']} none {unit['Where']}\n" in steps


def test_an_engine_loads_what_one_stored_that_was_killed(
    unit, memory, tmp_path, new_kv_caches, new_request, preloaded
):
    options = unit["Options"].replace("128G", "16M").replace("uid=vllm", f"uid={os.geteuid()}")
    with small_disk(tmp_path, options) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs with huge pages needs root, and such a kernel")
        tier = memory | {"root": str(tmp_path), "capacity": "8MiB"}
        words = ["-c", FIRST, json.dumps(tier)]
        first = Fork(preloaded, words, [None, subprocess.PIPE, None], cwd=ROOT)
        with first.stdout:
            stored = json.loads(first.stdout.readline())
        second = SmallEngine(new_kv_caches(seed=2), new_request, tier)
        try:
            second.truth["p"] = [torch.tensor(rows, dtype=torch.int8) for rows in stored]
            second.await_hits("p")
            first.kill()
            first.wait()
            assert second.load("p") == 10
            second.store("more")
            assert second.load("more") == 10
            second.check()
        finally:
            first.kill()
            first.wait()
            second.connector.close()
