"""The shared figure stays with the files, whatever people, faults and file systems do meanwhile."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import time

import pytest
from disk_parts import ON_DISK, SIZE, chunk_bytes, full, open_disk, stored, until, write

from kvoffload.backends.admin import Check
from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.admin import survey, verify
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.paths import shard_of
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import BesideVfs, FailingVfs, HookedVfs, StuckVfs, calls_on, kind_of

FULL = full(8)


@pytest.mark.parametrize("what", ["files", "folders"])
async def test_chunks_that_a_person_removed_are_no_longer_counted(tmp_path, monkeypatch, what):
    monkeypatch.setattr(disk_housekeeper, "_ALONE_SCAN_S", 0.2)
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 0.1)
    backend = open_disk(tmp_path, **FULL)
    keys, new = keys_of(8), keys_of(8, "new")
    assert await write(backend, keys) == [True] * 8
    for path in tmp_path.glob("*/??/*"):
        path.unlink()
        if what == "folders":
            path.parent.rmdir()
    assert await until(lambda: not any(map(backend.holds, keys)))
    assert await until(lambda: backend._store.root.quota.refresh() == 0)
    assert await write(backend, new) == [True] * 8


async def test_a_root_that_was_emptied_while_nothing_used_it_is_counted_anew(tmp_path):
    await stored(tmp_path, keys_of(5), **FULL)
    for path in tmp_path.glob("[!.]*"):  # as a shell's * names them
        shutil.rmtree(path)
    backend = open_disk(tmp_path, **FULL)
    assert backend._store.root.quota.refresh() == 0
    new = keys_of(8, "new")
    assert await write(backend, new) == [True] * 8
    assert all(map(backend.holds, new))


async def test_files_that_could_not_be_removed_for_a_while_leave_later(tmp_path):
    vfs = FailingVfs(0, errno.EIO, sticky=True, when=calls_on("chunk", "unlink", "take"))
    backend = open_disk(tmp_path, vfs=vfs, **FULL)
    assert await write(backend, keys_of(8)) == [True] * 8
    vfs.nth = 1
    assert await write(backend, keys_of(1, "during")) == [False]
    vfs.heal()
    for _ in range(1000):
        if await write(backend, keys_of(1, "after")) == [True]:
            break
        await asyncio.sleep(0.02)
    assert backend.holds(keys_of(1, "after")[0])


async def test_a_figure_above_the_capacity_with_nothing_to_evict_is_counted_anew(tmp_path):
    backend = open_disk(tmp_path, **FULL)
    backend._store.root.quota.release(-9 * ON_DISK)  # as a process killed before it wrote
    await write(backend, keys_of(1))  # refused, unless the count was quicker
    assert await until(lambda: backend._store.root.quota.refresh() == chunk_bytes(tmp_path), 20.0)
    assert await write(backend, keys_of(8)) == [True] * 8


DYING = """
import asyncio, sys
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.config import ByteSize
from tests.support.vfs import DeadlyVfs
options = DiskOptions(root=sys.argv[1], min_free=ByteSize(0))
backend = DiskBackend(options, "disk", vfs=DeadlyVfs("rename:snapshot:before"))
backend.wait_ready(60)
asyncio.run(backend.close())
"""


async def test_what_the_dead_wrote_uncounted_is_not_taken_off_the_figure(tmp_path):
    owner = open_disk(tmp_path)
    assert await write(owner, keys_of(4)) == [True] * 4
    command = [sys.executable, "-c", DYING, str(tmp_path)]
    dying = await asyncio.to_thread(subprocess.run, command, check=False)
    assert dying.returncode == -9
    assert await until(lambda: len(os.listdir(tmp_path / ".writers")) == 1)
    assert owner._store.root.quota.refresh() == chunk_bytes(tmp_path)


class SlowVfs(HookedVfs):
    """Calls of one kind on shards or chunks take their time."""

    slow, seconds = "", 0.0

    def around(self, call, path, perform):
        if call == self.slow and kind_of(path) in {"shard", "chunk"}:
            time.sleep(self.seconds)
        return perform()


async def test_a_look_does_not_find_what_left_while_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    vfs = SlowVfs()
    backend = open_disk(tmp_path, vfs=vfs, **FULL)
    for i in range(20):
        await write(backend, keys_of(8, f"{i}"))
    vfs.slow, vfs.seconds = "listdir", 0.005
    scanner = Scanner(backend._store)
    looking = asyncio.ensure_future(asyncio.to_thread(scanner.scan, full=True))
    turn = 0
    while not looking.done():
        assert await write(backend, keys_of(1, f"during{turn}")) == [True]
        turn += 1
    vfs.slow = ""
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 8 * ON_DISK
    there = {path.name for path in tmp_path.glob("*/??/*")}
    assert {name[2:].hex() for name, _ in backend._store.index.sizes()} == there


async def test_eviction_in_the_background_does_not_hold_up_stores(tmp_path):
    vfs = SlowVfs()
    vfs.slow, vfs.seconds = "unlink", 0.06
    marks = {"high_watermark": 0.8, "low_watermark": 0.2}
    backend = open_disk(tmp_path, vfs=vfs, capacity=ByteSize(100 * ON_DISK), **marks)
    assert all(await write(backend, keys_of(81)))
    assert await until(lambda: backend.counters().get("evicted"))
    assert await write(backend, keys_of(4, "more")) == [True] * 4
    assert backend.counters()["evicted"] < 30  # of some sixty


class LateBlocks(HookedVfs):
    """As ZFS: the blocks of a file just written are not known yet."""

    def fstat(self, fd):
        facts = super().fstat(fd)
        if kind_of(self._paths[fd]) == "temporary":
            return NamespaceInfo(facts)
        return facts


class NamespaceInfo:
    st_blocks = 1

    def __init__(self, facts):
        self.st_size = facts.st_size


class GrowingVfs(HookedVfs):
    """As ext4 in fragmented space: a file takes up one block more once it is written back."""

    def lstat(self, path):
        facts = super().lstat(path)
        if kind_of(path) != "chunk":
            return facts
        grown = list(facts)
        return os.stat_result(grown, {"st_blocks": facts.st_blocks + 8})


@pytest.mark.parametrize("vfs", [LateBlocks, GrowingVfs])
async def test_files_whose_blocks_change_after_their_writes_keep_the_figure_right(tmp_path, vfs):
    backend = open_disk(tmp_path, vfs=vfs(), **FULL)
    for i in range(60):
        assert await write(backend, keys_of(1, f"{i}")) == [True]
    assert chunk_bytes(tmp_path) == backend._store.root.quota.refresh() == 8 * ON_DISK


async def test_with_fsync_a_chunk_stored_without_is_synced_before_it_is_promised(tmp_path):
    await stored(tmp_path, keys_of(1))
    vfs = FailingVfs(0, errno.EIO, when=lambda call, path: call == "fsync")
    backend = open_disk(tmp_path, vfs=vfs, durability="fsync")
    before = vfs.calls
    assert await write(backend, keys_of(1)) == [True]
    assert vfs.calls == before + 2  # the file, its folder
    vfs.nth = vfs.calls + 1
    assert await write(backend, keys_of(1)) == [False]
    assert not backend.holds(keys_of(1)[0])


async def test_closing_waits_neither_for_a_look_nor_for_a_hung_disk(tmp_path):
    backend = open_disk(tmp_path)
    for i in range(20):
        await write(backend, keys_of(20, f"{i}"))
    await backend.close()
    stuck = StuckVfs(lambda call, path: call == "listdir" and kind_of(path) == "shard")
    options = DiskOptions(root=str(tmp_path), min_free=ByteSize(0), stall_s=0.1)
    backend = DiskBackend(options, "disk", vfs=stuck)
    assert await until(lambda: stuck.stuck)
    await asyncio.wait_for(backend.close(), 10)
    stuck.release()
    assert await until(lambda: not backend._housekeeper._thread.is_alive())
    assert stuck.stuck == 1


class CountingVfs(HookedVfs):
    calls = 0

    def lstat(self, path):
        self.calls += kind_of(path) == "shard"
        return super().lstat(path)


async def test_folders_of_removed_namespaces_are_not_looked_into(tmp_path):
    vfs = CountingVfs()
    owner = open_disk(tmp_path, vfs=vfs)
    await write(owner, keys_of(1))
    for i in range(5):
        await stored(tmp_path, keys_of(1), f"generation {i}")
        await asyncio.to_thread(Scanner(owner._store).scan, full=False)
        await owner.purge([f"generation {i}"])
    scanner = Scanner(owner._store)
    scanner.scan(full=True)
    before = vfs.calls
    scanner.scan(full=True)
    assert vfs.calls - before <= 256


async def test_a_figure_gone_astray_is_mended_although_another_never_stops_storing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(disk_housekeeper, "_RECOUNT_S", 0.2)
    owner, other = open_disk(tmp_path), open_disk(tmp_path)
    for i in range(5):
        assert all(await write(owner, keys_of(60, f"{i}")))
    other._store.root.quota.release(-600 * ON_DISK)
    turn = 0
    while (other._store.root.quota.refresh() or 0) > chunk_bytes(tmp_path) + 200 * ON_DISK:
        keys = keys_of(1, f"turn {turn % 100}")
        await write(other, keys)
        await other.remove(keys)
        turn += 1
        assert turn < 10_000


async def test_the_first_chunk_stored_while_an_empty_folder_is_looked_at_is_counted(
    tmp_path, monkeypatch
):
    owner = open_disk(tmp_path)
    (key,) = keys_of(1)

    def store_then(self, in_use):  # after the folders were listed
        assert owner._store.store(key, filled([key], SIZE)[0])

    monkeypatch.setattr(Scanner, "_remove_abandoned", store_then)
    Scanner(owner._store).scan(full=True)
    assert owner._store.root.quota.refresh() == chunk_bytes(tmp_path) > 0


async def test_a_damaged_file_removed_during_a_scan_leaves_the_others_counted(tmp_path):
    """It goes between the listing of the folder and the look at the file."""
    vfs = BesideVfs()
    owner = open_disk(tmp_path, vfs=vfs)
    await write(owner, keys_of(1))
    for number in range(3):
        (tmp_path / ".quarantine" / f"{number}-00").write_bytes(bytes(4096))
    vfs.on("listdir:quarantine:after", (tmp_path / ".quarantine" / "0-00").unlink)
    Scanner(owner._store).scan(full=True)
    assert not vfs.acts
    kept = sum(p.stat().st_blocks * 512 for p in (tmp_path / ".quarantine").iterdir())
    assert owner._store.root.quota.refresh() == chunk_bytes(tmp_path) + kept
    assert kept == 2 * 4096


def test_what_cannot_be_looked_at_does_not_end_inspect_and_is_no_success_for_verify(tmp_path):
    asyncio.run(stored(tmp_path, keys_of(3)))
    (folder,) = tmp_path.glob("?" * 64)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    failing = FailingVfs(1, errno.EIO, sticky=True, when=calls_on("shard", "listdir"))
    report = verify(DiskInspector(str(tmp_path), failing), Check(repair=True)).figures
    assert report["chunks"] == 0
    assert report["reasons"] == {"io_EIO": 256}
    read_only = FailingVfs(1, errno.EROFS, sticky=True, when=calls_on("ledger", "open"))
    found = survey(DiskInspector(str(tmp_path), read_only))
    assert found.figures["ledger_bytes"] is None
    assert found.held[0].chunks == 3


async def test_what_is_stored_while_a_purge_goes_on_stays(tmp_path, monkeypatch):
    first, *_, last = sorted(keys_of(40), key=shard_of)
    backend = open_disk(tmp_path)
    assert await write(backend, [first]) == [True]
    discard, (chunk,) = backend._store.discard, filled([last], SIZE)

    def store_another(name, reason):
        assert backend._store.store(last, chunk)
        return discard(name, reason)

    monkeypatch.setattr(backend._store, "discard", store_another)
    assert await backend.purge([backend.namespace]) == 1
    assert await backend.read([first, last], slots(2, SIZE)) == [False, True]
