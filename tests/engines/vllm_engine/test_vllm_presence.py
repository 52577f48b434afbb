"""What tiers hold, the scheduler knows from its workers alone, also while the engine is idle."""

import contextlib
import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)


def settings(root):
    return {
        "cpu_bytes": "256MiB",
        "backends": [{"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}],
        # A lookup does not wait for a listing: what hits, was listed before.
        "lookup_timeout_s": 1e-6,
    }


def io_processes_below(pid):
    """Return the I/O processes below a process: of each, those from it up to that process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line = [int(folder.name)]
            while line[-1] > 1 and line[-1] != pid:
                stat = Path(f"/proc/{line[-1]}/stat").read_text()
                line.append(int(stat.rpartition(")")[2].split()[1]))
            if line[-1] == pid and b"kvoffload.io.process" in (folder / "cmdline").read_bytes():
                found.append(line)
    return found


def is_idle(pid):
    """Whether a process uses no time of a core for a second."""

    def used():
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = used()
    time.sleep(1)
    return used() == before


def opens(pid, root):
    """Return what a process has open or mapped below a folder."""
    descriptors = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [name for name in (*descriptors, *maps) if str(root) in name]


def test_two_ranks_hit_after_a_restart_and_the_scheduler_opens_no_store(
    start, prompts, tmp_path, until
):
    root = tmp_path / "kv"
    engine = start(settings(root), ranks=2)
    prompt = prompts(1, 1000)
    told = engine.generate(prompt)["tokens"]
    engine.ask("quiet")
    servers, workers, cores, fronts = zip(*io_processes_below(engine.process.pid), strict=True)
    assert [len(set(each)) for each in (servers, workers, cores, fronts)] == [2, 2, 1, 1]
    assert [opens(pid, root) for pid in {*workers, *cores, *fronts}] == [[]] * 4
    assert all(opens(pid, root) for pid in servers)
    engine.kill()
    again = start(settings(root), ranks=2)
    core = io_processes_below(again.process.pid)[0][2]
    until(lambda: is_idle(core), 60)  # nothing is asked of it
    answer = again.generate(prompt)
    assert (answer["cached"], answer["tokens"]) == ([992], told)
    again.kill()
