"""``io: "auto"``: loads from the page cache without waiting, or directly; never other bytes."""

import contextlib
import ctypes
import errno
import json
import os
import subprocess
import threading
import time
from collections import Counter

import pytest
from disk_parts import ON_DISK, SIZE, load, open_disk, write

from kvoffload.backends import blocking_pool
from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk import backend as disk_backend
from kvoffload.backends.disk import cache_room, file_calls
from kvoffload.testing.backends import filled, keys_of
from tests.support.file_faults import flip
from tests.support.kernel_files import GIB
from tests.support.vfs import EVERY_ERROR, FailingVfs, HookedVfs, kind_of

CALLS = "is_cached", "read_cached", "bypass_cache", "preadv", "start_writeback"


class CountingVfs(HookedVfs):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def around(self, call, path, perform):
        if call in CALLS and kind_of(path) in ("chunk", "temporary"):
            self.calls[call] += 1
        return perform()


def opened(root, vfs, **settings):
    backend = open_disk(root, vfs=vfs, **settings)
    if backend.io_mode != "auto":
        pytest.skip("no direct I/O here")
    return backend


def opened_over_page_cache(root, vfs):
    """Open a store whose file system reads from the page cache alone, as tmpfs does not."""
    backend = opened(root, vfs)
    with (root / "probe").open("w+b") as file:
        file.write(b"a")
        file.flush()
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"no reads of the page cache alone here: {error.strerror}")
    return backend


@pytest.fixture
def cached(tmp_path, kernel_files):
    vfs = CountingVfs()
    backend = opened_over_page_cache(tmp_path, vfs)
    vfs.calls.clear()
    return backend, vfs.calls


def drop(root, offset=0, length=0):
    """Drop the chunks, or a part of each, from the page cache."""
    for path in root.glob("*/??/*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def test_what_was_just_stored_is_loaded_from_the_page_cache(cached):
    backend, calls = cached
    keys = keys_of(4)
    assert await write(backend, keys) == [True] * 4
    assert await load(backend, keys) == [True] * 4
    assert calls == {"start_writeback": 4, "is_cached": 4, "read_cached": 4}


async def test_the_rest_is_loaded_directly_and_stays_out_of_the_page_cache(cached, tmp_path):
    backend, calls = cached
    keys = keys_of(4)
    assert await write(backend, keys) == [True] * 4
    drop(tmp_path)
    calls.clear()
    assert await load(backend, keys) == [True] * 4
    assert await load(backend, keys) == [True] * 4
    assert calls == {"is_cached": 8, "bypass_cache": 8, "preadv": 8}


@pytest.mark.parametrize("dropped", ["head", "tail"])
async def test_a_chunk_of_which_a_part_is_cached_is_loaded_directly(cached, tmp_path, dropped):
    backend, calls = cached
    keys, size = keys_of(1), 1 << 20
    assert await backend.write(keys, filled(keys, size)) == [True]
    drop(tmp_path, *((0, size) if dropped == "head" else (size // 2, 0)))
    calls.clear()
    assert await load(backend, keys, size) == [True]
    calls.pop("read_cached", None)  # of the rest, the page cache is asked by reading
    assert calls == {"is_cached": 1, "bypass_cache": 1, "preadv": 1}


async def test_memory_that_direct_io_cannot_use_is_filled_by_way_of_the_page_cache(
    cached, tmp_path
):
    backend, calls = cached
    keys = keys_of(2)
    assert await backend.write(keys, filled(keys, SIZE - 1)) == [True] * 2
    drop(tmp_path)
    calls.clear()
    assert await load(backend, keys, SIZE - 1) == [True] * 2
    assert calls == {"is_cached": 2, "preadv": 2}


@pytest.mark.parametrize("call", ["is_cached", "read_cached", "bypass_cache", "start_writeback"])
@pytest.mark.parametrize("error", [*EVERY_ERROR, errno.EAGAIN])
async def test_a_page_cache_that_fails_costs_no_chunk(tmp_path, kernel_files, call, error):
    vfs = FailingVfs(0, error, sticky=True, when=lambda name, path: name == call)
    backend = opened(tmp_path, vfs)
    vfs.nth = 1
    keys = keys_of(4)
    assert await write(backend, keys) == [True] * 4
    assert await load(backend, keys) == [True] * 4
    drop(tmp_path)
    assert await load(backend, keys) == [True] * 4


async def test_slots_that_cannot_be_opened_for_the_page_cache_are_read_directly(
    tmp_path, kernel_files
):
    vfs = HookedVfs()
    backend = opened(tmp_path, vfs, form="segments")
    keys, open_file = keys_of(4), vfs.open
    assert await write(backend, keys) == [True] * 4
    backend._store.segments._files._kept.clear()

    def only_directly(path, flags):
        if kind_of(path) == "slots" and not flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "no descriptor is left")
        return open_file(path, flags)

    vfs.open = only_directly
    assert await load(backend, keys) == [True] * 4
    del vfs.open


@pytest.mark.parametrize("is_cold", [False, True])
async def test_damage_in_the_page_cache_or_on_the_disk_is_found(cached, tmp_path, is_cold):
    backend, _ = cached
    keys = keys_of(1)
    assert await write(backend, keys) == [True]
    (path,) = tmp_path.glob("*/??/*")
    flip(path, 9000)
    if is_cold:
        drop(tmp_path)
    assert [each is ReadResult.CORRUPT for each in await load(backend, keys)] == [True]
    assert backend.counters() == {"corrupt": 1, "corrupt_payload": 1}


def test_an_old_kernel_is_asked_by_another_call(tmp_path, monkeypatch):
    def forbidden(*args):
        ctypes.set_errno(errno.ENOSYS)
        return -1

    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE - 100))
    with open(path, "rb") as file:
        by_cachestat = file_calls.is_cached(file.fileno(), SIZE - 100)
        monkeypatch.setattr(file_calls._quick, "syscall", forbidden, raising=False)
        assert file_calls.is_cached(file.fileno(), SIZE - 100) == by_cachestat
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold = file_calls.is_cached(file.fileno(), SIZE - 100)
        monkeypatch.undo()
        assert file_calls.is_cached(file.fileno(), SIZE - 100) == cold
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_calls.is_cached(-1, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_calls.start_writeback(-1)


class ThreadsVfs(CountingVfs):
    """Lists the threads that read chunks, out of the page cache and directly.

    A read waits until so many threads read as are wanted, or for a while.
    """

    def __init__(self, wanted):
        super().__init__()
        self.threads, self.wanted = {"read_cached": [], "preadv": []}, wanted

    def around(self, call, path, perform):
        if call in self.threads and kind_of(path) == "chunk":
            threads = self.threads[call]
            threads.append(threading.get_ident())
            until_s = time.monotonic() + 20
            while len(set(threads)) < self.wanted[call]:
                time.sleep(0.001)
                if time.monotonic() > until_s:
                    self.wanted[call] = 0
        return super().around(call, path, perform)


@pytest.mark.parametrize(
    ("has_few_cores", "size", "is_one"),
    [(False, SIZE, True), (True, 1 << 20, True), (False, 1 << 20, False)],
)
async def test_one_thread_loads_what_is_cached_and_all_of_them_what_is_not(
    tmp_path, kernel_files, monkeypatch, has_few_cores, size, is_one
):
    monkeypatch.setattr(disk_backend, "_HAS_FEW_CORES", has_few_cores)
    monkeypatch.setattr(blocking_pool, "QUICK_S", 60)
    vfs = ThreadsVfs({"read_cached": 1 if is_one else 2, "preadv": 5})
    backend = opened_over_page_cache(tmp_path, vfs)
    keys = keys_of(16)
    assert await backend.write(keys, filled(keys, size)) == [True] * 16
    assert await load(backend, keys, size) == [True] * 16
    assert len(vfs.threads["read_cached"]) == 16
    assert (len(set(vfs.threads["read_cached"])) == 1) is is_one
    drop(tmp_path)
    assert await load(backend, keys, size) == [True] * 16
    assert len(set(vfs.threads["preadv"])) > 4


async def test_stores_of_a_running_tier_follow_the_memory(tmp_path, kernel_files, monkeypatch):
    monkeypatch.setattr(cache_room, "PERIOD_S", 0.0)
    monkeypatch.setattr(cache_room, "CALM_S", 0.0)
    vfs = CountingVfs()
    backend, calls = opened_over_page_cache(tmp_path, vfs), vfs.calls
    before, under, after = (keys_of(4, name) for name in ("before", "under", "after"))
    assert await write(backend, before) == [True] * 4
    assert calls.pop("start_writeback") == 4
    kernel_files.available(GIB)
    assert not backend.room.look()  # or only the first of several threads would
    assert await write(backend, under) == [True] * 4
    assert "start_writeback" not in calls
    calls.clear()
    assert await load(backend, before) == [True] * 4  # loads ask the page cache all the time
    assert await load(backend, under) == [True] * 4
    assert calls == {"is_cached": 8, "read_cached": 4, "bypass_cache": 4, "preadv": 4}
    kernel_files.available(10 * GIB)
    assert backend.room.look()
    assert await write(backend, after) == [True] * 4
    assert calls["start_writeback"] == 4


MIXED = """
import asyncio, json, random, sys
from pathlib import Path
from kvoffload import memory_limits
from kvoffload.backends.disk import cache_room
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, payload_of, slots
from tests.helpers.disk_parts import in_form
from tests.support.kernel_files import GIB, KernelFiles

async def main(root, kernel, form, seed, capacity, size, seconds):
    rng = random.Random(seed)
    memory_limits.ROOT = Path(kernel)
    files = KernelFiles(Path(kernel))
    cache_room.PERIOD_S = cache_room.CALM_S = 0.0
    options = DiskOptions(root=root, capacity=ByteSize(capacity), min_free=ByteSize(0))
    backend = in_form(DiskBackend(options, "one"), form)
    keys, ways = keys_of(120), [0, 0]
    wrong = reads = 0
    print("up", flush=True)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end or reads <= 100 or min(ways) <= 20:  # longer on a busy machine
        some = rng.sample(keys, 8)
        if rng.random() < 0.6:
            files.available(rng.choice((GIB, 10 * GIB)))
            stored = sum(await backend.write(some, filled(some, size)))
            ways[backend.room.is_free] += stored
        else:
            into = slots(8, size)
            for key, slot, good in zip(some, into, await backend.read(some, into)):
                reads += good
                wrong += good and bytes(slot) != payload_of(key, size)
    print(json.dumps([wrong, reads, ways, backend.counters()]), flush=True)
    await backend.close()

*words, capacity, size, seconds = sys.argv[1:]
asyncio.run(main(*words[:3], int(words[3]), int(capacity), int(size), float(seconds)))
"""


@pytest.mark.parametrize("form", ["files", "segments"])
@pytest.mark.parametrize("seconds", [2, pytest.param(120, marks=pytest.mark.chaos)])
def test_a_direct_store_over_cached_pages_is_what_every_process_loads(
    tmp_path, python, form, seconds
):
    """Two processes on one full root overwrite files of chunks, by both ways in turns."""
    processes = []
    with contextlib.ExitStack() as stack:
        for seed in range(2):
            places = [str(tmp_path / "kv"), str(tmp_path / f"kernel{seed}")]
            words = [*places, form, str(seed), str(60 * ON_DISK), str(SIZE), str(seconds)]
            command = [*python, "-c", MIXED, *words]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            assert process.stdout.readline() == "up\n"
        for process in processes:
            out, _ = process.communicate(timeout=seconds + 240)
            wrong, reads, ways, counts = json.loads(out.splitlines()[-1])
            assert (process.returncode, wrong) == (0, 0)
            assert reads > 100
            assert min(ways) > 20, "both ways were to be taken"
            assert not [name for name in counts if "corrupt" in name], counts
