"""SIGKILL engines that share a folder by two mounts, and see that no reader gets a wrong byte.

Each writer is a process: it opens the root by one of its mounts, stores and loads keys that all
writers have in common, compares every loaded byte, and works until it is killed. The clocks of the
mounts' processes are twenty minutes apart.
"""

import asyncio
import gc
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kvoffload.backends.folder import evictor, scan, upkeep, waiting_writes
from kvoffload.backends.folder.backend import FolderBackend, FolderOptions
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, payload_of, slots
from tests.helpers.folder_parts import stored_bytes

SIZE = 12 * 1024
ON_DISK = 16 * 1024
NAMESPACE = "crash"
WRITERS = 4
"""Of each mount."""
LIFE_S, LONGEST_S = 0.1, 10.0
"""The longest life of a writer, once it has opened the root; and if it never does."""
_OPENED = 256
"""Place among the figures from which each writer says that it has opened the root."""


class Report(NamedTuple):
    """What a campaign found."""

    kills: int
    stored: int
    read: int
    """Chunks loaded and compared byte by byte."""
    evicted: int
    wrong: int
    """Loads that gave other bytes than those stored."""
    failed: int
    """Writers that ended by themselves."""
    most_bytes: int
    """Of all chunks, finished or not."""
    found_after: int
    """Chunks that a new engine loads when all others are dead."""
    leftovers: int
    """Unfinished files that its eviction has not removed."""


def campaign(roots: list[str], kills: int, seed: int, capacity: int, keys: int = 96) -> Report:
    """Kill so many writers, and then open the root once more."""
    # As lives are short here, so are leases and what else waits for dead processes.
    upkeep.TURN_S, upkeep.LEASE_S, upkeep._RENEW_S = 0.01, 0.1, 0.03
    evictor.DEAD_S, evictor.SURELY_S = 0.1, 0.05
    evictor.LEFTOVER_S = scan.LEFTOVER_S = 0.3
    waiting_writes._ROOM_S = 0.02
    figures = memoryview(mmap.mmap(-1, 4096)).cast("q")
    names, rng = keys_of(keys, f"crash{seed}"), random.Random(seed)
    gc.freeze()  # what is never looked at by the collector need not be copied for a child
    alive: dict[int, tuple[int, float]] = {}
    failed = most = done = 0
    look_s = 0.0
    writers = len(roots) * WRITERS
    free = list(range(writers))

    def told() -> list[int]:
        return [sum(figures[i::4][: writers + 1]) for i in range(4)]

    # On a fast machine many die before they have stored: then more are killed.
    while alive or done < kills or told()[0] <= kills:
        while free and (done + len(alive) < kills or told()[0] <= kills):
            place = free.pop()
            figures[_OPENED + place] = rng.random() < 0.2  # some die while they open the root
            pid = os.fork()
            if pid == 0:
                _child(roots[place % len(roots)], place, names, figures, rng.random(), capacity)
            alive[pid] = place, time.monotonic() + LONGEST_S
        for pid, (place, until_s) in list(alive.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                failed += 1
            elif figures[_OPENED + place]:
                figures[_OPENED + place] = 0
                alive[pid] = place, time.monotonic() + rng.random() * LIFE_S
                continue
            elif time.monotonic() > until_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            else:
                continue
            done += 1
            free.append(place)
            del alive[pid]
        if time.monotonic() > look_s:
            most, look_s = max(most, stored_bytes(Path(roots[0]))), time.monotonic() + 0.05
        time.sleep(0.001)
    time.sleep(0.4)  # until their leases and unfinished files are old
    found, leftovers = asyncio.run(_after(roots[0], names, figures, capacity))
    return Report(done, *told(), failed, most, found, leftovers)


def _child(
    root: str,
    place: int,
    keys: list[bytes],
    figures: "memoryview[int]",
    seed: float,
    capacity: int,
) -> None:
    """One writer; never returns."""
    shift_s = 600.0 if place % 2 else -600.0
    real_s, real_ns = time.time, time.time_ns
    time.time = lambda: real_s() + shift_s
    time.time_ns = lambda: real_ns() + int(shift_s * 1e9)
    try:
        mine = figures[place * 4 : place * 4 + 4]
        opened = figures[_OPENED + place : _OPENED + place + 1]
        asyncio.run(_life(root, keys, mine, opened, random.Random(seed), capacity))
    except BaseException as error:  # whatever it is, the parent must hear of it
        print(f"a writer failed: {error!r}", file=sys.stderr)
    finally:
        os._exit(1)


def _opened(root: str, capacity: int) -> FolderBackend:
    options = FolderOptions(
        root=root, capacity=ByteSize(capacity), threads=2, trust_parent_folders=True
    )
    return FolderBackend(options, NAMESPACE)


async def _life(
    root: str,
    keys: list[bytes],
    mine: "memoryview[int]",
    opened: "memoryview[int]",
    rng: random.Random,
    capacity: int,
) -> None:
    backend = _opened(root, capacity)
    opened[0] = 1
    evicted = mine[2]
    while True:
        some = rng.sample(keys, rng.randrange(1, 9))
        if rng.random() < 0.6:
            mine[0] += sum(await backend.write(some, filled(some, SIZE)))
        else:
            await backend.contains(some)
            await _compare(backend, some, mine)
        mine[2] = evicted + backend.counters().get("evicted", 0)


async def _compare(backend: FolderBackend, keys: list[bytes], mine: "memoryview[int]") -> int:
    into = slots(len(keys), SIZE)
    answers = await backend.read(keys, into)
    for key, slot, good in zip(keys, into, answers, strict=True):
        mine[1] += bool(good)
        mine[3] += bool(good) and bytes(slot) != payload_of(key, SIZE)
    return sum(map(bool, answers))


async def _after(
    root: str, keys: list[bytes], figures: "memoryview[int]", capacity: int
) -> tuple[int, int]:
    """Open the root in this process; return the chunks that it loads, and leftovers."""
    backend = _opened(root, capacity)
    last = len(figures) // 4 - 1
    found = await _compare(backend, keys, figures[last * 4 : last * 4 + 4])
    figures[4 * WRITERS * 2 + 3] += figures[last * 4 + 3]
    end_s = time.monotonic() + 20
    for i in range(10_000):
        more = keys_of(4, f"after{i}")
        await backend.write(more, filled(more, SIZE))
        if not unfinished(root) or time.monotonic() > end_s:
            break
    await backend.close()
    return found, unfinished(root)


def unfinished(root: str) -> int:
    """Return how many files there are of chunks that nobody finished."""
    return sum(path.name.startswith(".") for path in Path(root).glob("*/??/*"))
