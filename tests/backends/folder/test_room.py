"""How much of what hosts want to store finds room, and what leaves for it."""

import asyncio
import errno
import os
import threading
import time

import msgspec
import pytest
from disk_parts import ON_DISK, SIZE, load, until
from folder_parts import (
    host_record,
    new_evictor,
    open_folder,
    path_of,
    store,
    store_at_last,
    stored,
    stored_bytes,
)

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder import clock, scan, upkeep, waiting_writes
from kvoffload.backends.folder.evictor import DEAD_S
from kvoffload.backends.folder.records import Records
from kvoffload.testing.backends import filled, keys_of
from tests.support.vfs import BesideVfs


async def test_bursts_of_two_hosts_into_a_small_full_store_find_room(mounts):
    """Each burst is an eighth of the capacity, and has to wait for several evictions."""
    capacity, root = 256 * ON_DISK, mounts[0] / "kv"
    hosts = [open_folder(mount / "kv", capacity=capacity) for mount in mounts]
    assert await until(lambda: all(host.usage().gauges["hosts"] == 2 for host in hosts))
    stored, most = [0, 0], 0

    async def work(number):
        nonlocal most
        for burst in range(8):
            stored[number] += sum(await store(hosts[number], keys_of(32, f"{number}-{burst}")))
            most = max(most, stored_bytes(root))

    await asyncio.gather(work(0), work(1))
    assert min(stored) > 0.9 * 8 * 32
    assert 0.8 * capacity < most <= 1.02 * capacity


@pytest.mark.parametrize(("chunks", "hosts"), [(5, 1), (20, 1), (12, 2)])
async def test_each_host_of_a_folder_of_few_chunks_has_room_for_one_again(tmp_path, chunks, hosts):
    root, capacity = tmp_path / "share", chunks * ON_DISK
    backends = [open_folder(root, capacity=capacity) for _ in range(hosts)]
    assert await until(lambda: all(each.usage().gauges["hosts"] == hosts for each in backends))
    for number in range(2 * chunks):
        for host, backend in enumerate(backends):
            assert await store_at_last(backend, keys_of(1, f"{host}-{number}"))
        assert stored_bytes(root) <= capacity


async def test_a_write_that_waits_for_room_holds_up_no_load_and_no_end(tmp_path):
    backend = open_folder(tmp_path / "share", threads=2)
    keys = keys_of(2)
    assert await store_at_last(backend, keys)
    backend._housekeeper._turn = lambda: None
    backend._housekeeper.room.give_up()
    waiting = [asyncio.ensure_future(store(backend, keys_of(4, f"{i}"))) for i in range(8)]
    await asyncio.sleep(0)
    assert await load(backend, keys) == [True] * 2
    assert not any(each.done() for each in waiting)
    await backend.close()
    assert await asyncio.gather(*waiting) == [[False] * 4] * 8


async def test_at_each_moment_of_a_turn_usage_is_within_the_capacity(tmp_path, monkeypatch):
    """Also where the process stores at once all that it may, before the turn goes on."""
    backend = open_folder(tmp_path / "share", capacity=40 * ON_DISK)
    room, seen = backend._housekeeper.room, []

    def limit(*told, of=room.limit):
        of(*told)
        reserved = 0
        while room.reserve(SIZE, ("folder", b"key")):
            reserved += 1
        seen.append(backend.usage().resident_bytes or 0)
        for _ in range(reserved):
            room.release(SIZE, "", ("folder", b"key"))

    monkeypatch.setattr(room, "limit", limit)
    for number in range(20):
        assert await store_at_last(backend, keys_of(8, f"{number}"))
        told = len(seen)
        assert await until(lambda told=told: len(seen) > told)
    await backend.close()
    assert 0 < max(seen) <= 40 * ON_DISK


async def test_a_listing_counts_once_what_its_process_stores_meanwhile(tmp_path):
    vfs, begun, is_stored = BesideVfs(), threading.Event(), threading.Event()
    backend = open_folder(tmp_path / "share", vfs=vfs)
    assert await store_at_last(backend, keys_of(4))
    evictor = backend._housekeeper._evictor
    scans = evictor.scans

    def end_late():
        is_stored.set()
        while evictor.scans == scans:
            time.sleep(0.01)

    vfs.on("listdir:shard:before", lambda: (begun.set(), is_stored.wait(60)))
    evictor._scan_due_s = evictor._scan_again_s = 0.0
    assert await until(begun.is_set)
    *keys, slow = keys_of(8, "meanwhile")
    assert all(await store(backend, keys))
    vfs.on("rename:chunk:before", end_late)
    assert await store(backend, [slow]) == [True]
    assert backend.usage().resident_bytes == stored_bytes(tmp_path / "share") == 12 * ON_DISK


async def test_a_listing_counts_once_what_its_process_began_to_store_before(tmp_path):
    vfs, moving, go = BesideVfs(), threading.Event(), threading.Event()
    backend = open_folder(tmp_path / "share", vfs=vfs)
    assert await store_at_last(backend, keys_of(4))
    evictor = backend._housekeeper._evictor
    vfs.on("rename:chunk:before", lambda: (moving.set(), go.wait(60)))
    task = asyncio.ensure_future(store(backend, keys_of(1, "slow")))
    assert await until(moving.is_set)
    scans = evictor.scans
    evictor._scan_due_s, evictor._scan_again_s = 0.0, 0.0
    assert await until(lambda: evictor.scans > scans)
    go.set()
    assert await task == [True]
    assert backend.usage().resident_bytes == stored_bytes(tmp_path / "share") == 5 * ON_DISK


async def test_a_listing_counts_another_hosts_chunk_whose_store_failed_here_meanwhile(tmp_path):
    vfs, begun, go = BesideVfs(), threading.Event(), threading.Event()
    backend = open_folder(tmp_path / "share", vfs=vfs)
    other = open_folder(tmp_path / "share")
    key = keys_of(1)
    assert await store_at_last(other, key)
    evictor = backend._housekeeper._evictor
    assert await until(lambda: backend.usage().resident_bytes == ON_DISK)

    def fail():
        raise OSError(errno.EIO, "as a mount says")

    vfs.on("listdir:shard:before", lambda: (begun.set(), go.wait(60)))
    vfs.on("rename:chunk:before", fail)
    scans, evictor._scan_due_s, evictor._scan_again_s = evictor.scans, 0.0, 0.0
    assert await until(begun.is_set)
    assert await store(backend, key) == [False]
    go.set()
    assert await until(lambda: evictor.scans > scans)
    assert backend.usage().resident_bytes == stored_bytes(tmp_path / "share") == ON_DISK


async def test_a_store_that_raises_gives_its_room_back(tmp_path):
    vfs = Vfs()
    backend, keys = open_folder(tmp_path / "share", vfs=vfs), keys_of(1)
    assert await store_at_last(backend, keys_of(4, "before"))
    room = backend._housekeeper.room
    before, files = room.stored_bytes, []

    def note(path, flags, of=vfs.open):
        fd = of(path, flags)
        if keys[0].hex() in path:
            files.append(fd)
        return fd

    def without_memory(fd, buffers, offset):
        if fd in files:
            files.remove(fd)  # the next file may get the number
            raise MemoryError
        return os.pwritev(fd, buffers, offset)

    vfs.open, vfs.pwritev = note, without_memory
    assert await store(backend, keys) == [False]
    assert backend.counters()["write_failed"] == 1
    assert room.stored_bytes == before
    assert not [*tmp_path.rglob(f"*{keys[0].hex()}*")]
    del vfs.open, vfs.pwritev
    assert await store(backend, keys) == [True]
    assert room.listed() == (before + ON_DISK, set())


async def test_a_process_removes_what_it_could_not_remove_after_a_failed_store(tmp_path):
    """As where the connection to the server was lost: the file would take room for ever."""
    root = tmp_path / "share"
    await stored(root, keys_of(1))
    left = path_of(root, *keys_of(1)).with_name(".test-0")
    left.touch()
    os.utime(left, (0, 0))
    vfs = Vfs()
    evictor = new_evictor(root, vfs)
    evictor._records.set_clock()
    evictor.begin(None, is_new=False)
    assert await until(lambda: evictor.turn({}) or evictor.scans)
    assert not left.exists()


async def full_folder(root, monkeypatch):
    """Return a folder that has no room until a test says so, and that writes wait for very long."""
    backend = open_folder(root)
    assert await store_at_last(backend, keys_of(2))
    monkeypatch.setattr(waiting_writes, "_ROOM_S", 3600.0)
    turned = threading.Event()
    backend._housekeeper._turn = turned.set
    backend._housekeeper._wake.set()
    await until(turned.is_set)  # a turn that has begun would tell of this process once more
    backend._housekeeper.room.give_up()
    return backend


async def test_of_two_writes_that_see_the_same_room_the_second_waits_on(tmp_path, monkeypatch):
    backend = await full_folder(tmp_path / "share", monkeypatch)
    room = backend._housekeeper.room
    waiting = [asyncio.ensure_future(store(backend, keys_of(1, f"{i}"))) for i in range(8)]
    for number in range(1, 9):
        room.limit(room.stored_bytes + ON_DISK, 0, 0)
        assert await until(lambda n=number: sum(each.done() for each in waiting) == n)
    assert await asyncio.gather(*waiting) == [[True]] * 8
    assert "refused_full" not in backend.counters()


async def test_a_chunk_that_is_there_waits_for_no_room(tmp_path, monkeypatch):
    backend = await full_folder(tmp_path / "share", monkeypatch)
    async with asyncio.timeout(60):
        assert await store(backend, keys_of(2)) == [True, True]
    assert backend.counters()["write_present"] == 2


async def test_a_chunk_that_is_there_does_not_wait_behind_a_new_one(tmp_path, monkeypatch):
    backend = await full_folder(tmp_path / "share", monkeypatch)
    waiting = asyncio.ensure_future(store(backend, keys_of(2) + keys_of(1, "new")))
    assert await until(lambda: backend.counters().get("write_present") == 2)
    assert not waiting.done()
    await backend.close()
    assert await waiting == [True, True, False]


async def test_the_evictor_hears_how_large_a_chunk_is_that_waits(tmp_path, monkeypatch):
    backend = await full_folder(tmp_path / "share", monkeypatch)
    keys = keys_of(1, "large")
    waiting = asyncio.ensure_future(backend.write(keys, filled(keys, 16 * SIZE)))
    assert await until(lambda: backend._housekeeper.room.largest_bytes > 16 * SIZE)
    await backend.close()
    assert await waiting == [False]


async def test_a_write_waits_for_no_room_where_the_record_of_its_process_is_old(
    tmp_path, monkeypatch
):
    """Its mount is gone, or hangs: there would be a limit again only after it is back."""
    backend = await full_folder(tmp_path / "share", monkeypatch)
    backend._housekeeper.room.told(clock.now_s() - 100.0, DEAD_S)
    async with asyncio.timeout(60):
        assert await store(backend, keys_of(2, "new")) == [False, False]
    assert backend.counters()["refused_full"] == 2


async def test_a_write_waits_for_no_room_where_all_threads_hang(tmp_path, monkeypatch):
    backend = await full_folder(tmp_path / "share", monkeypatch)
    monkeypatch.setattr(type(backend._mount), "is_stalled", True)
    async with asyncio.timeout(60):
        assert await store(backend, keys_of(2, "new")) == [False, False]
    assert backend.counters()["write_stalled"] == 2


async def test_an_idle_evictor_hears_soon_of_a_process_that_stores(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "TURN_S", 3600.0)
    one = open_folder(tmp_path / "share", capacity=256 * ON_DISK)
    two = open_folder(tmp_path / "share", capacity=256 * ON_DISK)
    assert one.usage().gauges["evictor"] == 1
    stored = 0
    for turn in range(600):
        stored += sum(await store(two, keys_of(4, f"{turn}")))
        await asyncio.sleep(0.01)
        if stored > 200:
            break
    assert stored > 200


async def test_a_mount_that_frees_room_late_is_not_emptied_meanwhile(tmp_path, monkeypatch):
    """GlusterFS refuses stores for seconds after files were removed, CephFS for longer."""
    root = tmp_path / "share"
    await stored(root, keys_of(200))
    vfs, now_s, real = Vfs(), [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s[0])
    evictor = new_evictor(root, vfs)
    evictor.begin(None, is_new=False)
    host = host_record(largest_bytes=ON_DISK)

    def left_after_failures(new_bytes=0):
        nonlocal host
        for _ in range(20):
            stores = {"stored_bytes": host.stored_bytes + new_bytes // 20}
            host = msgspec.structs.replace(host, out_of_space=host.out_of_space + 1, **stores)
            evictor.turn({"writer": (host, 0.0)})
        return stored_bytes(root) // ON_DISK

    assert left_after_failures() == 193
    assert left_after_failures() == 193
    assert 180 < left_after_failures(7 * ON_DISK) < 193  # the room was used, and it is full again
    left = left_after_failures()
    now_s[0] += 11
    assert left_after_failures() < left


async def test_who_takes_over_evicts_nothing_for_failures_of_before(tmp_path):
    """Else each restart of the process that evicts would cost 3 % of what is stored."""
    root = tmp_path / "share"
    await stored(root, keys_of(40))
    vfs = Vfs()
    evictor = new_evictor(root, vfs)
    host = host_record(largest_bytes=ON_DISK, out_of_space=5)
    for failures in (5, 9):  # it takes over a second time, after another process evicted
        evictor.begin(None, is_new=False)
        told = msgspec.structs.replace(host, out_of_space=failures)
        for _ in range(3):
            evictor.turn({"writer": (told, 0.0)})
        assert stored_bytes(root) == 40 * ON_DISK
    failing = msgspec.structs.replace(host, out_of_space=10)
    evictor.turn({"writer": (failing, 0.0)})
    assert stored_bytes(root) < 40 * ON_DISK


async def test_failures_while_a_slow_mount_is_still_evicted_evict_no_more(tmp_path, monkeypatch):
    """One turn removes three files, and 3 % of them are seven."""
    root = tmp_path / "share"
    await stored(root, keys_of(200))
    vfs, now_s, real = Vfs(), 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s)

    def unlink(path, of=vfs.unlink):
        nonlocal now_s
        now_s += 0.4
        of(path)

    vfs.unlink = unlink
    evictor = new_evictor(root, vfs)
    evictor.begin(None, is_new=False)
    for _ in range(20):
        evictor.turn({}, is_full=True)
    assert stored_bytes(root) // ON_DISK == 193


async def test_an_eviction_whose_order_is_used_up_waits_for_the_next_listing_only(
    tmp_path, monkeypatch
):
    """Of a small folder a listing finds few files, and a slow mount takes seconds for it."""
    now_s, real, root = 0.0, time.monotonic, tmp_path / "share"
    vfs = Vfs()

    def listfacts(path, of=vfs.listfacts):
        nonlocal now_s
        now_s += 0.05
        return of(path)

    vfs.listfacts = listfacts
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s)
    evictor = new_evictor(root, vfs, capacity=40 * ON_DISK)
    writer = open_folder(root)
    evictor.begin(None, is_new=True)
    host = host_record(largest_bytes=ON_DISK)
    evictor.turn({"writer": (host, 0.0)})
    for burst in range(12):
        assert await store_at_last(writer, keys_of(10, f"{burst}"))
        host = msgspec.structs.replace(host, stored_bytes=host.stored_bytes + 10 * ON_DISK)
        for _ in range(400):
            evictor.turn({"writer": (host, 0.0)})
            now_s += 0.1
            if stored_bytes(root) <= 38 * ON_DISK:
                break
        assert stored_bytes(root) <= 38 * ON_DISK
    assert evictor.scans > 2


async def one_shard(root):
    """Make a folder with 60 files in one shard, and return its path."""
    keys = keys_of(60)
    await stored(root, keys)
    shard = path_of(root, keys[0]).parent
    for key in keys[1:]:
        (path := path_of(root, key)).rename(shard / path.name)
    return shard


async def test_files_that_leave_while_their_shard_is_listed_are_not_counted(tmp_path, monkeypatch):
    root = tmp_path / "share"
    shard = await one_shard(root)
    monkeypatch.setattr(scan, "_FILES_A_STEP", 4)
    vfs, seen = Vfs(), []

    def noted(files):
        for file in files:
            seen.append(file[0])
            yield file

    vfs.listfacts = lambda path, of=vfs.listfacts: noted(of(path))
    records = Records(vfs, str(root), "test")
    whole, listing = (scan.Scan(vfs, str(root), records) for _ in range(2))
    while whole.advance(1e12) is False:
        pass
    seen.clear()
    while not seen:
        assert not listing.advance(0.0)
    for file in (found := {file.key.hex(): file for file in whole.oldest()}).values():
        if file.key.hex() in seen[:3]:
            (shard / file.key.hex()).unlink()
            listing.removed(file)
    while not listing.advance(1e12):
        pass
    assert listing.total_bytes == 57 * ON_DISK
    assert {file.key.hex() for file in listing.oldest()} == found.keys() - {*seen[:3]}


async def test_the_time_between_two_turns_is_no_time_of_a_listing(tmp_path, monkeypatch):
    """Else a slow mount, on which a listing takes many turns, would evict nothing for as long."""
    now_s, real, root = 0.0, time.monotonic, tmp_path / "share"
    await one_shard(root)
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s)
    listing = scan.Scan(vfs := Vfs(), str(root), Records(vfs, str(root), "test"))
    while not listing.advance(0.0):
        now_s += 1000.0
    assert listing.listing_s() < 1000.0


async def test_a_listing_of_one_large_shard_goes_on_in_the_next_turns(tmp_path, monkeypatch):
    """In one turn it took longer than a lease lasts, so that two processes listed by turns."""
    now_s, real, root = 0.0, time.monotonic, tmp_path / "share"
    await one_shard(root)
    vfs = Vfs()

    def slowly(listed):
        nonlocal now_s
        for file in listed:
            now_s += 0.5
            yield file

    vfs.listfacts = lambda path, of=vfs.listfacts: slowly(of(path))
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s)
    monkeypatch.setattr(scan, "_FILES_A_STEP", 4)
    evictor = new_evictor(root, vfs)
    evictor.begin(None, is_new=False)
    longest = 0.0
    while not evictor.scans:
        began_s = now_s
        evictor.turn({})
        longest = max(longest, now_s - began_s)
    assert evictor.resident_bytes == 60 * ON_DISK
    assert longest < 5
