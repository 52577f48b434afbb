"""After a restart: chunks, their order, the accounting."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from disk_parts import load, open_disk, remove_at_once, until

from kvoffload.backends.disk.paths import LEDGER, OWNER, SHARDS, SNAPSHOT, WRITERS, shard_of
from kvoffload.backends.header import namespace_digest
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import FailingVfs, StuckVfs

pytestmark = pytest.mark.usefixtures("as_files")

SIZE, ON_DISK = 28 * 1024, 32 * 1024


def snapshot_of(root):
    (path,) = root.glob(f"*/{SNAPSHOT}")
    return path


async def stored(root, keys):
    backend = open_disk(root)
    for key in keys:
        assert await backend.write([key], filled([key], SIZE)) == [True]
    await backend.close()


@pytest.mark.parametrize("snapshot", ["kept", "lost", "damaged", "foreign"])
async def test_chunks_are_back_whatever_became_of_the_snapshot(tmp_path, snapshot):
    keys = keys_of(20)
    await stored(tmp_path, keys)
    path = snapshot_of(tmp_path)
    if snapshot == "lost":
        path.unlink()
    if snapshot == "damaged":
        path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    if snapshot == "foreign":
        path.write_bytes(os.urandom(5000))
    backend = open_disk(tmp_path)
    assert [backend.holds(key) for key in keys] == [True] * 20
    assert backend.usage().resident_bytes == 20 * ON_DISK
    assert await backend.read(keys, slots(20, SIZE)) == [True] * 20


async def test_opening_does_not_wait_for_the_folders(tmp_path):
    keys = keys_of(4)
    await stored(tmp_path, keys)
    vfs = StuckVfs(lambda call, path: call == "listdir" and len(os.path.basename(path)) == 2)
    backend = open_disk(tmp_path, vfs=vfs, ready=False)
    assert not backend.wait_ready(0.05)
    # The snapshot already answers, reads need no index, and writes are accepted.
    assert await until(lambda: backend.holds(keys[0]))
    assert [backend.holds(key) for key in keys] == [True] * 4
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    assert await backend.write(keys_of(1, "new"), filled(keys_of(1, "new"), SIZE)) == [True]
    vfs.release()
    assert await asyncio.to_thread(backend.wait_ready, 60)
    assert backend.holds(keys_of(1, "new")[0])


async def test_without_a_snapshot_keys_are_misses_until_they_are_found(tmp_path):
    keys = keys_of(4)
    await stored(tmp_path, keys)
    snapshot_of(tmp_path).unlink()
    vfs = StuckVfs(lambda call, path: call == "listdir" and len(os.path.basename(path)) == 2)
    backend = open_disk(tmp_path, vfs=vfs, ready=False)
    assert [backend.holds(key) for key in keys] == [False] * 4
    vfs.release()
    assert await asyncio.to_thread(backend.wait_ready, 60)
    assert [backend.holds(key) for key in keys] == [True] * 4


async def test_a_snapshot_of_things_gone_costs_misses_only(tmp_path):
    keys = keys_of(6)
    await stored(tmp_path, keys)
    (path,) = tmp_path.glob(f"*/??/{keys[0].hex()}")
    path.unlink()
    backend = open_disk(tmp_path)
    assert [backend.holds(key) for key in keys] == [False] + [True] * 5
    assert await backend.read(keys, slots(6, SIZE)) == [False] + [True] * 5
    assert backend.usage().resident_bytes == 5 * ON_DISK


@pytest.mark.parametrize("snapshot", ["kept", "lost"])
async def test_the_order_of_use_survives(tmp_path, snapshot):
    keys = keys_of(8)
    await stored(tmp_path, keys)
    backend = open_disk(tmp_path)
    for key in (keys[1], keys[0]):
        assert await backend.read([key], slots(1, SIZE)) == [True]
    await backend.close()
    if snapshot == "lost":
        snapshot_of(tmp_path).unlink()
    tight = {"capacity": ByteSize(8 * ON_DISK), "high_watermark": 1.0, "low_watermark": 1.0}
    backend = open_disk(tmp_path, **tight)
    for key in keys_of(6, "new"):
        assert await backend.write([key], filled([key], SIZE)) == [True]
    assert [backend.holds(key) for key in keys] == [True, True] + [False] * 6


async def test_a_smaller_capacity_after_a_restart_is_kept(tmp_path):
    await stored(tmp_path, keys_of(20))
    backend = open_disk(tmp_path, capacity=ByteSize(10 * ON_DISK))
    assert await until(lambda: backend.usage().resident_bytes <= 9 * ON_DISK)
    assert len(list(tmp_path.glob("*/??/*"))) == 9


@pytest.mark.parametrize("ledger", ["lost", "empty", "damaged", "far too high", "far too low"])
async def test_the_accounting_is_exact_again_whatever_became_of_the_ledger(tmp_path, ledger):
    await stored(tmp_path, keys_of(10))
    path = tmp_path / LEDGER
    if ledger == "lost":
        path.unlink()
    elif ledger == "empty":
        path.write_bytes(b"")
    elif ledger == "damaged":
        path.write_bytes(os.urandom(40))
    else:
        backend = open_disk(tmp_path)
        backend._store.root.quota.correct(1 << 40 if ledger == "far too high" else 0)
        await backend.close()
    backend = open_disk(tmp_path)
    assert backend.usage().resident_bytes == 10 * ON_DISK
    assert await backend.write(keys_of(1, "new"), filled(keys_of(1, "new"), SIZE)) == [True]


async def test_a_ledger_damaged_while_in_use_is_mended(tmp_path):
    backend = open_disk(tmp_path)
    keys = keys_of(3)
    await backend.write(keys[:1], filled(keys[:1], SIZE))
    (tmp_path / LEDGER).write_bytes(os.urandom(40))
    for _ in range(600):
        if (await backend.write(keys[1:2], filled(keys[1:2], SIZE)))[0]:
            break
        await asyncio.sleep(0.01)
    # A scan during a refused store counts its bytes too; the scan after it does not.
    counted = []

    def is_exact():
        counted.append(backend.usage().resident_bytes)
        return counted[-1] == 2 * ON_DISK

    assert await until(is_exact)
    assert min(counted) == 2 * ON_DISK


async def test_leftovers_of_the_dead_are_removed_and_of_the_living_never(tmp_path):
    alive = open_disk(tmp_path)
    unseen = tmp_path / "unseen"  # the living one may clean up at any moment
    unseen.mkdir()
    (unseen / "lock").write_text("")
    (unseen / "7").write_bytes(bytes(50_000))
    dead = unseen.rename(tmp_path / WRITERS / "0123456789abcdef")
    half_removed = tmp_path / WRITERS / "fedcba9876543210"
    half_removed.mkdir()
    being_born = tmp_path / WRITERS / "new-0000000000000000"
    being_born.mkdir()
    backend = open_disk(tmp_path)
    assert await until(lambda: not dead.exists() and not half_removed.exists())
    assert alive._store.root.writer.folder in map(str, (tmp_path / WRITERS).iterdir())
    assert being_born.exists()
    hour_ago = time.time() - 3600
    os.utime(being_born, (hour_ago, hour_ago))
    assert await until(lambda: not being_born.exists())
    await backend.close()
    await alive.close()
    assert not list((tmp_path / WRITERS).iterdir())


async def test_the_manifest_names_the_facts_and_is_written_once(tmp_path):
    backend = open_disk(tmp_path)
    await backend.describe({"model": "llama", "dtype": "bfloat16"})
    await backend.describe({"model": "another"})
    (manifest,) = tmp_path.glob("*/manifest.json")
    assert '"llama"' in manifest.read_text()
    assert '"disk"' in manifest.read_text()


async def test_a_manifest_that_could_not_be_written_is_written_with_the_next_store(
    tmp_path, caplog
):
    vfs = FailingVfs(1, errno.EIO, when=lambda call, path: path.endswith("manifest.json"))
    backend = open_disk(tmp_path, vfs=vfs)
    await backend.describe({"model": "m"})
    assert list(tmp_path.glob("*/manifest.json")) == []
    assert "cannot write a manifest" in caplog.text
    (key,) = keys_of(1)
    assert await backend.write([key], filled([key], SIZE)) == [True]
    (path,) = tmp_path.glob("*/manifest.json")
    assert json.loads(path.read_bytes())["facts"] == {"model": "m"}


async def test_files_that_are_not_ours_are_left_alone(tmp_path):
    await stored(tmp_path, keys_of(2))
    (namespace,) = (path for path in tmp_path.iterdir() if len(path.name) == 64)
    strangers = [tmp_path / "notes.txt", namespace / "README", namespace / "aa", tmp_path / "lost"]
    strangers[0].write_text("mine")
    strangers[1].write_text("mine")
    strangers[2].mkdir(exist_ok=True)
    (strangers[2] / "not hex").write_text("mine")
    strangers[3].mkdir()
    backend = open_disk(tmp_path, capacity=ByteSize(ON_DISK))
    for key in keys_of(3, "more"):
        await backend.write([key], filled([key], SIZE))
    await backend.close()
    assert all(path.exists() for path in strangers)
    assert (strangers[2] / "not hex").read_text() == "mine"


async def test_many_lives_of_one_folder(tmp_path):
    """Chunks acknowledged by one process are present in all later ones."""
    keys = keys_of(60)
    for life in range(10):
        backend = open_disk(tmp_path, io="auto" if life % 2 else "buffered")
        known = keys[: life * 6]
        assert await load(backend, known, SIZE) == [True] * len(known)
        assert backend.usage().resident_bytes == len(known) * ON_DISK
        new = keys[life * 6 : life * 6 + 6]
        assert await backend.write(new, filled(new, SIZE)) == [True] * 6
        await backend.close()


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_a_million_entries(tmp_path):
    """No huge folder, an index that fits, and every chunk known again; their contents are not."""
    backend = open_disk(tmp_path)
    (namespace,) = (path for path in tmp_path.iterdir() if len(path.name) == 64)
    for shard in SHARDS:
        (namespace / shard).mkdir(mode=0o700)
    for i in range(1_000_000):
        key = i.to_bytes(36, "big")
        path = namespace / shard_of(key) / key.hex()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    await backend.close()
    assert max(len(os.listdir(namespace / shard)) for shard in SHARDS) < 5_000
    before = psutil.Process().memory_info().rss
    for _ in range(2):  # by the folders, then with a snapshot
        backend = open_disk(tmp_path, ready=False)
        assert await asyncio.to_thread(backend.wait_ready, 600)
        assert backend.usage().chunks == 1_000_000
        assert backend.holds((999_999).to_bytes(36, "big"))
        key = keys_of(1, "real")
        assert await backend.write(key, filled(key, SIZE)) == [True]
        assert await backend.read(key, slots(1, SIZE)) == [True]
        await backend.remove(key)
        assert psutil.Process().memory_info().rss - before < 1 << 30
        await backend.close()


def empty(root):
    remove_at_once(root)


def empty_but_for_hidden_files(root):
    for path in root.iterdir():
        if not path.name.startswith("."):
            path.rename(root.with_name("gone"))
            shutil.rmtree(root.with_name("gone"))


def empty_of_writers(root):
    (root / WRITERS).rename(root.with_name("gone"))
    shutil.rmtree(root.with_name("gone"))


def empty_of_the_ledger(root):
    (root / LEDGER).unlink()
    (root / OWNER).unlink()


@pytest.mark.parametrize(
    "remove", [empty, empty_but_for_hidden_files, empty_of_writers, empty_of_the_ledger]
)
async def test_folders_removed_under_a_running_engine_are_made_anew(tmp_path, remove):
    """As ``rm -rf root/*`` does; with a second process on the same folder."""
    root, keys, later = tmp_path / "kv", keys_of(6), keys_of(6, "later")
    one, two = open_disk(root), open_disk(root)
    await one.describe({"model": "m"})
    assert await one.write(keys, filled(keys, SIZE)) == [True] * 6
    remove(root)
    for backend in (one, two):
        answers = [False]
        for _ in range(500):
            answers = await backend.write(later, filled(later, SIZE))
            if all(answers):
                break
            await asyncio.sleep(0.02)
        assert answers == [True] * 6, backend.counters()
        assert await backend.read(later, slots(6, SIZE)) == [True] * 6
    there = [root / path for path in root.glob("*/??/*")]
    on_disk = sum(path.lstat().st_blocks * 512 for path in there)

    def settled(backend):
        known = all(map(backend.holds, later)) and len(there) == backend.usage().chunks
        return known and backend.usage().resident_bytes == on_disk

    assert await until(lambda: settled(one) and settled(two))
    assert sum(backend._store.root.evictor.held for backend in (one, two)) == 1
    assert len(list(root.glob("*/manifest.json"))) == 1
    assert len(os.listdir(root / WRITERS)) == 2
    for backend in (one, two):
        await backend.close()
    assert not os.listdir(root / WRITERS)
    backend = open_disk(root)
    assert backend.usage()[:3] == (on_disk, 64 << 20, len(there))


HUNG = """
import sys, time
sys.path.append("tests/helpers")
from disk_parts import let_calls_hang_after
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import FailingVfs, StuckVfs
from tests.support.io_loop import IOLoop

call, root = sys.argv[1:]
hung = False
vfs = StuckVfs(lambda name, path: hung and name == call)
io = IOLoop()
options = DiskOptions(root=root, min_free=ByteSize(0), io="buffered", stall_s=60.0)
backend = DiskBackend(options, "hung", vfs=vfs)
keys, SIZE = keys_of(2), (1 << 20) + 4096  # too long for slots
assert io.call(backend.write(keys, filled(keys, SIZE))) == [True] * 2
let_calls_hang_after(backend, 0.2)
hung = True
io.start(lambda: backend.read(keys, slots(2, SIZE)))
io.start(lambda: backend.write(keys_of(2, "x"), filled(keys, SIZE)))
io.start(lambda: backend.remove(keys))
io.start(lambda: backend.purge(["hung"]))
while not vfs.stuck:
    time.sleep(0.01)
try:
    io.call(backend.close(), 0.5)
except TimeoutError:
    pass
io.close(0.5)
print("the end")
"""


@pytest.mark.parametrize("call", ["preadv", "pwritev", "listdir", "lstat", "flock", "unlink"])
def test_a_hung_disk_does_not_keep_a_process_from_ending(tmp_path, call):
    command = [sys.executable, "-c", HUNG, call, str(tmp_path / "kv")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (0, "the end\n"), ended.stderr


async def test_a_purged_namespace_is_gone_and_only_misses_for_whoever_still_uses_it(tmp_path):
    keys = keys_of(20)
    old, new = (open_disk(tmp_path, name) for name in ("old", "new"))
    for backend in (old, new):
        assert await backend.write(keys, filled(keys, SIZE)) == [True] * 20
    folder = tmp_path / namespace_digest("old").hex()
    assert await new.purge(["old", "never was"]) == 20
    assert not folder.exists() or not list(folder.glob("??"))
    assert await new.read(keys, slots(20, SIZE)) == [True] * 20
    assert new.usage().resident_bytes == 20 * ON_DISK
    assert await old.read(keys, slots(20, SIZE)) == [False] * 20
    # A process that does not know of it continues in a folder that it made.
    assert await old.write(keys, filled(keys, SIZE)) == [True] * 20
    assert await old.read(keys, slots(20, SIZE)) == [True] * 20
