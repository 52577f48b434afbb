"""The folder backend, the disk backend, plain system calls and ``fio``, in turns, in the same run.

``kvoffload bench folder``. All use files of the same folder, which ``TMPDIR`` chooses: a local one,
or one on a mount. The plain loop has as many threads; it opens, reads or writes, and closes one
file a chunk, and verifies, publishes and accounts nothing. Another loop does what the tier must: it
uses the tier's folders, renames each file that it wrote, and computes checksums. Where ``fio`` is
installed, it does what the plain loop does with as many jobs, without Python.
"""

import asyncio
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness import Row, report, row
from kvoffload.backends.base import Backend
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.paths import shard_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.backend import FolderBackend, FolderOptions
from kvoffload.backends.folder.places import temporary_of
from kvoffload.backends.header import ALIGNED_BYTES, checksum
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of

TOTAL_BYTES = 128 << 20
SIZE = 2 << 20
FILE_BYTES = ALIGNED_BYTES + SIZE
ROUNDS = 7
THREADS = 16
"""The default of the backend."""
CAPACITY = ByteSize(8 << 30)
LOOKUPS = 2000
COLD = "load, not in the page cache"
"""What another host that mounts the folder meets, before it has loaded the chunk."""
LOADS = ("load", COLD)


def run(folder: str | None = None, total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure everything in a scratch folder below ``folder`` (default: TMPDIR)."""
    scratch = tempfile.mkdtemp(prefix="kvoffload-bench-", dir=folder)
    try:
        rows = asyncio.run(_transfers(scratch, total_bytes // SIZE))
        rows += asyncio.run(_lookups(scratch))
        rows += asyncio.run(_operations(scratch))
        return report("folder", rows)
    finally:
        shutil.rmtree(scratch)


def _folder(root: str, vfs: Vfs | None = None) -> FolderBackend:
    options = FolderOptions(root=root, capacity=CAPACITY, trust_parent_folders=True)
    return FolderBackend(options, "bench", vfs=vfs)


def _disk(root: str, io: str) -> DiskBackend:
    options = DiskOptions(
        root=root, io=io, capacity=CAPACITY, min_free=ByteSize(0), trust_parent_folders=True
    )
    backend = DiskBackend(options, "bench")
    backend.wait_ready(60)
    return backend


# ---- stores and loads ----------------------------------------------------------------------------


async def _transfers(scratch: str, count: int) -> list[Row]:
    """Store and load chunks of 2 MiB; each round begins with another side."""
    slots = [memoryview(mmap.mmap(-1, SIZE)) for _ in range(count)]
    for slot in slots:
        slot[:] = os.urandom(1 << 20) * (SIZE >> 20)
    keys = keys_of(count)
    backends: dict[str, Backend] = {"folder": _folder(f"{scratch}/folder")}
    for io in ("direct", "buffered"):
        name = f"disk, io = {io}"
        backends[name] = _disk(f"{scratch}/{name}", io)
    loops = {
        "open, move, close": _Plain(f"{scratch}/plain", slots),
        "a loop of the same work": _SameWork(f"{scratch}/same", slots, keys),
    }
    fio = shutil.which("fio")
    best: dict[tuple[str, str], float] = {}

    def note(verb: str, side: str, began: tuple[float, float]) -> None:
        for name, start, end in zip((verb, f"{verb} CPU"), began, _clocks(), strict=True):
            best[name, side] = min(end - start, best.get((name, side), end - start))

    tiers = {
        name: _Tier(backend, f"{scratch}/{name}", keys, slots) for name, backend in backends.items()
    }
    sides: dict[str, _Tier | _Plain] = {**tiers, **loops}
    names = [*sides]
    for turn in range(ROUNDS):
        for number in range(len(names)):
            side = names[(turn + number) % len(names)]
            each = sides[side]
            began = _clocks()
            await each.store()
            note("store", side, began)
            for verb in LOADS:
                if verb == COLD:
                    _leave_page_cache(each.folder)
                began = _clocks()
                await each.load()
                note(verb, side, began)
            await each.drop()
        for verb in ("store", *LOADS) if fio else ():
            if verb == COLD:
                _leave_page_cache(f"{scratch}/fio")
            rw = "write" if verb == "store" else "read"
            seconds = _fio_seconds(f"{scratch}/fio", rw, count)
            best[verb, "fio"] = min(seconds, best.get((verb, "fio"), seconds))
        shutil.rmtree(f"{scratch}/fio", ignore_errors=True)
    for loop in loops.values():
        loop.close()
    for backend in backends.values():
        await backend.close()
    gigabytes, rows = count * SIZE / 1e9, []
    for verb in ("store", *LOADS):
        for side in names[1:]:
            ours, theirs = gigabytes / best[verb, "folder"], gigabytes / best[verb, side]
            rows.append(row(f"{verb}, 2 MiB", ours, "GB/s", theirs, side))
            cpu, limit = (best[f"{verb} CPU", each] / gigabytes for each in ("folder", side))
            rows.append(row(f"{verb}, 2 MiB, processor time", cpu, "s/GB", limit, side))
        if fio:
            ours, theirs = (gigabytes / best[verb, side] for side in ("folder", "fio"))
            rows.append(row(f"{verb}, 2 MiB", ours, "GB/s", theirs, f"fio, {THREADS} jobs"))
    return rows


def _fio_seconds(folder: str, verb: str, count: int) -> float:
    """Return how long ``fio`` takes to write or read so many files of the tier's length.

    Its start is left out.
    """
    os.makedirs(folder, exist_ok=True)
    settings = {
        "name": "chunks", "directory": folder, "rw": verb, "bs": FILE_BYTES,
        "filesize": FILE_BYTES,
        "nrfiles": count // THREADS, "numjobs": THREADS, "openfiles": 1, "ioengine": "psync",
        "file_service_type": "sequential", "create_on_open": int(verb == "write"),
        "fallocate": "none", "invalidate": 0, "thread": 1, "group_reporting": 1,
        "output-format": "json",
    }  # fmt: skip
    words = ["fio", *(f"--{name}={value}" for name, value in settings.items())]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(job[verb]["runtime"]) / 1e3


def _leave_page_cache(folder: str) -> None:
    """Let this host forget the bytes of all files, not their names."""
    for parent, _, names in os.walk(folder):
        for name in names:
            fd = os.open(f"{parent}/{name}", os.O_RDONLY)
            os.fsync(fd)  # what is not written yet would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class _Tier:
    """A backend, called as the loops are."""

    def __init__(
        self, backend: Backend, folder: str, keys: Sequence[bytes], slots: Sequence[memoryview]
    ) -> None:
        self.folder = folder
        self._backend, self._keys, self._slots = backend, keys, slots

    async def store(self) -> None:
        _all(await self._backend.write(self._keys, self._slots))

    async def load(self) -> None:
        _all(await self._backend.read(self._keys, self._slots))

    async def drop(self) -> None:
        await self._backend.remove(self._keys)


class _Plain:
    """The plain loop."""

    def __init__(self, folder: str, slots: Sequence[memoryview]) -> None:
        os.mkdir(folder)
        self.folder, self._slots = folder, slots
        self._pool = ThreadPoolExecutor(THREADS)
        self._header = memoryview(mmap.mmap(-1, ALIGNED_BYTES))

    async def store(self) -> None:
        await self._each(self._write)

    async def load(self) -> None:
        await self._each(self._read)

    async def drop(self) -> None:
        await self._each(self._remove)

    async def _each(self, work: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(self._pool, work, i) for i in range(len(self._slots))]
        await asyncio.gather(*calls)

    def _path(self, i: int) -> str:
        return f"{self.folder}/{i}"

    def _write(self, i: int) -> None:
        self._fill(self._path(i), i)

    def _fill(self, path: str, i: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwritev(fd, [self._header, self._slots[i]], 0)
        os.close(fd)

    def _read(self, i: int) -> None:
        fd = os.open(self._path(i), os.O_RDONLY)
        os.preadv(fd, [self._header, self._slots[i]], 0)
        os.close(fd)

    def _remove(self, i: int) -> None:
        os.unlink(self._path(i))

    def close(self) -> None:
        self._pool.shutdown()


class _SameWork(_Plain):
    """The plain loop in the tier's folders, with its rename and its checksum."""

    def __init__(self, folder: str, slots: Sequence[memoryview], keys: Sequence[bytes]) -> None:
        super().__init__(folder, slots)
        self._names = [f"{shard_of(key)}/{key.hex()}" for key in keys]
        for shard in {shard_of(key) for key in keys}:
            os.mkdir(f"{folder}/{shard}")

    def _path(self, i: int) -> str:
        return f"{self.folder}/{self._names[i]}"

    def _write(self, i: int) -> None:
        checksum(self._slots[i])
        shard, name = os.path.split(self._path(i))
        self._fill(temporary := f"{shard}/{temporary_of(name, 'loop', i)}", i)
        os.rename(temporary, self._path(i))

    def _read(self, i: int) -> None:
        super()._read(i)
        checksum(self._slots[i])


# ---- lookups, and what each call asks of the mount -----------------------------------------------


async def _lookups(scratch: str) -> list[Row]:
    """Look up chunks that this process knows, and those of another one."""
    keys, slots = keys_of(LOOKUPS), [memoryview(bytes(64))] * LOOKUPS
    writer = _folder(f"{scratch}/lookups")
    _all(await writer.write(keys, slots))
    known = min([await _seconds(writer, keys) for _ in range(ROUNDS)])
    unknown = []
    for _ in range(ROUNDS):
        reader = _folder(f"{scratch}/lookups")
        unknown.append(await _seconds(reader, keys))
        await reader.close()
    paths = [writer._files.path_of(key) for key in keys]
    began_s = time.perf_counter()
    for path in paths:
        os.lstat(path)
    stat_s = time.perf_counter() - began_s
    await writer.close()
    return [
        row("lookup, known here", known / LOOKUPS * 1e6, "µs a key"),
        row("lookup, of another host", min(unknown) / LOOKUPS * 1e6, "µs a key",
            stat_s / LOOKUPS * 1e6, "lstat, one after the other"),
    ]  # fmt: skip


async def _seconds(backend: Backend, keys: Sequence[bytes]) -> float:
    began_s = time.perf_counter()
    _all(await backend.contains(keys))
    return time.perf_counter() - began_s


class _CountingVfs(Vfs):
    """Counts operations on names; reads, writes, and facts of open files are none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def open(self, path: str, flags: int) -> int:
        self.calls["open"] += 1
        return super().open(path, flags)

    def rename(self, source: str, target: str) -> None:
        self.calls["rename"] += 1
        super().rename(source, target)

    def lstat(self, path: str) -> os.stat_result:
        self.calls["lstat"] += 1
        return super().lstat(path)


async def _operations(scratch: str) -> list[Row]:
    """Count operations on names, once all folders are there."""
    vfs = _CountingVfs()
    backend = _folder(f"{scratch}/operations", vfs)
    slots, rows = [memoryview(bytearray(64))] * LOOKUPS, []
    _all(await backend.write(keys_of(LOOKUPS, "first"), slots))
    keys = keys_of(LOOKUPS)
    for case, call in (
        ("operations on names, a store", lambda: backend.write(keys, slots)),
        ("operations on names, a load", lambda: backend.read(keys, slots)),
        ("operations on names, a lookup of a known chunk", lambda: backend.contains(keys)),
    ):
        vfs.calls.clear()
        _all(await call())
        told = ", ".join(f"{number / LOOKUPS:.2f} {name}" for name, number in vfs.calls.items())
        rows.append(row(case, vfs.calls.total() / LOOKUPS, told or "none"))
    await backend.close()
    return rows


def _all(answers: Sequence[object]) -> None:
    if not all(answers):
        raise RuntimeError("a chunk was refused or missed")
