"""Several processes on one folder: no wrong byte, one owner, the capacity kept."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time

import pytest
from disk_parts import allocated, chunk_bytes, open_disk, until

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.paths import MANIFEST, QUARANTINE, SNAPSHOT
from kvoffload.backends.disk.root import ABANDONED_S
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.header import namespace_digest
from kvoffload.config import ByteSize
from kvoffload.testing import payload_of
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.swarm import CAPACITY, ON_DISK, SIZE


async def write(backend, keys):
    return await backend.write(keys, filled(keys, SIZE))


@pytest.mark.usefixtures("form")
async def test_what_one_writes_the_other_comes_to_know(tmp_path):
    one, two = open_disk(tmp_path), open_disk(tmp_path)
    keys = keys_of(4)
    await write(one, keys)
    assert await two.contains(keys) == [True] * 4
    assert await until(lambda: all(two.holds(key) for key in keys))
    await one.remove(keys[:2])
    assert await until(lambda: not any(two.holds(key) for key in keys[:2]))
    assert {(r.key, r.reason) for r in two.take_removals()} == {(k, "vanished") for k in keys[:2]}


@pytest.mark.usefixtures("form")
async def test_only_one_evicts_and_the_next_takes_over_when_it_goes(tmp_path):
    settings = {"capacity": ByteSize(10 * ON_DISK), "high_watermark": 0.9, "low_watermark": 0.5}
    one, two = open_disk(tmp_path, **settings), open_disk(tmp_path, "another", **settings)
    assert [b._store.root.evictor.held for b in (one, two)] == [True, False]
    # The second may use free space, and the evictor makes room in all namespaces.
    assert await write(one, keys_of(5, "one")) == [True] * 5
    assert await write(two, keys_of(5, "two")) == [True] * 5
    assert await until(lambda: allocated(tmp_path) <= 7 * ON_DISK)
    assert await write(two, keys_of(2, "more")) == [True] * 2
    await one.close()
    assert await until(lambda: two._store.root.evictor.held)
    assert await until(lambda: (two._store.root.quota.refresh() or 0) > 0)
    for i in range(4):
        await write(two, keys_of(5, f"later{i}"))
        await asyncio.sleep(0.05)
    assert await until(lambda: two.counters().get("evicted"))
    assert allocated(tmp_path) <= 10 * ON_DISK + 8192


@pytest.mark.usefixtures("form")
async def test_the_next_takes_over_as_soon_as_it_needs_room(tmp_path, monkeypatch):
    """As after a renewal of weights: at the last tick, the store that left had not closed."""
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    settings = {"capacity": ByteSize(8 * ON_DISK), "high_watermark": 1.0, "low_watermark": 1.0}
    one = open_disk(tmp_path, **settings)
    assert await write(one, keys_of(8)) == [True] * 8
    two = open_disk(tmp_path, "another", **settings)
    assert await until(lambda: two._housekeeper._expire_at), "the first tick has ended"
    await one.close()
    await write(two, keys_of(1, "first"))
    assert await until(lambda: len(two._store.index) >= 8)
    assert await write(two, keys_of(2, "next")) == [True] * 2


@pytest.mark.usefixtures("form")
async def test_the_owner_sees_what_others_use(tmp_path):
    settings = {"capacity": ByteSize(8 * ON_DISK), "high_watermark": 1.0, "low_watermark": 1.0}
    owner = open_disk(tmp_path, **settings)
    keys = keys_of(8)
    for key in keys:
        await write(owner, [key])
    reader = open_disk(tmp_path, **settings)
    assert await until(lambda: owner._store.root.other_writers == 1)
    await asyncio.sleep(0.05)
    assert await reader.read(keys[:3], slots(3, SIZE)) == [True] * 3
    reader._store.record_use()
    assert await write(owner, keys_of(4, "new")) == [True] * 4
    assert [owner.holds(key) for key in keys] == [True] * 3 + [False] * 4 + [True]


async def test_a_process_long_alone_soon_sees_what_a_new_one_stores(tmp_path):
    alone = open_disk(tmp_path)
    housekeeper = alone._housekeeper
    assert await until(lambda: housekeeper._scan_at > time.monotonic() + 30)
    other = open_disk(tmp_path)
    keys = keys_of(3)
    await write(other, keys[:2])
    assert await until(lambda: all(map(alone.holds, keys[:2])))
    # ... and what it stored last, however short its life.
    await write(other, keys[2:])
    await other.close()
    assert await until(lambda: alone.holds(keys[2]))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("drift", [5 * ON_DISK, -3 * ON_DISK])
async def test_a_figure_gone_astray_among_several_writers_is_counted_anew(tmp_path, drift):
    owner, other = open_disk(tmp_path), open_disk(tmp_path)
    await write(owner, keys_of(7))
    assert await until(lambda: owner._store.root.other_writers == 1)
    other._store.root.quota.release(-drift)  # as a process killed between a file and its figure
    assert other._store.root.quota.refresh() == 7 * ON_DISK + drift
    owner._housekeeper._recount_at = 0.0  # it is time
    assert await until(lambda: other._store.root.quota.refresh() == 7 * ON_DISK)


async def test_counting_anew_leaves_the_order_of_eviction_alone(tmp_path):
    settings = {"capacity": ByteSize(4 * ON_DISK), "high_watermark": 1.0, "low_watermark": 1.0}
    owner = open_disk(tmp_path, **settings)
    keys = keys_of(4)
    for key in keys:
        await write(owner, [key])
    assert await owner.read(keys[:2], slots(2, SIZE)) == [True] * 2
    for path in tmp_path.rglob("*"):  # access times tell of less than the order does
        if path.name in {keys[0].hex(), keys[1].hex()}:
            os.utime(path, (0, 0))
    Scanner(owner._store).scan(full=True)
    assert await write(owner, keys_of(2, "new")) == [True] * 2
    assert [owner.holds(key) for key in keys] == [True, True, False, False]


async def test_the_folder_of_an_idle_process_does_not_come_to_look_abandoned(tmp_path):
    backend = open_disk(tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if not path.name.startswith("."))
    seen_s = time.time() - ABANDONED_S / 2
    os.utime(folder, (seen_s, seen_s))
    backend._store.root.maintain()
    assert time.time() - folder.stat().st_mtime < 60


@pytest.mark.usefixtures("form")
async def test_a_file_removed_under_a_reader_stays_whole_for_it(tmp_path):
    one, two = open_disk(tmp_path), open_disk(tmp_path)
    keys = keys_of(24)

    async def churn():
        for _ in range(20):
            await write(one, keys)
            await one.remove(keys)

    churning = asyncio.ensure_future(churn())
    reads = 0
    while not churning.done():
        into = slots(24, SIZE)
        for key, slot, good in zip(keys, into, await two.read(keys, into), strict=True):
            assert not good or bytes(slot) == payload_of(key, SIZE)
            reads += good
    await churning
    assert not any(reason.startswith("corrupt") for reason in two.counters())
    assert reads > 0
    assert one.usage().resident_bytes == 0


async def test_folders_of_namespaces_long_empty_are_removed_by_the_owner(tmp_path):
    for name in ("gone", "young", "full"):
        backend = open_disk(tmp_path, name)
        keys = keys_of(2)
        await write(backend, keys)
        await backend.describe({"model": "m"})
        if name != "full":
            await backend.remove(keys)
        await backend.close()
    folders = {name: tmp_path / namespace_digest(name).hex() for name in ("gone", "young", "full")}
    for name in ("gone", "full"):
        os.utime(folders[name], (0, 0))
    await open_disk(tmp_path).close()
    assert [folder.exists() for folder in folders.values()] == [False, True, True]


async def test_the_folder_of_an_idle_engine_that_lives_is_left_alone(tmp_path, caplog):
    owner, idle = open_disk(tmp_path, "owner"), open_disk(tmp_path, "idle")
    folder = tmp_path / namespace_digest("idle").hex()
    await idle.describe({"model": "m"})
    os.utime(folder, (0, 0))  # as after an hour without a chunk
    assert await until(lambda: time.time() - folder.stat().st_mtime < 60)
    Scanner(owner._store).scan(full=True)
    assert (folder / MANIFEST).exists()
    assert await write(idle, keys_of(2)) == [True] * 2
    assert "remade" not in idle.counters()


async def test_a_namespace_that_cannot_be_removed_keeps_its_manifest(tmp_path):
    gone = open_disk(tmp_path, "gone")
    await gone.describe({"model": "m"})
    await gone.close()
    folder = tmp_path / namespace_digest("gone").hex()
    (folder / "README").write_text("mine")
    os.utime(folder, (0, 0))
    await open_disk(tmp_path, "owner").close()
    assert sorted(os.listdir(folder)) == ["README", MANIFEST, SNAPSHOT]
    (folder / "README").unlink()
    os.utime(folder, (0, 0))
    await open_disk(tmp_path, "owner").close()
    assert not folder.exists()


LONG = pytest.param(100, 0.5, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(("kills", "pause_s"), [(2, 0.3), LONG])
def test_four_processes_and_random_kills(ram_path, form, kills, pause_s):
    root = ram_path
    words = [str(root), form, str(kills), str(pause_s)]
    command = [sys.executable, "-m", "tests.support.swarm", *words]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    wrong, reads, writes, peak, excess = json.loads(told)
    assert wrong == 0
    assert os.listdir(root / QUARANTINE) == []  # what was read while overwritten is no damage
    assert reads > 100
    assert writes > 100
    assert peak <= CAPACITY
    assert excess <= 0
    backend = open_disk(root, "rank0", capacity=ByteSize(CAPACITY))

    def counted_and_there():
        there = chunk_bytes(root)
        for path in root.glob(".quarantine/*"):
            with contextlib.suppress(FileNotFoundError):  # evicted since it was listed
                there += path.lstat().st_blocks * 512
        return backend.usage().resident_bytes, there

    # The new owner may be evicting down to its watermark while this counts files.
    until = time.monotonic() + 10
    counted, there = counted_and_there()
    while counted != there and time.monotonic() < until:
        time.sleep(0.05)
        counted, there = counted_and_there()
    assert counted == there
    assert not backend.counters().get("corrupt")
    asyncio.run(backend.close())
