"""A full store overwrites the files of evicted chunks: readers miss, the quota is exact."""

import asyncio
import errno
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_parts import ON_DISK, SIZE, allocated, chunk_bytes, full, load, open_disk, until, write

from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk import housekeeper
from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.locks import bytes_in_flight
from kvoffload.backends.disk.paths import QUARANTINE, WRITERS
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.space import Reservation
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import ByteSize
from kvoffload.testing import payload_of
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import BesideVfs, FailingVfs, HookedVfs, calls_on, kind_of


def inodes(root):
    return {path.name: path.stat().st_ino for path in root.glob("*/??/*")}


def store(backend, key):
    """Store while this thread waits inside a call: with another thread's page for the header."""
    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(backend._store.store, key, filled([key], SIZE)[0])
        assert stored.result()


def temporaries(root):
    return [path for path in root.glob(f"{WRITERS}/*/*") if path.name != "lock"]


async def test_the_file_of_the_chunk_that_leaves_becomes_that_of_the_next(tmp_path):
    backend = open_disk(tmp_path, **full(4))
    old, new = keys_of(4), keys_of(3, "new")
    for key in old:
        assert await write(backend, [key]) == [True]
    before = inodes(tmp_path)
    for key in new:
        assert await write(backend, [key]) == [True]
    after = inodes(tmp_path)
    assert [after[key.hex()] for key in new] == [before[key.hex()] for key in old[:3]]
    assert after[old[3].hex()] == before[old[3].hex()]
    assert backend.counters() == {"evicted": 3, "overwritten": 3}
    assert {each.key for each in backend.take_removals()} == set(old[:3])
    assert await load(backend, [old[3], *new]) == [True] * 4
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 4 * ON_DISK
    assert temporaries(tmp_path) == []


async def test_an_overwritten_file_counts_as_used_now(tmp_path):
    backend = open_disk(tmp_path, **full(1), ttl_s=60)
    old, new = keys_of(2)
    assert await write(backend, [old]) == [True]
    (path,) = tmp_path.glob("*/??/*")
    os.utime(path, (0, 0))
    assert await write(backend, [new]) == [True]
    await backend.close()
    (path,) = tmp_path.glob("*/??/*")
    assert time.time() - path.stat().st_atime < 30
    backend = open_disk(tmp_path, **full(1), ttl_s=60)
    assert await backend.read([new], slots(1, SIZE)) == [True]


async def test_files_of_other_lengths_and_with_other_names_are_not_overwritten(tmp_path):
    backend = open_disk(tmp_path, **full(3))
    small, linked, new, last = keys_of(4)
    assert await backend.write([small], filled([small], SIZE - 1)) == [True]
    assert await write(backend, [linked]) == [True]
    (path,) = tmp_path.glob(f"*/??/{linked.hex()}")
    os.link(path, tmp_path / "kept")
    assert await backend.write([new], filled([new], 2 * SIZE)) == [True]
    assert await write(backend, [last]) == [True]
    assert "overwritten" not in backend.counters()
    assert payload_of(linked, SIZE) == (tmp_path / "kept").read_bytes()[4096:]


class InterruptedVfs(HookedVfs):
    """Something happens when a chunk's header has been read, or before it, and not yet the rest."""

    def __init__(self):
        super().__init__()
        self.before_header = self.before_chunk = None

    def preadv(self, fd, buffers, offset):
        return self._interrupted(super().preadv, fd, buffers, offset)

    def read_cached(self, fd, buffers, offset):
        return self._interrupted(super().read_cached, fd, buffers, offset)

    def _interrupted(self, read, fd, buffers, offset):
        if len(buffers) < 2 or kind_of(self._paths[fd]) not in ("chunk", "slots"):
            return read(fd, buffers, offset)
        before_header, self.before_header = self.before_header, None
        if before_header is not None:
            before_header()
        moved = read(fd, buffers[:1], offset)  # refused by a tmpfs, if it is not to wait
        before_chunk, self.before_chunk = self.before_chunk, None
        if before_chunk is not None:
            before_chunk()
        return moved + read(fd, buffers[1:], offset + moved)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("moment", ["before_header", "before_chunk"])
@pytest.mark.parametrize("reader", ["the same process", "another process"])
@pytest.mark.parametrize("io", ["auto", "direct"])
async def test_a_reader_of_a_file_that_is_overwritten_misses_and_sees_no_damage(
    tmp_path, kernel_files, caplog, moment, reader, io
):
    vfs, settings = InterruptedVfs(), full(1) | {"io": io}
    if reader == "the same process":
        writing = reading = open_disk(tmp_path, vfs=vfs, **settings)
    else:
        writing, reading = open_disk(tmp_path, **settings), open_disk(tmp_path, vfs=vfs, **settings)
    old, new = keys_of(2)
    assert await write(writing, [old]) == [True]
    assert await until(lambda: reading.holds(old))
    setattr(vfs, moment, lambda: store(writing, new))
    answers = await reading.read([old], slots(1, SIZE))
    assert [each is ReadResult.MISSING for each in answers] == [True]
    assert writing.counters()["overwritten"] == 1
    assert reading.counters()["read_missing"] == 1
    assert not any(reason.startswith("corrupt") for reason in reading.counters())
    assert os.listdir(tmp_path / QUARANTINE) == []
    assert "verification" not in caplog.text
    assert not reading.holds(old)
    assert await load(reading, [new]) == [True]


async def test_a_chunk_that_comes_back_into_its_file_under_a_reader_is_read(tmp_path):
    vfs = InterruptedVfs()
    reading = open_disk(tmp_path, vfs=vfs, **full(1))
    old, new = keys_of(2)
    assert await write(reading, [old]) == [True]
    before = inodes(tmp_path)
    vfs.before_header = lambda: store(reading, new)
    vfs.before_chunk = lambda: store(reading, old)
    assert await load(reading, [old]) == [True]
    assert inodes(tmp_path) == before
    assert reading.counters() == {"evicted": 2, "overwritten": 2}


async def test_verify_takes_an_overwritten_file_for_a_missing_one(tmp_path):
    backend = open_disk(tmp_path, **full(1))
    old, new = keys_of(2)
    assert await write(backend, [old]) == [True]
    vfs = BesideVfs()
    inspector = DiskInspector(str(tmp_path), vfs)
    (chunk,) = inspector.chunks()
    vfs.on("fstat:chunk:before", lambda: store(backend, new))
    assert inspector.verify(chunk, memoryview(bytearray(1 << 16)))[0] == "missing"
    assert inspector.remove(chunk) == 0
    inspector.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
async def test_an_overwrite_that_fails_leaves_neither_file_nor_bytes(tmp_path, error):
    vfs = FailingVfs(0, error, when=calls_on("temporary", "pwritev"))
    backend = open_disk(tmp_path, vfs=vfs, **full(2))
    assert await write(backend, keys_of(2)) == [True] * 2
    vfs.nth = vfs.calls + 1
    assert await write(backend, keys_of(1, "new")) == [False]
    assert temporaries(tmp_path) == []
    quota = backend._store.root.quota
    assert quota.refresh() == chunk_bytes(tmp_path) == ON_DISK
    assert backend._store.space.in_flight_bytes == 0


class CountingVfs(HookedVfs):
    def __init__(self):
        super().__init__()
        self.calls = Counter()
        """Without those of housekeeping, which looks when it likes."""

    def around(self, call, path, perform):
        if threading.current_thread().name != "kvoffload-disk":
            self.calls[call, kind_of(path)] += 1
        return perform()


@pytest.mark.parametrize("filled_before", [False, True])
async def test_a_job_reserves_once_for_several_chunks(tmp_path, filled_before):
    vfs = CountingVfs()
    backend = open_disk(tmp_path, vfs=vfs, **full(128))
    assert await write(backend, keys_of(128 if filled_before else 8)) != []
    await asyncio.sleep(0.1)
    vfs.calls.clear()
    assert await write(backend, keys_of(8, "new")) == [True] * 8
    assert vfs.calls["pwritev", "ledger"] == 1
    assert vfs.calls["flock", "ledger"] == 2
    assert vfs.calls["statvfs", "root"] == 1
    # A rename into a missing folder is tried again.
    assert vfs.calls["rename", "chunk"] == 8 + vfs.calls["mkdir", "shard"]
    assert vfs.calls["take", "chunk"] == (8 if filled_before else 0)
    assert vfs.calls["unlink", "chunk"] == 0
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("is_full", [False, True])
async def test_what_a_job_reserved_and_did_not_use_is_released(tmp_path, is_full):
    backend = open_disk(tmp_path, **full(128))
    assert await write(backend, keys_of(128 if is_full else 8)) != []
    space, quota = backend._store.space, backend._store.root.quota
    reservation = Reservation(space, [SIZE] * 8)
    (room,) = reservation.take(SIZE, 1)
    assert quota.refresh() == (128 if is_full else 16) * ON_DISK
    space.cancel(ON_DISK, room)
    assert not reservation.is_used_up
    reservation.close()
    assert temporaries(tmp_path) == []
    assert quota.refresh() == chunk_bytes(tmp_path)
    assert space.in_flight_bytes == 0
    # A job of which some chunks turn out to be there, stored by another job.
    keys = keys_of(8, "twice")
    assert await asyncio.gather(*(write(backend, keys) for _ in range(3))) == [[True] * 8] * 3
    assert quota.refresh() == chunk_bytes(tmp_path)
    assert space.in_flight_bytes == 0


@pytest.mark.usefixtures("form")
async def test_a_cancelled_job_releases_what_it_reserved(tmp_path):
    backend = open_disk(tmp_path, **full(1024), write_threads=1)
    for round_ in range(20):
        job = asyncio.ensure_future(write(backend, keys_of(16, f"job{round_}")))
        await asyncio.sleep(0.0005 * round_)
        job.cancel()
        await asyncio.wait([job])
        assert await until(lambda: not backend._store.space.in_flight_bytes)
        assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path)


async def test_a_job_that_needs_more_than_there_is_stores_a_part(tmp_path):
    settings = full(128) | {"capacity": ByteSize(130 * ON_DISK)}
    vfs = FailingVfs(0, errno.EACCES, sticky=True, when=calls_on("chunk", "unlink", "take"))
    backend = open_disk(tmp_path, vfs=vfs, **settings)
    assert all(await write(backend, keys_of(126)))
    vfs.nth = 1
    assert sum(await write(backend, keys_of(8, "more"))) == 4
    assert backend.counters()["refused_capacity"] == 4
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 130 * ON_DISK


@pytest.mark.usefixtures("form")
async def test_a_scan_counts_what_another_process_reserved(tmp_path):
    """A scan that took it for drift would let the processes exceed the capacity."""
    evicting, other = open_disk(tmp_path, **full(128)), open_disk(tmp_path, **full(128))
    store = other._store
    rooms = [room for _ in range(10) for room in store.space.reserve(SIZE, 8)]
    assert len(rooms) == 80
    for left in (80, 50, 20, 1, 0):
        while len(rooms) > left:
            store.space.cancel(ON_DISK, rooms.pop())
        scanner = Scanner(evicting._store)
        assert scanner.scan(full=True) is (left == 0)
        assert evicting._store.root.quota.refresh() == left * ON_DISK


@pytest.mark.usefixtures("form")
async def test_a_process_tells_what_it_moves_with_few_writes(tmp_path):
    """It is told before it moves, with each doubling, and when nothing moves."""
    told = []

    class Told(HookedVfs):
        def around(self, call, path, perform):
            if call == "pwritev" and path.endswith("/lock"):
                told.append(bytes_in_flight(self, str(tmp_path), ""))
            return perform()

    open_disk(tmp_path, **full(2048))  # it evicts
    other = open_disk(tmp_path, vfs=Told(), **full(2048))
    assert all(await write(other, keys_of(512)))
    assert any(told)
    assert len(told) <= 512 * 5 // 8 + 1, "eight chunks at a time: begun, and halved"
    assert bytes_in_flight(Vfs(), str(tmp_path), "") == 0


async def test_beside_a_writer_of_the_first_version_a_process_reserves_one(tmp_path):
    backend = open_disk(tmp_path, **full(128))
    backend._store.root.has_older_writers = True
    assert len(backend._store.space.reserve(SIZE, 8)) == 1


@pytest.mark.usefixtures("form")
async def test_scans_of_a_store_that_overwrites_all_the_time_keep_the_quota_right(
    tmp_path, monkeypatch
):
    """A file that moves to a folder already scanned is seen nowhere; one that moves on, twice."""
    monkeypatch.setattr(housekeeper, "_TICK_S", 3600.0)  # a store has one scan at a time
    backend = open_disk(tmp_path, **full(128), write_threads=4)
    assert backend.wait_ready(60)
    assert all(await write(backend, keys_of(128)))
    writing = True

    async def churn(name):
        count = 0
        while writing:
            assert await write(backend, keys_of(24, f"{name}{count}")) == [True] * 24
            count += 1

    tasks = [asyncio.ensure_future(churn(name)) for name in "ab"]
    ends_at = time.monotonic() + 1.5
    while time.monotonic() < ends_at:
        await asyncio.to_thread(Scanner(backend._store).scan, full=True)
        assert allocated(tmp_path / WRITERS) <= (16 + 16) * ON_DISK
    writing = False
    await asyncio.gather(*tasks)
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 128 * ON_DISK
    assert backend.counters()["overwritten"] > 100


async def test_a_chunk_that_leaves_while_it_is_stored_again_is_stored_anew(tmp_path, monkeypatch):
    backend = open_disk(tmp_path, durability="fsync")
    keys, disk = keys_of(1), backend._store
    assert await write(backend, keys) == [True]
    exists = disk.exists

    def left_after_it_was_seen(key):
        return exists(key) and disk.discard(name_of(0, key), "evicted")

    monkeypatch.setattr(disk, "exists", left_after_it_was_seen)
    assert await write(backend, keys) == [True]
    monkeypatch.undo()
    assert await backend.read(keys, into := slots(1, SIZE)) == [True]
    assert bytes(into[0]) == payload_of(keys[0], SIZE)
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path)
    assert "fsync_failed" not in backend.counters()
