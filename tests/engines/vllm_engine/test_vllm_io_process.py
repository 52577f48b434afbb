"""The tiers' code in a process of its own: hits from disk, and what its death costs."""

import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)


def settings(root):
    return {
        "cpu_bytes": "256MiB",
        "backends": [{"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}],
        "io": "process",
        "lookup_timeout_s": 30.0,  # until the folder is listed, however long it takes
    }


def io_processes_with(root):
    """List the processes that have something open below a folder; only I/O processes may."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names = [os.readlink(each) for each in (folder / "fd").iterdir()]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if any(str(root) in name for name in names):
            assert b"kvoffload.io.process" in command, command
            found.append(int(folder.name))
    return found


def test_chunks_come_back_from_disk_also_after_the_process_died(start, prompts, tmp_path, until):
    root = tmp_path / "kv"
    first = start(settings(root))
    wanted = prompts(2, 1000)
    told = first.generate(wanted)["tokens"]
    first.ask("quiet")
    (pid,) = io_processes_with(root)
    first.kill()
    ended = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < ended:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}"), "it outlives its engine"
    again = start(settings(root))
    answer = again.generate(wanted[:1])
    assert (answer["tokens"], answer["cached"]) == (told[:1], [992])
    (pid,) = io_processes_with(root)
    os.kill(pid, signal.SIGKILL)
    answer = again.generate(wanted)
    assert answer["tokens"] == told
    until(lambda: "is started again" in again.log)
    new = prompts(1, 1000, seed=7)
    answer = again.generate(new)
    again.ask("quiet")
    (other,) = until(lambda: io_processes_with(root), 60)
    assert other != pid
    again.kill()
