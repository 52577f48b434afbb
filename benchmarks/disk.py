"""The disk backend against plain system calls on the same files, in turns, in the same run.

``kvoffload bench disk``. The limit of loads and stores is a loop on as many threads that opens,
reads or writes, and closes one file a chunk. The loop verifies, publishes and accounts nothing. If
``lmcache`` is installed (``pip install --no-deps lmcache`` is enough), its C++ file connector reads
the same number of chunks as well.
"""

import asyncio
import importlib.machinery
import importlib.util
import mmap
import os
import select
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Row, best_of, check_all, report, row, slots, timed
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.descriptors import Descriptors
from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.paths import SHARDS, SNAPSHOT
from kvoffload.backends.disk.segment import make_segment, pack_entry
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import (
    check_chunk,
    mismatch,
    namespace_digest,
    pack_header,
    parse_header,
)
from kvoffload.backends.seals import ChecksumSeal
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of

TOTAL_BYTES = 128 << 20
ROUNDS = 7
READERS = {"direct": 8, "auto": 8, "buffered": min(4, os.cpu_count() or 1)}
"""The defaults of the backend."""
DEPTHS = (1, 2, 4, 8, 16)
"""Threads of the raw loops among which the fastest is looked for, with direct I/O."""
KNOWN = 100_000
"""Chunks that a store has to find again."""
SINGLE_LOADS = 100
LMCACHE_WORKERS = 4
"""The default of its adapter."""
RAW_READ = "open, preadv, close"
RAW_WRITE = "open, pwritev, close"
RAW_OVERWRITE = "rename, open, pwritev, close, rename"
BEST = "the fastest of 1 to 16 threads"
RAW_REPLACE = "unlink, open, pwritev, close, rename"


def run(folder: str | None = None, total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure everything in a scratch folder below ``folder`` (default: TMPDIR)."""
    scratch = tempfile.mkdtemp(prefix="kvoffload-bench-", dir=folder)
    try:
        rows: list[Row] = []
        for size, label in ((2 << 20, "2 MiB"), (256 << 10, "256 KiB")):
            for io in ("direct", "auto", "buffered"):
                rows += _Transfers(scratch, io, size, label, total_bytes).measured()
        for io in ("direct", "auto"):  # in slots, where the file system can free parts of a file
            rows += _Transfers(scratch, io, 64 << 10, "64 KiB", total_bytes // 4).measured()
        rows += [*_verification(scratch), *_lookup(scratch), *_restart(scratch), *_latency(scratch)]
        return report("disk", rows)
    finally:
        shutil.rmtree(scratch)


def _open(root: str, io: str = "buffered", capacity: int = 64 << 30) -> DiskBackend:
    options = DiskOptions(root=root, io=io, capacity=ByteSize(capacity), min_free=ByteSize(0))
    backend = DiskBackend(options, "bench")
    backend.wait_ready(60)
    return backend


class _Transfers:
    """Stores and loads of one size and one way of I/O, in turns with the raw loops."""

    def __init__(self, scratch: str, io: str, size: int, label: str, total: int) -> None:
        self.io, self.size, self.label = io, size, label
        self.root, self.raw = f"{scratch}/{io}-{size}", f"{scratch}/raw-{io}-{size}"
        os.mkdir(self.raw)
        self.writers = 2 if size > 1 << 20 else 4  # as the backend by default
        self.count = total // size
        self.keys = keys_of(self.count)
        self.slots = slots(self.count, size)
        self.header = memoryview(mmap.mmap(-1, 4096))
        self.flags = os.O_DIRECT if io == "direct" else 0
        self.depths = DEPTHS if io == "direct" else ()

    def measured(self) -> list[Row]:
        loop = asyncio.new_event_loop()
        backend = _open(self.root, self.io)
        readers, writers = ThreadPoolExecutor(max(DEPTHS)), ThreadPoolExecutor(max(DEPTHS))
        try:
            stores = self._stores(loop, backend, writers)
            loads = self._loads(loop, backend, readers)
            full = self._full(loop, writers)
        finally:
            loop.run_until_complete(backend.close())
            loop.close()
            readers.shutdown()
            writers.shutdown()
        return [*stores, *full, *loads]

    def _row(self, case: str, seconds: float, limit: float | None, name: str | None) -> Row:
        gigabytes = self.count * self.size / 1e9
        case = f"{case}, {self.label}, {self.io}"
        return row(case, gigabytes / seconds, "GB/s", limit and gigabytes / limit, name)

    def _stores(
        self, loop: asyncio.AbstractEventLoop, backend: DiskBackend, pool: ThreadPoolExecutor
    ) -> list[Row]:
        ours: list[float] = []
        raw: list[float] = []
        renamed: list[float] = []
        depths: dict[int, list[float]] = {depth: [] for depth in self.depths}
        for turn in range(ROUNDS):
            if turn:
                loop.run_until_complete(backend.remove(self.keys))
            ours.append(
                timed(
                    lambda: check_all(loop.run_until_complete(backend.write(self.keys, self.slots)))
                )
            )
            for times, write, threads in (
                (renamed, self._raw_publish, self.writers),
                (raw, self._raw_write, self.writers),
                *((each, self._raw_write, depth) for depth, each in depths.items()),
            ):
                for i in range(self.count):
                    if os.path.exists(f"{self.raw}/{i}"):
                        os.unlink(f"{self.raw}/{i}")
                times.append(timed(partial(self._strands, pool, threads, write)))
        rows = [
            self._row("store", min(ours), min(raw), RAW_WRITE),
            self._row("store", min(ours), min(renamed), f"{RAW_WRITE}, rename"),
        ]
        if depths:
            fastest = min(map(min, depths.values()))
            rows.append(self._row("store", min(ours), fastest, f"{RAW_WRITE}: {BEST}"))
        return rows

    def _full(self, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor) -> list[Row]:
        """Stores that each evict a chunk, against files that are overwritten or replaced."""
        backend = _open(f"{self.root}-full", self.io, self.count * (self.size + 4096))
        sides: list[list[float]] = [[], [], []]
        try:
            for turn in range(ROUNDS + 1):
                keys = keys_of(self.count, f"turn{turn}")
                works = (
                    lambda keys=keys: check_all(
                        loop.run_until_complete(backend.write(keys, self.slots))
                    ),
                    lambda: self._strands(pool, self.writers, self._raw_overwrite),
                    lambda: self._strands(pool, self.writers, self._raw_replace),
                )
                for times, work in zip(sides, works, strict=True):
                    times.append(timed(work))
        finally:
            loop.run_until_complete(backend.close())
        ours, overwrite, replace = (min(times[1:]) for times in sides)
        return [
            self._row("store into a full tier", ours, overwrite, RAW_OVERWRITE),
            self._row("store into a full tier", ours, replace, RAW_REPLACE),
        ]

    def _loads(
        self, loop: asyncio.AbstractEventLoop, backend: DiskBackend, pool: ThreadPoolExecutor
    ) -> list[Row]:
        def ours() -> None:
            check_all(loop.run_until_complete(backend.read(self.keys, self.slots)))

        def raw() -> None:
            self._strands(pool, READERS[self.io], self._raw_read)

        def unverified() -> None:
            with patch.object(ChecksumSeal, "fault", _check_header_alone):
                ours()

        peer = _lmcache(self) if self.io != "direct" else None
        depths = [partial(self._strands, pool, depth, self._raw_read) for depth in self.depths]
        sides: list[Callable[[], object]] = [ours, raw, unverified, *depths]
        if peer:
            sides.insert(3, peer)
        for side in sides:
            side()
        seconds = best_of(*sides, rounds=ROUNDS)
        if self.io == "direct":
            return [
                self._row("load", seconds[0], seconds[1], RAW_READ),
                self._row("load", seconds[0], min(seconds[3:]), f"{RAW_READ}: {BEST}"),
            ]
        case = "load, page cache warm"
        rows = [
            self._row(case, seconds[0], seconds[1], RAW_READ),
            self._row(case, seconds[0], seconds[2], "the same without its checksum"),
        ]
        if peer:
            name = "LMCache fs_native (C++), which verifies nothing"
            rows.append(self._row(case, seconds[0], seconds[3], name))
        return rows

    def _strands(self, pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None]) -> None:
        """Each thread takes the next file until none is left."""
        todo = list(range(self.count))

        def strand() -> None:
            while todo:
                try:
                    i = todo.pop()
                except IndexError:
                    return
                work(i)

        for job in [pool.submit(strand) for _ in range(threads)]:
            job.result()

    def _raw_write(self, i: int, suffix: str = "") -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.flags
        fd = os.open(f"{self.raw}/{i}{suffix}", flags, 0o600)
        _complete(os.pwritev(fd, [self.header, self.slots[i]], 0), self.size)
        os.close(fd)

    def _raw_overwrite(self, i: int) -> None:
        os.rename(f"{self.raw}/{i}", f"{self.raw}/{i}.part")
        fd = os.open(f"{self.raw}/{i}.part", os.O_WRONLY | self.flags)
        _complete(os.pwritev(fd, [self.header, self.slots[i]], 0), self.size)
        os.close(fd)
        os.rename(f"{self.raw}/{i}.part", f"{self.raw}/{i}")

    def _raw_replace(self, i: int) -> None:
        os.unlink(f"{self.raw}/{i}")
        self._raw_publish(i)

    def _raw_publish(self, i: int) -> None:
        self._raw_write(i, ".part")
        os.rename(f"{self.raw}/{i}.part", f"{self.raw}/{i}")

    def _raw_read(self, i: int) -> None:
        fd = os.open(f"{self.raw}/{i}", os.O_RDONLY | self.flags)
        _complete(os.preadv(fd, [self.header, self.slots[i]], 0), self.size)
        os.close(fd)


def _check_header_alone(
    seal: ChecksumSeal, header: memoryview, target: memoryview, key: bytes, namespace: bytes
) -> str | None:
    return mismatch(parse_header(header), key, namespace, target.nbytes)


def _lmcache(case: _Transfers) -> Callable[[], None] | None:
    """Loads through LMCache's C++ file connector, from as many threads, or None without it."""
    package = importlib.util.find_spec("lmcache")
    if package is None or not package.submodule_search_locations:
        return None
    import torch  # noqa: F401 - the extension is linked against its libraries

    finder = importlib.machinery.PathFinder
    spec = finder.find_spec("lmcache_fs", list(package.submodule_search_locations))
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.LMCacheFSClient(f"{case.root}-lmcache", LMCACHE_WORKERS, "", False, 0)
    names = [f"bench@1@0@{i:064x}" for i in range(case.count)]

    def wait() -> None:
        select.select([client.event_fd()], [], [], 60)
        done = client.drain_completions()
        if len(done) != 1 or not done[0][1]:
            raise RuntimeError(f"LMCache answered {done}")

    client.submit_batch_set(names, case.slots)
    wait()

    def load() -> None:
        client.submit_batch_get(names, case.slots)
        wait()

    return load


def _verification(scratch: str) -> list[Row]:
    """What a load spends on checking a chunk, against the whole of a direct load of it."""
    (slot,) = slots(1, 2 << 20)
    digest = namespace_digest("bench")
    (key,) = keys_of(1)
    header = pack_header(key, digest, slot, header_bytes=4096)

    def check() -> None:
        for _ in range(20):
            if check_chunk(header, slot, key, digest) is not None:
                raise RuntimeError("a whole chunk was refused")

    (seconds,) = best_of(check, rounds=50)
    with tempfile.NamedTemporaryFile(dir=scratch) as file:
        file.write(bytes(2 << 20))
        file.flush()
        os.fsync(file.fileno())
        fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        (device,) = best_of(lambda: os.preadv(fd, [slot], 0), rounds=50)
        os.close(fd)
    return [row("verify 2 MiB", seconds / 20 * 1e6, "µs", device * 1e6, "direct read of 2 MiB")]


def _lookup(scratch: str) -> list[Row]:
    backend = _open(f"{scratch}/lookup")
    keys = keys_of(KNOWN)
    backend._store.index.found((name_of(0, key), 4096) for key in keys)
    plain = dict.fromkeys(keys)
    sides = (
        lambda: [backend.holds(key) for key in keys],
        lambda: [key in plain for key in keys],
    )
    ours, limit = (seconds / len(keys) * 1e6 for seconds in best_of(*sides))
    asyncio.run(backend.close())
    return [row(f"lookup, {KNOWN:,} chunks known", ours, "µs", limit, "key in dict")]


def _restart(scratch: str) -> list[Row]:
    """How long until :data:`KNOWN` chunks are known again; their contents are not looked at."""
    root = f"{scratch}/restart"
    asyncio.run(_open(root).close())
    folder = f"{root}/{namespace_digest('bench').hex()}"
    for shard in SHARDS:
        os.mkdir(f"{folder}/{shard}", 0o700)
    backend = _open(root)
    for key in keys_of(KNOWN):
        path = backend._store.files.path_of(name_of(0, key))
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    asyncio.run(backend.close())

    ours, limit = [], []
    for _ in range(3):
        os.unlink(f"{folder}/{SNAPSHOT}")
        began = time.perf_counter()
        backend = _open(root)
        ours.append(time.perf_counter() - began)
        if len(backend._store.index) != KNOWN:
            raise RuntimeError(f"only {len(backend._store.index)} chunks were found again")
        asyncio.run(backend.close())
        limit.append(timed(lambda: _walk(folder)))
    began = time.perf_counter()
    backend = DiskBackend(DiskOptions(root=root, min_free=ByteSize(0)), "bench")
    opened = time.perf_counter() - began
    while len(backend._store.index) < KNOWN:
        time.sleep(0.001)
    recalled = time.perf_counter() - began
    backend.wait_ready(60)
    asyncio.run(backend.close())
    in_slots = [_restart_of_slots(f"{scratch}/restart-slots-{i}") for i in range(3)]
    known, slotted = f"{KNOWN:,} chunks known", f"{KNOWN:,} chunks in slots"
    return [
        row("open", opened * 1e3, "ms"),
        row(f"{known}, by the snapshot", recalled * 1e3, "ms"),
        row(f"{known}, without snapshot", min(ours), "s", min(limit), "scandir and stat of each"),
        row(f"{slotted} known", min(in_slots), "s", min(ours), "files, no snapshot"),
    ]


def _restart_of_slots(root: str) -> float:
    """Make a table of :data:`KNOWN` chunks; return the time until all are known again."""
    asyncio.run(_open(root).close())
    stem = f"{root}/{namespace_digest('bench').hex()}/segments/{'0' * 16}"
    segment = make_segment(Descriptors(Vfs()), stem, f"{root}/new", 68 << 10, durable=False)
    for slot, key in enumerate(keys_of(KNOWN)):
        segment.set_entry(slot, pack_entry(key, time.time_ns()))
    segment.close()
    began = time.perf_counter()
    backend = _open(root)
    took = time.perf_counter() - began
    if len(backend._store.index) != KNOWN:
        raise RuntimeError(f"only {len(backend._store.index)} chunks were found again")
    asyncio.run(backend.close())
    return took


def _walk(folder: str) -> None:
    for shard in SHARDS:
        for entry in os.scandir(f"{folder}/{shard}"):
            entry.stat(follow_symlinks=False)


def _latency(scratch: str) -> list[Row]:
    """The 99th percentile of loads of one 2 MiB chunk, alone and while stores go on."""
    loop = asyncio.new_event_loop()
    backend = _open(f"{scratch}/latency", "direct")
    keys, memory = keys_of(32), slots(48, 2 << 20)
    into = memory[32:33]

    async def loads(count: int) -> list[float]:
        taken = []
        for i in range(count):
            began = time.perf_counter()
            check_all(await backend.read([keys[i % 32]], into))
            taken.append(time.perf_counter() - began)
            await asyncio.sleep(0.001)
        return taken

    async def busy(count: int) -> list[float]:
        async def store() -> None:
            while not done.is_set():
                others = keys_of(8, "other")
                await backend.write(others, memory[40:])
                await backend.remove(others)

        done = asyncio.Event()
        storing = asyncio.ensure_future(store())
        taken = await loads(count)
        done.set()
        await storing
        return taken

    try:
        check_all(loop.run_until_complete(backend.write(keys, memory[:32])))
        idle: list[float] = []
        loaded: list[float] = []
        for _ in range(4):
            idle += loop.run_until_complete(loads(SINGLE_LOADS))
            loaded += loop.run_until_complete(busy(SINGLE_LOADS))
    finally:
        loop.run_until_complete(backend.close())
        loop.close()
    ours, limit = (statistics.quantiles(taken, n=100)[98] * 1e3 for taken in (loaded, idle))
    return [row("load of 2 MiB beside stores, p99", ours, "ms", limit, "idle, p99")]


def _complete(moved: int, size: int) -> None:
    if moved != size + 4096:
        raise RuntimeError("short transfer")
