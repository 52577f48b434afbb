"""A process that is stopped, slow, or cannot read the lease: another one evicts if it must."""

import asyncio
import errno
import os
import threading
import time
from collections import Counter

import pytest
from disk_parts import ON_DISK, until
from folder_parts import open_folder, path_of, store, store_at_last, stored_bytes

from kvoffload.backends.disk.root_checks import remedy_of
from kvoffload.backends.folder import clock, evictor, upkeep
from kvoffload.backends.folder.places import HOSTS, LEASE, record_of
from kvoffload.testing.backends import keys_of
from tests.support.vfs import FailingVfs, StuckVfs

CAPACITY = 64 * ON_DISK


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    times = {"TURN_S": 0.02, "LEASE_S": 0.3, "_RENEW_S": 0.1, "_PAUSE_S": 0.01, "DEAD_S": 0.6}
    for name, seconds in {**times, "_LONG_PAUSE_S": 0.01}.items():
        monkeypatch.setattr(upkeep, name, seconds)
    monkeypatch.setattr(evictor, "DEAD_S", 0.6)
    monkeypatch.setattr(evictor, "SURELY_S", 0.1)


async def evictions(backend, *others):
    """Store until some chunks were evicted, by this process or another one."""
    for turn in range(3000):
        if sum(each.counters().get("evicted", 0) for each in (backend, *others)) > 8:
            return True
        await store(backend, keys_of(2, f"more{turn}"))
        await asyncio.sleep(0.01)
    return False


async def test_a_process_that_was_stopped_stores_nothing_of_what_was_given_away(tmp_path):
    one, two = (open_folder(tmp_path / "share", capacity=CAPACITY) for _ in range(2))
    assert await store(one, keys_of(2)) == [True] * 2
    assert await until(lambda: one._housekeeper.room.limit_bytes > 12 * ON_DISK)
    one._housekeeper._turn = lambda: None  # stopped, as by SIGSTOP, or in a call that hangs
    assert await until(lambda: two.usage().gauges["evictor"] and two.usage().gauges["hosts"] == 1)
    assert await evictions(two)
    await store(one, keys_of(60, "late"))
    assert stored_bytes(tmp_path / "share") <= CAPACITY
    del one._housekeeper._turn
    assert await store_at_last(one, keys_of(2, "again"))


async def test_a_process_whose_record_was_removed_as_it_wrote_it_says_why(tmp_path, caplog):
    """Its mount hung between the write and the look at the file's time."""
    vfs, root = StuckVfs(lambda call, path: False), tmp_path / "share"
    one = open_folder(root, vfs=vfs, capacity=CAPACITY)
    record = record_of(one._housekeeper._token)
    vfs.when = lambda call, path: call == "lstat" and path.endswith(record)
    assert await until(lambda: vfs.stuck)
    two = open_folder(root, capacity=CAPACITY)
    assert await until(lambda: not (root / record).exists())
    vfs.release()
    assert await until(lambda: two.usage().gauges["hosts"] == 2)
    said = "took this one for dead"  # once the record is written, which the other process may see
    assert await until(lambda: said in caplog.text)
    told = [each.getMessage() for each in caplog.records]
    assert [text for text in told if said in text and "hung" in text]
    assert not [text for text in told if "housekeeping failed" in text]
    assert "housekeeping_failed" not in one.counters()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
async def test_a_process_that_cannot_read_the_lease_says_it_once_and_tells_its_record(
    tmp_path, caplog, error
):
    vfs = FailingVfs(0, error, sticky=True, when=lambda call, path: path.endswith(LEASE))
    bad = open_folder(tmp_path / "share", vfs=vfs, capacity=CAPACITY)
    good = open_folder(tmp_path / "share", capacity=CAPACITY)
    assert await store(bad, keys_of(4)) == [True] * 4
    assert await until(lambda: bad._housekeeper.room.limit_bytes > 12 * ON_DISK)
    vfs.nth = vfs.calls + 1
    assert await until(lambda: good.usage().gauges["evictor"])
    assert await evictions(good)
    assert good.usage().gauges["hosts"] == 2
    assert bad.usage().gauges["evictor"] == 0
    assert stored_bytes(tmp_path / "share") <= CAPACITY
    assert bad.counters()["lease_unusable"] > 5
    assert bad.counters().get("housekeeping_failed", 0) <= 1  # of the turn in which it began
    told = [each.getMessage() for each in caplog.records]
    told = [each for each in told if f"{LEASE} cannot be used" in each]
    assert len(told) == 1
    assert told[0].endswith(f"; {remedy_of(OSError(error, ''))}")
    vfs.heal()
    assert await store_at_last(bad, keys_of(2, "again"))


async def test_a_process_stores_on_while_the_lease_cannot_be_read_for_a_moment(
    tmp_path, monkeypatch, caplog
):
    vfs = FailingVfs(0, errno.ESTALE, sticky=True, when=lambda call, path: path.endswith(LEASE))
    monkeypatch.setattr(upkeep, "LEASE_S", 3600.0)
    for module in (upkeep, evictor):  # a turn of a busy machine takes longer than 0.6 s
        monkeypatch.setattr(module, "DEAD_S", 4.0)
    good = open_folder(tmp_path / "share", capacity=CAPACITY)
    bad = open_folder(tmp_path / "share", vfs=vfs, capacity=CAPACITY)
    assert await until(lambda: bad._housekeeper.room.limit_bytes > 12 * ON_DISK)
    vfs.nth = vfs.calls + 1
    until_s = clock.now_s() + 5.0
    assert await until(lambda: clock.now_s() > until_s, 60)
    assert bad.counters()["lease_unusable"] > 1
    assert await store(bad, keys_of(12)) == [True] * 12
    assert caplog.records == []  # GlusterFS answers so while the evictor writes a lease
    assert await until(lambda: good.usage().resident_bytes == 12 * ON_DISK)


async def test_an_evictor_that_cannot_read_its_lease_once_makes_no_new_listing(tmp_path):
    """No other process could take it meanwhile, so what it knows of the files is still true."""
    vfs = FailingVfs(0, errno.EIO, when=lambda call, path: call == "open" and path.endswith(LEASE))
    backend = open_folder(tmp_path / "share", vfs=vfs, capacity=CAPACITY)
    assert await evictions(backend)
    evictor, keeper = backend._housekeeper._evictor, backend._housekeeper
    assert await until(lambda: evictor._scan is None and evictor._goal_bytes is None)
    scans = evictor.scans
    assert len(evictor._oldest) > 16
    vfs.calls, vfs.nth = 0, 1
    keeper.room._wake()
    assert await until(lambda: vfs.calls > 2 and keeper.is_evictor)
    assert backend.counters()["lease_unusable"] == 1
    assert evictor.scans == scans
    assert len(evictor._oldest) > 8  # an eviction may have gone on meanwhile


async def test_a_failure_that_lasts_is_said_once_with_its_remedy(tmp_path, caplog):
    vfs = FailingVfs(0, errno.EIO, sticky=True, when=lambda call, path: f"{HOSTS}/" in path)
    backend = open_folder(tmp_path / "share", vfs=vfs)
    vfs.nth = vfs.calls + 1
    assert await until(lambda: backend.counters().get("housekeeping_failed", 0) > 5)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 1
    assert told[0].endswith("; see whether its device or server is well, then mount it again")


async def test_a_process_that_comes_back_costs_no_chunk(tmp_path, monkeypatch):
    """Its record tells all that it ever stored, which a scan counted when it seemed dead."""
    monkeypatch.setattr(upkeep, "LEASE_S", 60.0)  # the first one evicts until the end
    vfs, root = StuckVfs(lambda call, path: False), tmp_path / "share"
    two = open_folder(root, capacity=CAPACITY)
    one = open_folder(root, vfs=vfs, capacity=CAPACITY)
    assert await evictions(one, two)
    vfs.when = lambda call, path: call == "rename" and f"/{HOSTS}/" in path
    one._housekeeper.room._wake()
    assert await until(lambda: vfs.stuck and two.usage().gauges["hosts"] == 1)
    assert await until(lambda: not two._housekeeper._evictor.unsure_bytes)
    stored = stored_bytes(root)
    assert stored > CAPACITY // 2
    vfs.release()
    assert await until(lambda: two.usage().gauges["hosts"] == 2)
    assert await store_at_last(one, keys_of(2, "again"))
    await asyncio.sleep(0.2)
    assert stored_bytes(root) >= stored - CAPACITY // 8


async def test_a_record_that_a_listing_misses_costs_no_chunk(tmp_path, monkeypatch):
    """GlusterFS leaves a file out that is replaced just then."""
    monkeypatch.setattr(upkeep, "LEASE_S", 60.0)  # the first one evicts until the end
    root = tmp_path / "share"
    two, _ = (open_folder(root, capacity=CAPACITY) for _ in range(2))
    assert await evictions(two)
    records, evicted = two._records, two.counters()["evicted"]
    hosts, resident, missed = records.hosts, two.usage().resident_bytes, Counter()

    def listed():
        missed["turns"] += 1
        return {} if missed["turns"] % 2 else hosts()

    records.hosts = listed
    two._housekeeper._evictor.unsure_bytes = 1  # so that a scan begins
    for turn in range(20):
        two._housekeeper.room._wake()
        assert await until(lambda turn=turn: missed["turns"] > turn)
    assert two.usage().gauges["hosts"] == 2
    # A scan that misses a record as it begins counts so much more for what it does not know.
    assert two.usage().resident_bytes <= resident + two._housekeeper._evictor._of_newcomer
    assert two.counters()["evicted"] <= evicted + 8


async def test_an_unreadable_record_of_one_process_keeps_others_from_nothing(tmp_path):
    bad = tmp_path / "share" / record_of("0123456789abcdef")
    vfs = FailingVfs(0, errno.EIO, sticky=True, when=lambda call, path: path == str(bad))
    backend = open_folder(tmp_path / "share", vfs=vfs, capacity=CAPACITY)
    bad.write_bytes(b"{}")
    vfs.nth = 1
    assert await evictions(backend)
    assert "housekeeping_failed" not in backend.counters()


@pytest.mark.parametrize(("call", "name"), [("listdir", HOSTS), ("rename", LEASE)])
async def test_an_evictor_that_hung_in_its_turn_keeps_no_old_count(tmp_path, call, name):
    """Meanwhile another one evicts, and counts processes that the first one never met."""
    vfs, root = StuckVfs(lambda call, path: False), tmp_path / "share"
    one = open_folder(root, vfs=vfs, capacity=CAPACITY)
    assert await store(one, keys_of(2)) == [True] * 2
    two = open_folder(root, capacity=CAPACITY)
    assert await until(lambda: one.usage().gauges["hosts"] == 2)
    vfs.when = lambda made, path: made == call and path.endswith(name)
    one._housekeeper.room._wake()
    assert await until(lambda: vfs.stuck and two.usage().gauges["evictor"])
    three = open_folder(root, capacity=CAPACITY)
    assert await evictions(three, two)  # which of them, a busy machine decides
    await three.close()  # its record goes, once it is counted
    scans = one._housekeeper._evictor.scans
    vfs.release()
    assert await until(
        lambda: one._housekeeper._evictor.scans > scans or not one.usage().gauges["evictor"]
    )
    evicting = one if one.usage().gauges["evictor"] else two
    assert await until(lambda: (evicting.usage().resident_bytes or 0) >= stored_bytes(root))


async def test_times_on_a_slow_mount_are_renewed_in_many_turns(tmp_path, monkeypatch):
    """All in one turn took longer than a lease lasts, and longer than a record counts as alive."""
    backend, keys, slept = open_folder(tmp_path / "share"), keys_of(40), [0.0]
    keeper, real, touch = backend._housekeeper, time.monotonic, os.utime
    assert await store_at_last(backend, keys)
    keeper.stop()
    assert await asyncio.to_thread(keeper.join, 60)  # the turns are this test's
    paths = []

    def slow(path, **how):
        slept[0] += 0.15
        paths.append(path)
        touch(path, **how)

    monkeypatch.setattr(os, "utime", slow)
    monkeypatch.setattr(time, "monotonic", lambda: real() + slept[0])
    for key in keys:
        backend._known.forget(key)
        backend._known.used(key, 3601.0)
    for turn in range(1, 41):
        began_s = slept[0]
        keeper._renew_times()
        assert slept[0] - began_s < 0.5
        assert len(paths) >= min(turn, 40)
    assert backend.counters()["time_renewed"] == len(set(paths)) == 40


async def test_a_host_that_slept_stores_nothing_of_what_was_given_away(tmp_path, monkeypatch):
    """While it sleeps the monotonic clock stands still, and others take its room and its lease."""
    backend, real = open_folder(tmp_path / "share"), time.clock_gettime
    keeper = backend._housekeeper
    assert await store_at_last(backend, keys_of(2))
    turned = threading.Event()
    keeper._turn = turned.set  # of the moment in which it wakes
    assert await until(turned.is_set)  # one in progress would be told that the host is awake
    written_ns = path_of(tmp_path, keys_of(1)[0]).stat().st_mtime_ns
    slept_s = {time.CLOCK_BOOTTIME: 60.0}
    monkeypatch.setattr(time, "clock_gettime", lambda kind: real(kind) + slept_s.get(kind, 0.0))
    assert await store(backend, keys_of(2, "late")) == [False] * 2
    assert backend.counters()["refused_full"] == 2
    assert keeper._is_late  # so it publishes no count of before
    assert 59 < backend._records.age_s(written_ns) < 90
    del keeper._turn
    assert await store_at_last(backend, keys_of(2, "again"))
