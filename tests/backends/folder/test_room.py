"""How much of what hosts want to store finds room, and what leaves for it."""

import asyncio
import time

import msgspec
from folder_parts import ON_DISK, open_folder, store, store_at_last, stored_bytes, until

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder import upkeep
from kvoffload.backends.folder.evictor import Evictor
from kvoffload.backends.folder.records import HostRecord, Records
from kvoffload.testing.backends import keys_of


def by_hand(backend):
    """Leave the turns of a backend's background to the test; return what makes one."""
    turn = backend._housekeeper._turn
    backend._housekeeper._turn = lambda: None
    return turn


async def test_two_hosts_that_store_into_a_small_full_store_are_refused_few(tmp_path):
    """Each wants 4 % of the capacity between two of its turns."""
    root = tmp_path / "share"
    hosts = [open_folder(root, capacity=256 * ON_DISK) for _ in range(2)]
    turns = [by_hand(host) for host in hosts]
    assert await until(lambda: hosts[0].usage().resident_bytes is not None)
    stored = []
    for cycle in range(80):
        for number, host in enumerate(hosts):
            stored.append(sum(await store(host, keys_of(10, f"{cycle}-{number}"))))
        for turn in (*turns, *turns):
            turn()
        assert stored_bytes(root) <= 256 * ON_DISK
    assert sum(stored[80:]) > 0.9 * 80 * 10
    assert stored_bytes(root) > 0.75 * 256 * ON_DISK
    await asyncio.gather(*(host.close() for host in hosts))


async def test_after_a_flood_the_store_is_filled_as_before(tmp_path):
    """What one process wanted once does not keep the folder emptier for ever."""
    root, most = tmp_path / "share", []
    one, two = (open_folder(root, capacity=256 * ON_DISK) for _ in range(2))
    turns = [by_hand(one), by_hand(two)]
    for cycle in range(120):
        await store(two, keys_of(60 if cycle < 20 else 0, f"flood{cycle}"))
        await store(one, keys_of(4, f"{cycle}"))
        for turn in (*turns, *turns):
            turn()
        most.append(stored_bytes(root))
    assert max(most[15:20]) < 0.92 * 256 * ON_DISK
    assert 0.93 * 256 * ON_DISK < max(most[60:]) <= 256 * ON_DISK
    await asyncio.gather(one.close(), two.close())


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
    await one.close()
    await two.close()


async def test_a_mount_that_frees_room_late_is_not_emptied_meanwhile(tmp_path, monkeypatch):
    """GlusterFS refuses stores for seconds after files were removed, CephFS for longer."""
    backend, root = open_folder(tmp_path / "share"), tmp_path / "share"
    assert await store_at_last(backend, keys_of(200))
    await backend.close()
    vfs, now_s, real = Vfs(), [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s[0])
    evictor = Evictor(vfs, str(root), Records(vfs, str(root), "test"), 1 << 30, print)
    evictor.begin(None, is_new=False)
    host = HostRecord(
        host="h", pid=1, capacity_bytes=1 << 30, stored_bytes=0, limit_bytes=0,
        largest_bytes=ON_DISK, out_of_space=0,
    )  # fmt: skip

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


async def test_failures_while_a_slow_mount_is_still_evicted_evict_no_more(tmp_path, monkeypatch):
    """One turn removes three files, and 3 % of them are seven."""
    backend, root = open_folder(tmp_path / "share"), tmp_path / "share"
    assert await store_at_last(backend, keys_of(200))
    await backend.close()
    vfs, now_s, real = Vfs(), 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + now_s)

    def unlink(path, of=vfs.unlink):
        nonlocal now_s
        now_s += 0.4
        of(path)

    vfs.unlink = unlink
    evictor = Evictor(vfs, str(root), Records(vfs, str(root), "test"), 1 << 30, print)
    evictor.begin(None, is_new=False)
    for _ in range(20):
        evictor.turn({}, is_full=True)
    assert stored_bytes(root) // ON_DISK == 193
