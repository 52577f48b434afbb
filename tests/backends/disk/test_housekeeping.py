"""The housekeeping thread: its pace, its snapshots, and its log after a failure."""

import asyncio
import errno
import json
import logging
import os
import resource
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
from disk_parts import ON_DISK, SIZE, open_disk, remove_at_once, stored, until, write

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.paths import SNAPSHOT, WRITERS, shard_of
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.snapshot import load
from kvoffload.backends.disk.space import Space
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import namespace_digest
from kvoffload.config import ByteSize, human_bytes
from kvoffload.testing.backends import keys_of, slots
from tests.support.vfs import FailingVfs, HookedVfs, calls_on, kind_of

TICK_S = 0.02


class CountingVfs(HookedVfs):
    """Counts the housekeeper's rounds, its looks at the last shard, and the shards it lists."""

    rounds = looks = listings = 0

    def around(self, call, path, perform):
        self.rounds += call == "listdir" and kind_of(path) == "writers"
        self.looks += call == "lstat" and path.endswith("/ff")
        self.listings += call == "listdir" and kind_of(path) == "shard"
        return perform()

    async def more_looks(self, number):
        goal = self.looks + number
        assert await until(lambda: self.looks >= goal)

    async def more_rounds(self, number):
        goal = self.rounds + number
        assert await until(lambda: self.rounds >= goal)


@pytest.fixture
def fast(monkeypatch):
    """Run a round of the housekeeper fifty times a second."""
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", TICK_S)


def snapshot_times(root):
    return [path.stat().st_mtime_ns for path in root.glob(f"*/{SNAPSHOT}")]


def messages(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


# ---- pace ----------------------------------------------------------------------------------------


async def test_a_store_wakes_the_housekeeper_once_and_it_sleeps_again(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    backend = open_disk(tmp_path)
    clock = time.pthread_getcpuclockid(backend._housekeeper._thread.ident)
    assert await write(backend, keys_of(1)) == [True]
    await asyncio.sleep(0.1)
    began_s = time.clock_gettime(clock)
    await asyncio.sleep(0.5)
    assert time.clock_gettime(clock) - began_s < 0.05


async def test_a_store_above_the_high_watermark_is_followed_by_eviction_at_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    marks = {"high_watermark": 0.5, "low_watermark": 0.25}
    backend = open_disk(tmp_path, capacity=ByteSize(8 * ON_DISK), **marks)
    other = open_disk(tmp_path, capacity=ByteSize(8 * ON_DISK), **marks)
    assert await write(backend, keys_of(4)) == [True] * 4
    await asyncio.sleep(0.1)
    assert backend.usage().chunks == 4  # at the watermark, not above it
    assert await write(other, keys_of(1, "other")) == [True]
    assert await write(backend, keys_of(1, "more")) == [True]
    assert await until(lambda: backend.usage().chunks == 1)
    assert backend.usage().resident_bytes == 2 * ON_DISK
    assert backend.counters() == {"evicted": 4, "overwritten": 1}


@pytest.mark.usefixtures("fast")
async def test_the_only_engine_scans_the_folders_once_a_minute(tmp_path):
    vfs = CountingVfs()
    backend = open_disk(tmp_path, vfs=vfs)
    assert await write(backend, keys_of(4)) == [True] * 4
    await vfs.more_rounds(5)
    before = vfs.listings
    await vfs.more_rounds(10)
    assert vfs.listings == before


@pytest.mark.usefixtures("fast")
async def test_folders_are_scanned_often_while_another_engine_stores(tmp_path):
    vfs = CountingVfs()
    backend, other = open_disk(tmp_path, vfs=vfs), open_disk(tmp_path)
    for i in range(2):
        assert await write(other, keys_of(1, f"{i}")) == [True]
        assert await until(lambda i=i: backend.holds(keys_of(1, f"{i}")[0]))
    for shard in tmp_path.glob("*/??"):
        os.utime(shard, (0, 0))  # a change of long ago
    await vfs.more_looks(3)
    before = vfs.listings
    await vfs.more_looks(3)
    assert vfs.listings == before  # unchanged folders are not listed again
    assert await write(other, keys_of(1, "last")) == [True]
    assert await until(lambda: backend.holds(keys_of(1, "last")[0]))


class CoarseVfs(HookedVfs):
    """A file system whose modification times have a resolution of a second."""

    def lstat(self, path):
        facts = super().lstat(path)
        if kind_of(path) != "shard":
            return facts
        whole_ns = facts.st_mtime_ns // 10**9 * 10**9
        kept = {name: getattr(facts, name) for name in ("st_mode", "st_uid", "st_gid")}
        return SimpleNamespace(**kept, st_mtime_ns=whole_ns)  # a folder above may have two letters


@pytest.mark.usefixtures("fast")
async def test_a_second_change_of_a_folder_within_one_step_of_its_clock_is_noticed(tmp_path):
    by_shard = defaultdict(list)
    for key in keys_of(600):
        by_shard[shard_of(key)].append(key)
    one, two = max(by_shard.values(), key=len)[:2]
    backend, other = open_disk(tmp_path, vfs=CoarseVfs()), open_disk(tmp_path)
    for key in (one, two):
        assert await write(other, [key]) == [True]
        assert await until(lambda key=key: backend.holds(key))


# ---- snapshots -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast")
async def test_a_running_engine_writes_no_snapshot_before_its_time(tmp_path):
    vfs = CountingVfs()
    backend = open_disk(tmp_path, vfs=vfs)
    assert await write(backend, keys_of(2)) == [True] * 2
    await vfs.more_rounds(5)
    assert snapshot_times(tmp_path) == []
    await backend.close()
    assert len(snapshot_times(tmp_path)) == 1


@pytest.mark.usefixtures("fast")
async def test_a_running_engine_writes_a_snapshot_for_each_period_with_a_change(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_housekeeper, "_SNAPSHOT_S", 0.2)
    vfs = CountingVfs()
    backend = open_disk(tmp_path, vfs=vfs)
    await asyncio.sleep(0.3)
    assert snapshot_times(tmp_path) == []  # nothing has changed
    for turn in range(2):
        before = snapshot_times(tmp_path)
        assert await write(backend, keys_of(1, f"{turn}")) == [True]
        assert await until(lambda before=before: snapshot_times(tmp_path) != before)
    before = snapshot_times(tmp_path)
    await asyncio.sleep(0.3)
    await vfs.more_rounds(3)
    assert snapshot_times(tmp_path) == before


@pytest.mark.usefixtures("fast")
async def test_snapshots_of_an_engine_that_always_stores_are_a_period_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_SNAPSHOT_S", 0.5)
    began_s, turn, seen = time.monotonic(), 0, set()
    backend = open_disk(tmp_path)
    while len(seen) < 2:
        assert time.monotonic() - began_s < 60
        assert await write(backend, keys_of(1, f"{turn}")) == [True]
        seen.update(snapshot_times(tmp_path))
        turn += 1
        await asyncio.sleep(0.01)
    assert time.monotonic() - began_s > 2 * 0.5


async def test_a_snapshot_holds_the_chunks_of_its_own_namespace_alone(tmp_path):
    owner, other = open_disk(tmp_path, "one"), open_disk(tmp_path, "two")
    assert await write(owner, keys_of(2, "one")) == [True] * 2
    assert await write(other, keys_of(3, "two")) == [True] * 3
    assert await until(lambda: owner.usage().chunks == 5)
    await owner.close()
    path = f"{tmp_path}/{namespace_digest('one').hex()}/{SNAPSHOT}"
    assert sorted(load(Vfs(), path)) == sorted((key, ON_DISK) for key in keys_of(2, "one"))


async def test_a_snapshot_that_cannot_be_written_is_counted_and_leaves_no_file(tmp_path, caplog):
    vfs = FailingVfs(1, errno.ENOSPC, sticky=True, when=calls_on("snapshot", "rename"))
    backend = open_disk(tmp_path, vfs=vfs)
    assert await write(backend, keys_of(1)) == [True]
    await backend.close()
    assert backend.counters() == {"snapshot_failed": 1}
    (record,) = messages(caplog, "no snapshot")
    assert str(tmp_path) in record.getMessage()
    assert snapshot_times(tmp_path) == []
    assert os.listdir(tmp_path / WRITERS) == []


# ---- steps that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no device"), RuntimeError("a bug")])
@pytest.mark.usefixtures("fast")
async def test_a_step_that_fails_is_counted_logged_and_tried_again(
    tmp_path, monkeypatch, caplog, error
):
    marks = {"high_watermark": 0.5, "low_watermark": 0.25}
    backend = open_disk(tmp_path, capacity=ByteSize(8 * ON_DISK), **marks)
    other = open_disk(tmp_path, capacity=ByteSize(8 * ON_DISK), **marks)
    failures = [error, error]
    real = Space.evict_one

    def evict_one(space):
        if failures:
            raise failures.pop()
        return real(space)

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(Space, "evict_one", evict_one)
        assert await write(backend, keys_of(4)) == [True] * 4
        assert await write(other, keys_of(1, "other")) == [True]
        assert await until(lambda: backend.counters().get("evicted") == 3)
    assert backend.usage().resident_bytes == 2 * ON_DISK
    assert backend.counters() == {"housekeeping_failed": 2, "evicted": 3}
    await other.close()
    records = messages(caplog, "housekeeping failed")
    assert all(str(tmp_path) in record.getMessage() for record in records)
    # One line a minute; an error of the program has its traceback.
    is_own = isinstance(error, RuntimeError)
    assert [bool(record.exc_info) for record in records] == [is_own]
    assert str(error) in records[0].getMessage()


@pytest.mark.usefixtures("fast")
async def test_a_failure_that_lasts_is_one_line_and_not_one_each_second(tmp_path, caplog):
    backend = open_disk(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert await until(lambda: backend.counters().get("housekeeping_failed", 0) > 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (record,) = messages(caplog, "housekeeping failed")
    assert "Too many open files" in record.getMessage()


@pytest.mark.usefixtures("fast")
async def test_a_scan_that_fails_is_not_tried_again_each_second(tmp_path, monkeypatch):
    """A policy may raise at every file: a full scan reads the facts of all of them."""
    scans = []

    def scan(scanner, **how):
        scans.append(how)
        raise RuntimeError("a policy's bug")

    monkeypatch.setattr(Scanner, "scan", scan)
    vfs = CountingVfs()
    open_disk(tmp_path, vfs=vfs)
    assert await until(lambda: scans)
    await vfs.more_rounds(10)
    assert len(scans) == 1


async def test_folders_that_cannot_be_listed_are_counted_and_their_chunks_stay_known(
    tmp_path, caplog
):
    keys = keys_of(3)
    await stored(tmp_path, keys)
    vfs = FailingVfs(1, errno.EIO, sticky=True, when=calls_on("shard", "listdir"))
    backend = open_disk(tmp_path, vfs=vfs)
    assert backend.counters()["look_failed"] >= 3
    (said,) = messages(caplog, os.strerror(errno.EIO))
    assert "device" in said.getMessage()
    assert all(map(backend.holds, keys))
    assert await backend.read(keys, slots(3, SIZE)) == [True] * 3
    assert backend.usage().resident_bytes == 3 * ON_DISK


async def test_a_folder_put_in_order_is_logged_as_in_use_again(tmp_path, caplog):
    backend = open_disk(tmp_path / "kv")
    root = backend._store.root
    (tmp_path / "kv").chmod(0o777)
    before = backend.counters().get("remake_failed", 0)
    assert [root.repair(), root.repair()] == [False, False]
    assert backend.counters()["remake_failed"] >= before + 2
    refused = messages(caplog, "nothing is loaded or stored")
    assert [record.levelno for record in refused] == [logging.ERROR]  # logged once, counted always
    assert "chmod" in refused[0].getMessage()
    (tmp_path / "kv").chmod(0o700)
    assert [root.repair(), root.repair()] == [False, False]
    (allowed,) = messages(caplog, "in order again")
    assert str(tmp_path / "kv") in allowed.getMessage()
    assert root.repairs == 0


async def test_folders_that_cannot_be_made_again_are_counted_and_logged(tmp_path, caplog):
    vfs = FailingVfs(0, errno.ENOSPC, sticky=True, when=calls_on("namespace", "mkdir"))
    backend = open_disk(tmp_path / "store", vfs=vfs)
    assert await write(backend, keys_of(1)) == [True]
    vfs.nth = 1
    remove_at_once(tmp_path / "store")
    assert await until(lambda: messages(caplog, "removed folders cannot be made again"))
    assert backend.counters()["remake_failed"]
    assert await write(backend, keys_of(8, "during")) == [False] * 8
    (said,) = messages(caplog, "removed folders cannot be made again")
    assert "make space" in said.getMessage()
    assert "remade" not in backend.counters()
    vfs.heal()
    assert await until(lambda: messages(caplog, "were made again"))
    (record,) = messages(caplog, "were made again")
    assert backend.counters()["remade"] == 1
    assert str(tmp_path / "store") in record.getMessage()
    assert await write(backend, keys_of(1, "after")) == [True]


@pytest.mark.parametrize("facts", [{"model": "m"}, {}])
async def test_a_manifest_that_was_removed_with_its_folder_has_the_facts_again(tmp_path, facts):
    backend = open_disk(tmp_path / "store")
    if facts:
        await backend.describe(facts)
    assert await write(backend, keys_of(1)) == [True]

    def manifest():
        (path,) = (tmp_path / "store").glob("*/manifest.json")
        return json.loads(path.read_text())

    first = manifest()
    assert (first["namespace"], first["facts"]) == ("disk", facts)
    remove_at_once(tmp_path / "store")
    assert await until(lambda: backend.counters().get("remade"))
    assert await write(backend, keys_of(1, "after")) == [True]
    assert manifest() == first


# ---- what the log says of other namespaces -------------------------------------------------------


async def test_the_start_says_how_much_of_the_root_other_namespaces_hold(tmp_path, caplog):
    """After an upgrade that changes the namespace, the folder is full and nothing is found."""
    caplog.set_level(logging.INFO)
    await stored(tmp_path, keys_of(3), "ab" * 32)
    for chunks in (0, 1):
        caplog.clear()
        new = open_disk(tmp_path, namespace="cd" * 32)
        assert await until(lambda: messages(caplog, "of other ones"))
        (said,) = messages(caplog, "of other ones")
        assert said.args[1:2] + said.args[3:] == (
            human_bytes(chunks * ON_DISK),
            human_bytes(3 * ON_DISK),
        )
        assert await write(new, keys_of(1)) == [True]
        await new.close()


async def test_a_root_of_one_namespace_is_not_spoken_of(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        await stored(tmp_path, keys_of(1))
    assert not messages(caplog, "of other ones")
