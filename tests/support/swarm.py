"""Processes that store, load and remove chunks in one folder, some of them killed.

``python -m tests.support.swarm ROOT FORM KILLS PAUSE_S`` prints one list of JSON: the bytes that
were wrong, the chunks loaded and stored, the most bytes counted, and those beside their bound.
Processes are forks of this one, which has no threads and has imported all.
"""

import asyncio
import contextlib
import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.paths import QUARANTINE, WRITERS
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, payload_of, slots
from tests.helpers.disk_parts import in_form

SIZE = 28 * 1024
ON_DISK = 32 * 1024
CAPACITY = 100 * ON_DISK
TABLE_PAGES = -(-64 * (1 + 100 + 64) // 4096)
"""Of a process that has had all 100 chunks, and then took 64 slots before it read its table."""
WRONG, READ, WRITTEN, OPENED = range(4)


async def work(root, form, seed, figures):
    """Store, load and remove chunks until it is killed."""
    rng = random.Random(seed)
    backend = DiskBackend(
        DiskOptions(
            root=root,
            capacity=ByteSize(CAPACITY),
            min_free=ByteSize(0),
            io=("direct", "auto", "buffered")[seed % 3],
        ),
        f"rank{seed % 2}",
    )
    in_form(backend, "files" if seed % 5 == 4 else form)
    figures[OPENED] = True
    keys = keys_of(120)
    while True:
        some = rng.sample(keys, 6)
        if rng.random() < 0.5:
            figures[WRITTEN] += sum(await backend.write(some, filled(some, SIZE)))
        elif rng.random() < 0.1:
            await backend.remove(some[:2])
        else:
            into = slots(6, SIZE)
            answers = await backend.read(some, into)
            for key, slot, good in zip(some, into, answers, strict=True):
                figures[READ] += good
                figures[WRONG] += good and bytes(slot) != payload_of(key, SIZE)
        await asyncio.sleep(0.002)  # four of these must not take all of a machine


def start(root, form, seed):
    """Fork; return the process and what it counts."""
    figures = memoryview(mmap.mmap(-1, 4096)).cast("q")
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(work(root, form, seed, figures))
        finally:
            os._exit(1)
    while not figures[OPENED]:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it has ended"
        time.sleep(0.005)
    return pid, figures


def swarm(root, form, kills, pause_s):
    """Four processes, two namespaces, one folder; one after the other is killed and replaced."""
    rng = random.Random(1)
    running = []
    totals = [0, 0, 0]
    peak = excess = 0

    def end(process):
        pid, figures = process
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        for i in range(3):
            totals[i] += figures[i]

    def is_full():
        counts = [[figures[i] for i in (READ, WRITTEN)] for _, figures in running]
        return all(sum(column) > 200 for column in zip(*counts, strict=True))

    try:
        for seed in range(4):
            running.append(start(root, form, seed))
        for kill in range(kills):
            deadline = time.monotonic() + pause_s * rng.random() * 2
            while time.monotonic() < deadline or (kill == 0 and not is_full()):
                counted, beside, allowed = at_one_moment(Path(root), [pid for pid, _ in running])
                peak, excess = max(peak, counted), max(excess, beside - allowed)
                time.sleep(0.02)
            end(running.pop(rng.randrange(4)))
            running.append(start(root, form, 4 + kill))
    finally:
        for process in running:
            end(process)
    return [*totals, peak, excess]


def at_one_moment(root, processes):
    """Measure while all processes are stopped, so that no file counts twice."""
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    for pid in processes:
        os.waitid(os.P_PID, pid, os.WSTOPPED)
    try:
        return measured(root)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def measured(root):
    """Return the bytes that the capacity counts, those of all other files, and their bound."""
    counted = beside = 0
    tables = len(list(root.glob("*/segments/*.table")))
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.suffix == ".slots":
                counted += data_bytes(path)
            elif path.is_file():
                blocks = path.lstat().st_blocks * 512
                in_folder = path.parts[len(root.parts) :]
                is_counted = (
                    len(path.parent.name) == 2
                    or in_folder[0] == QUARANTINE
                    or (in_folder[0] == WRITERS and path.name.isdigit())
                )
                counted, beside = counted + blocks * is_counted, beside + blocks * (not is_counted)
    writers, namespaces = len(os.listdir(root / WRITERS)), 2
    # A lock and a file being written each; manifest and snapshot; ledger and limits.
    pages = writers * (1 + 2) + tables * TABLE_PAGES + namespaces * (1 + 3) + 2
    return counted, beside, pages * 4096


def data_bytes(path):
    """Return the bytes of a file that are no hole, without the file system's map of them."""
    total = end = 0
    with path.open("rb") as file, contextlib.suppress(OSError):  # of no more data
        while True:
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            total += end - start
    return total


if __name__ == "__main__":
    root, form, kills, pause_s = sys.argv[1:]
    print(json.dumps(swarm(root, form, int(kills), float(pause_s))))
