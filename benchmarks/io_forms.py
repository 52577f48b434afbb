"""The I/O server as a process against the same server as a thread: disk, Redis, the first byte.

``kvoffload bench io_forms``. Both servers map one slab, and take turns on the same chunks. The rows
of the first byte are medians of loads of one chunk, from the call to the news of its arrival. Loads
from disk past the page cache also stand against the best number of threads that read plain files.
"""

import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, best_of, check_all, report, row, timed
from kvoffload.io import remote_tier
from kvoffload.io.client import IOClient
from kvoffload.io.deadlines import Listener
from kvoffload.io.forms import ServerProcess, ServerThread
from kvoffload.io.protocol import VERSION, Load, Open, Store, TierSettings
from kvoffload.testing.backends import keys_of
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.redis_server import BINARY, RedisServer

TOTAL_BYTES = 128 << 20
SIZES = ((2 << 20, "2 MiB"), (256 << 10, "256 KiB"))
DEPTHS = (1, 2, 4, 8, 16, 32)
ROUNDS = 9
SINGLE_LOADS = 300
TIMEOUT_S = 60.0
THREAD = "io: thread"


remote_tier.ANSWER_S = 0.05  # or a removal is known after 2 s


class Moved(Listener):
    """Waits for a job, and notes when its first chunk arrived."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self._answer = b""
        self._ended = threading.Event()

    def arrived(self, numbers: Sequence[int]) -> None:
        self.first_s = self.first_s or time.perf_counter()

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        self.arrived(())
        self._answer = ok
        self._ended.set()

    def released(self) -> None:
        pass

    def wait(self) -> None:
        self._ended.wait(TIMEOUT_S)

    @property
    def is_whole(self) -> bool:
        """Whether each chunk was moved."""
        return bool(self._answer) and all(self._answer)


class Forms:
    """A client of each form over one slab and one store, with chunks of one size."""

    def __init__(self, kind: str, options: dict[str, Any], size: int, total: int) -> None:
        self.size, self.count = size, total // size
        self.keys, self._turn = keys_of(self.count), 0
        self._fd = create_shared_memory(self.count * size)
        self.slab = Slab(self.count, size, self._fd)
        for slot in range(self.count):
            self.slab.slot(slot, size)[:] = os.urandom(4096) * (size // 4096)
        opening = Open(VERSION, [TierSettings("t", kind, options, "")], "bench", {}, 1, size, 5.0)
        memory = self.slab.slot(0, self.slab.num_bytes)
        self.thread = IOClient(lambda: ServerThread(memory), opening, TIMEOUT_S, TIMEOUT_S)
        self.process = IOClient(lambda: ServerProcess(self._fd), opening, TIMEOUT_S, TIMEOUT_S)

    def store(self, client: IOClient) -> None:
        check_all([self._move(client, Store).is_whole])

    def load(self, client: IOClient) -> None:
        check_all([self._move(client, Load).is_whole])

    def _move(self, client: IOClient, kind: type[Load] | type[Store]) -> Moved:
        moved = Moved()
        client.begin(kind(0, "t", self.keys, [*range(self.count)], self.size), moved)
        moved.wait()
        return moved

    def renew(self, client: IOClient) -> None:
        """Take other keys, and let a client remove the chunks that it stored under the last ones.

        The removal may still be going on when it is known. It would take what is stored after it
        under the same keys.
        """
        self._turn += 1
        before, self.keys = self.keys, keys_of(self.count, f"turn {self._turn}")
        client.remove("t", before)
        holds = client.tiers["t"].holds
        # None, "ask again", may mean that it is still there. All are asked for at once.
        self._until(lambda: {*map(holds, before)} == {False})

    def until_found(self, client: IOClient) -> None:
        """Wait until a client finds what the other one stored."""
        self._until(lambda: self._move(client, Load).is_whole)

    @staticmethod
    def _until(done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > until_s:
                raise RuntimeError("chunks stay in the store, or are not found there")
            time.sleep(0.002)

    def first_byte_s(self, client: IOClient, i: int) -> float:
        moved, begun_s = Moved(), time.perf_counter()
        client.begin(Load(0, "t", self.keys[i : i + 1], [i], self.size), moved)
        moved.wait()
        return moved.first_s - begun_s

    def close(self) -> None:
        self.thread.close()
        self.process.close()
        os.close(self._fd)


def run(folder: str | None = None, total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure in a scratch folder below ``folder`` (default: TMPDIR)."""
    rows: list[Row] = []
    for size, label in SIZES:
        for io in ("direct", "buffered"):
            with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=folder) as scratch:
                options = {"root": f"{scratch}/kv", "capacity": "64GiB", "min_free": 0, "io": io}
                with closing(Forms("disk", options, size, total_bytes)) as forms:
                    rows += _against_thread(forms, f"disk, {label}, {io}")
                    if io == "direct":
                        rows += _against_raw_reads(forms, scratch, f"disk, {label}, {io}")
        if BINARY is not None and shutil.which("redis-server"):
            rows += _redis(size, label, total_bytes)
    return report("io_forms", rows)


def _redis(size: int, label: str, total_bytes: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        server = RedisServer(Path(scratch))
        try:
            with closing(
                Forms("redis", {"url": server.url, "timeout_s": 30.0}, size, total_bytes)
            ) as forms:
                return _against_thread(forms, f"redis, {label}")
        finally:
            server.stop()


def _against_thread(forms: Forms, case: str) -> list[Row]:
    """Alternate the forms: whole batches, and loads of one chunk."""
    gigabytes = forms.count * forms.size / 1e9
    stores: dict[IOClient, list[float]] = {forms.process: [], forms.thread: []}
    for start in range(ROUNDS):
        turns = list(stores.items())
        for client, times in turns if start % 2 else reversed(turns):
            times.append(timed(partial(forms.store, client)))
            forms.renew(client)
    store_s, thread_store_s = (min(times) for times in stores.values())
    forms.store(forms.process)
    forms.until_found(forms.thread)
    load_s, thread_load_s = best_of(
        lambda: forms.load(forms.process), lambda: forms.load(forms.thread), rounds=ROUNDS
    )
    firsts: dict[IOClient, list[float]] = {forms.process: [], forms.thread: []}
    for i in range(SINGLE_LOADS):
        for client, times in firsts.items():
            times.append(forms.first_byte_s(client, i % forms.count))
            time.sleep(0.001)
    by_process, by_thread = (statistics.median(times) * 1e3 for times in firsts.values())
    return [
        _rate(f"store, {case}", gigabytes, store_s, thread_store_s, THREAD),
        _rate(f"load, {case}", gigabytes, load_s, thread_load_s, THREAD),
        row(f"first byte, {case}, p50", by_process, "ms", by_thread, THREAD),
    ]


def _rate(case: str, gigabytes: float, ours_s: float, limit_s: float, name: str) -> Row:
    return row(case, gigabytes / ours_s, "GB/s", gigabytes / limit_s, name)


def _against_raw_reads(forms: Forms, scratch: str, case: str) -> list[Row]:
    """Compare loads in the process with plain reads of as many files, at every depth."""
    size, header = forms.size, memoryview(mmap.mmap(-1, 4096))
    flags = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0
    for i in range(forms.count):
        fd = os.open(f"{scratch}/{i}", os.O_WRONLY | os.O_CREAT | flags, 0o600)
        os.pwritev(fd, [header, forms.slab.slot(i, size)], 0)
        os.close(fd)

    def read(i: int) -> None:
        fd = os.open(f"{scratch}/{i}", os.O_RDONLY | flags)
        if os.preadv(fd, [header, forms.slab.slot(i, size)], 0) != size + 4096:
            raise RuntimeError("short read")
        os.close(fd)

    def at(pool: ThreadPoolExecutor) -> Callable[[], object]:
        return lambda: list(pool.map(read, range(forms.count)))

    pools = [ThreadPoolExecutor(depth) for depth in DEPTHS]
    ours, *raw = best_of(lambda: forms.load(forms.process), *map(at, pools), rounds=ROUNDS)
    for pool in pools:
        pool.shutdown()
    gigabytes = forms.count * size / 1e9
    best = raw.index(min(raw))
    return [
        *(
            row(f"plain reads, {case}, {depth} threads", gigabytes / seconds, "GB/s")
            for depth, seconds in zip(DEPTHS, raw, strict=True)
        ),
        _rate(f"load, {case}", gigabytes, ours, raw[best], f"plain reads, {DEPTHS[best]} threads"),
    ]
