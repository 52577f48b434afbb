"""SIGKILL the disk backend, over and over, and see that nothing it says afterwards is wrong.

``python -m tests.support.crash --root /tmp/kv --cycles 10000 --seed 1`` prints one JSON object.

Each cycle is a process: it opens the folder the one before left, with other options, reads every
key ever written, compares what it finds with what had been promised, and works on until it is
killed: at a random moment, or at a named system call (:data:`POINTS`). Processes are forked from
this one, which has no threads, so that a cycle costs some twenty milliseconds.
"""

import argparse
import asyncio
import gc
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from typing import NamedTuple

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.paths import WRITERS
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.encryption import CipherSeal
from kvoffload.config import ByteSize
from kvoffload.registry import POLICIES, load
from kvoffload.testing.backends import filled, keys_of, payload_of, slots
from tests.helpers.disk_parts import allocated
from tests.support.vfs import DeadlyVfs

SEALS: list[CipherSeal] = []
"""At most one, of all lives of a campaign."""
POINTS = (
    # store
    "open:temporary:before", "open:temporary:after", "pwritev:temporary:before",
    "pwritev:temporary:middle", "pwritev:temporary:after", "fsync:temporary:before",
    "close:temporary:before", "close:temporary:after", "mkdir:shard:before", "mkdir:shard:after",
    "rename:chunk:before", "rename:chunk:after", "fsync:shard:before", "pwritev:ledger:before",
    "pwritev:ledger:after", "flock:ledger:after", "statvfs:root:before",
    # load, recency
    "open:chunk:after", "preadv:chunk:after", "utime:chunk:before", "utime:chunk:after",
    # the same in slots of segments
    "rename:table:before", "rename:table:after", "pwritev:table:before", "pwritev:table:middle",
    "pwritev:table:after", "pwritev:slots:before", "pwritev:slots:middle", "pwritev:slots:after",
    "fsync:slots:after", "preadv:slots:after", "preadv:table:after", "flock:table:after",
    "lock_part:table:after",
    "punch:slots:before", "punch:slots:after", "unlink:slots:after", "unlink:table:after",
    # evict and remove
    "unlink:chunk:before", "unlink:chunk:after", "take:chunk:before", "take:chunk:after",
    "utime:temporary:before", "utime:temporary:after", "start_writeback:temporary:after",
    # open and scan
    "mkdir:writer:after", "open:lock:after", "flock:lock:before", "rename:writer:before",
    "rename:writer:after", "flock:owner:after", "listdir:shard:before", "listdir:shard:after",
    "lstat:chunk:after", "unlink:temporary:before", "unlink:temporary:after",
    "unlink:lock:after", "preadv:snapshot:after",
    # snapshot and close
    "rename:snapshot:before", "rename:snapshot:after", "rmdir:writer:before", "rmdir:writer:after",
)  # fmt: skip
"""Where a cycle may be killed: ``<call>:<kind of path>:<before|middle|after>``."""

NEVER, WRITING, STORED, REMOVING = range(4)
AT_POINT_S = 0.3
"""Time of a core in which a life reaches its point, or never."""
SIZE = 16 * 1024
NAMESPACE = "crash"
POLICIES_TRIED = ("lru", "arc")


class Report(NamedTuple):
    """What a campaign found. All but the first four have to be zero."""

    cycles: int
    killed: int
    at_points: dict[str, int]
    """How often each named point did kill."""
    reads: int
    """Chunks read and compared byte by byte."""
    wrong: int = 0
    """Reads that gave other bytes than those stored."""
    phantom: int = 0
    """Chunks found although never stored, or although removed."""
    lost: int = 0
    """Chunks missing although stored and neither removed nor evicted."""
    unopenable: int = 0
    leftovers: int = 0
    """Temporary files of dead processes still there after opening."""
    over_capacity: int = 0

    @property
    def failures(self) -> int:
        """The sum of everything that must not happen."""
        return sum(self[4:])


class _Shared:
    """What survives the children: promises by key, and counters."""

    def __init__(self, keys: int) -> None:
        self.states = mmap.mmap(-1, keys)
        self.figures = memoryview(mmap.mmap(-1, 4096)).cast("q")
        self.at = mmap.mmap(-1, 64)


def campaign(
    root: str, cycles: int, seed: int, *, capacity: int | None = None, keys: int = 48
) -> Report:
    """Run cycles on a folder; with a ``capacity`` chunks are evicted, and absence is no loss."""
    shared = _Shared(keys)
    names = keys_of(keys, f"crash{seed}")
    rng = random.Random(seed)
    killed = 0
    for policy in POLICIES_TRIED:
        load(POLICIES, policy)  # imported once here, not in every child
    gc.freeze()  # what is never looked at by the collector need not be copied for a child
    points: Counter[str] = Counter()
    for cycle in range(cycles):
        point = rng.choice(POINTS) if rng.random() < 0.6 else ""
        child_seed = rng.randrange(1 << 30)
        delay_s = rng.random() * 0.012
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            _child(root, names, shared, child_seed, point, capacity, tell)
        os.close(tell)
        status = _ended(pid, ready, 60.0 if point else delay_s, AT_POINT_S if point else 60.0)
        os.close(ready)
        if os.WIFSIGNALED(status):
            killed += 1
            if point and shared.figures[7] == cycle + 1:
                points[point] += 1
        elif os.WEXITSTATUS(status):
            shared.figures[4] += 1
        shared.figures[6] = cycle + 1
    figures = list(shared.figures[:6])
    reads, wrong, phantom, lost, unopenable, leftovers = figures
    over = shared.figures[8]
    return Report(
        cycles, killed, dict(points), reads, wrong, phantom, lost, unopenable, leftovers, over
    )


def _ended(pid: int, ready: int, delay_s: float, cpu_s: float) -> int:
    """Give a child its time once it has checked the folder, then kill it; return its status.

    On a busy machine it takes long to reach a point, but no more time of a core.
    """
    select.select([ready], [], [], 30)
    clock = (~pid << 3) | 2  # as the C library's clock_getcpuclockid() makes it
    deadline, cpu_deadline = time.monotonic() + delay_s, time.clock_gettime(clock) + cpu_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline or time.clock_gettime(clock) > cpu_deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.0005)


class _MarkingVfs(DeadlyVfs):
    """Leaves word that it was the point, not the clock, that killed."""

    def __init__(self, point: str, nth: int, figures: "memoryview[int]") -> None:
        super().__init__(point, nth)
        self._figures = figures

    def _reached(self, point: str) -> None:
        if point == self.point and self.seen[point] + 1 >= self.nth:
            self._figures[7] = self._figures[6] + 1
        super()._reached(point)


def _child(
    root: str,
    keys: list[bytes],
    shared: _Shared,
    seed: int,
    point: str,
    capacity: int | None,
    tell: int,
) -> None:
    """One cycle; never returns."""
    code = 1
    try:
        asyncio.run(_life(root, keys, shared, random.Random(seed), point, capacity, tell))
        code = 0
    except BaseException as error:  # whatever it is, the parent must hear of it
        print(f"cycle failed: {error!r}", file=sys.stderr)
    finally:
        os._exit(code)


async def _life(
    root: str,
    keys: list[bytes],
    shared: _Shared,
    rng: random.Random,
    point: str,
    capacity: int | None,
    tell: int,
) -> None:
    nth = rng.choice((1, 1, 2, 3, 7, 20))
    vfs: Vfs = _MarkingVfs(point, nth, shared.figures) if point else Vfs()
    options = DiskOptions(
        root=root,
        capacity=ByteSize(capacity or 1 << 30),
        min_free=ByteSize(0),
        io=rng.choice(("auto", "direct", "buffered")),
        durability="fsync" if rng.random() < 0.1 or point.startswith("fsync") else "none",
        read_threads=rng.choice((1, 2, 4)),
        write_threads=rng.choice((1, 2, 3)),
        policy=rng.choice(POLICIES_TRIED),
        quarantine=rng.choice((0, 3)),
    )
    backend = DiskBackend(options, NAMESPACE, vfs=vfs)
    if rng.random() < 0.5:
        backend._store.why_no_slots = "this life stores files"
    for seal in SEALS:
        backend.encrypt_with(seal)
    await asyncio.to_thread(backend.wait_ready, 20)
    await _check(backend, root, keys, shared, evicting=capacity is not None)
    os.write(tell, b".")
    for _ in range(rng.randrange(1, 12)):
        await _work(backend, keys, shared, rng)
        most = None if capacity is None else capacity + (options.write_threads or 0) * SIZE * 2
        if most is not None and allocated(root) > most:
            shared.figures[8] += 1
    await backend.close()


async def _check(
    backend: DiskBackend, root: str, keys: list[bytes], shared: _Shared, *, evicting: bool
) -> None:
    """Compare what is there with what was promised, and start afresh from what is there."""
    figures = shared.figures
    into = slots(len(keys), SIZE)
    answers = await backend.read(keys, into)
    for i, (key, slot, good) in enumerate(zip(keys, into, answers, strict=True)):
        state = shared.states[i]
        if good:
            figures[0] += 1
            figures[1] += bytes(slot) != payload_of(key, SIZE)
            figures[2] += state == NEVER
        else:
            figures[3] += state == STORED and not evicting
        shared.states[i] = STORED if good else NEVER
    own = backend._store.root.writer.folder
    for writer in os.listdir(f"{root}/{WRITERS}"):
        # A process killed while it made its folder leaves an empty one, for a minute.
        folder = f"{root}/{WRITERS}/{writer}"
        if folder != own and not writer.startswith("new-"):
            figures[5] += 1


async def _work(
    backend: DiskBackend, keys: list[bytes], shared: _Shared, rng: random.Random
) -> None:
    some = rng.sample(range(len(keys)), rng.randrange(1, 9))
    mine = [keys[i] for i in some]
    kind = rng.random()
    if kind < 0.6:
        for i in some:
            shared.states[i] = WRITING
        done = await backend.write(mine, filled(mine, SIZE))
        for i, good in zip(some, done, strict=True):
            shared.states[i] = STORED if good else NEVER
    elif kind < 0.75:
        for i in some:
            shared.states[i] = REMOVING
        await backend.remove(mine)
        for i in some:
            shared.states[i] = NEVER
    else:
        into = slots(len(mine), SIZE)
        for key, slot, good in zip(mine, into, await backend.read(mine, into), strict=True):
            if good:
                shared.figures[0] += 1
                shared.figures[1] += bytes(slot) != payload_of(key, SIZE)


def main() -> None:
    """Run a campaign from the command line; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="an empty folder")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capacity", type=int, help="bytes; makes chunks be evicted")
    parser.add_argument("--encrypted", action="store_true", help="store chunks encrypted")
    asked = parser.parse_args()
    if asked.encrypted:
        SEALS.append(CipherSeal([b"0123456789abcdef" * 4]))
    began = time.monotonic()
    report = campaign(asked.root, asked.cycles, asked.seed, capacity=asked.capacity)
    print(json.dumps(report._asdict() | {"seed": asked.seed, "seconds": time.monotonic() - began}))
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
