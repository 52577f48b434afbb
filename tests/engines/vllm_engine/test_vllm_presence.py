"""What tiers hold, the scheduler knows from its workers alone, also while the engine is idle."""

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


def processes_below(pid):
    """Return the command lines of all processes below one, by process id."""
    found, pending = {}, {pid}
    while pending:
        above, pending = pending, set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in above:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = command
                    pending.add(int(folder.name))
            except OSError:
                continue  # it has ended
    return found


def opens(pid, root):
    """Return what a process has open or mapped below a folder."""
    descriptors = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [name for name in (*descriptors, *maps) if str(root) in name]


def test_two_ranks_hit_after_a_restart_and_the_scheduler_opens_no_store(start, prompts, tmp_path):
    root = tmp_path / "kv"
    # Below a fork the processes of 0.33's Model Runner V2 do not name themselves.
    engine = start(settings(root), ranks=2, anew=True)
    prompt = prompts(1, 1000)
    told = engine.generate(prompt)["tokens"]
    engine.ask("quiet")
    processes = processes_below(engine.process.pid)
    cores = [pid for pid, command in processes.items() if "EngineCore" in command]
    workers = [pid for pid, command in processes.items() if "Worker" in command]
    servers = [pid for pid, command in processes.items() if "kvoffload.io.process" in command]
    assert [len(cores), len(workers), len(servers)] == [1, 2, 2], processes
    assert [opens(pid, root) for pid in cores + workers] == [[]] * 3
    assert all(opens(pid, root) for pid in servers)
    engine.kill()
    again = start(settings(root), ranks=2)
    time.sleep(15)  # nothing is asked of it
    answer = again.generate(prompt)
    assert (answer["cached"], answer["tokens"]) == ([992], told)
    again.kill()
