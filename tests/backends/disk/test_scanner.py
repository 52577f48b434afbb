"""Scans of damaged folders and damaged files."""

import errno
import os
import shutil

from disk_parts import ON_DISK, SIZE, chunk_bytes, open_disk, stored, write

from kvoffload.backends.disk.paths import LEDGER, QUARANTINE, SNAPSHOT
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.testing.backends import keys_of, slots
from tests.support.file_faults import overwrite
from tests.support.vfs import BesideVfs, FailingVfs, kind_of


async def test_a_link_in_place_of_one_shard_hides_no_other(tmp_path):
    keys = keys_of(40)
    await stored(tmp_path / "store", keys)
    first = min((tmp_path / "store").glob("*/??"))
    lost = {path.name for path in first.iterdir()}
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    next((tmp_path / "store").glob(f"*/{SNAPSHOT}")).unlink()
    backend = open_disk(tmp_path / "store")
    assert {key.hex() for key in keys if not backend.holds(key)} == lost


async def test_a_full_scan_counts_the_files_in_the_quarantine(tmp_path):
    backend = open_disk(tmp_path)
    keys = keys_of(2)
    assert await write(backend, keys) == [True] * 2
    (path,) = tmp_path.glob(f"*/??/{keys[0].hex()}")
    path.write_bytes(b"damaged")
    assert await backend.read(keys, slots(2, SIZE)) == [False, True]
    (damaged,) = (tmp_path / QUARANTINE).iterdir()
    (tmp_path / LEDGER).write_bytes(os.urandom(40))
    Scanner(backend._store).scan(full=True)
    there = chunk_bytes(tmp_path) + damaged.stat().st_blocks * 512
    assert backend._store.root.quota.refresh() == there == ON_DISK + 4096


async def test_a_good_file_that_replaced_a_damaged_one_stays_in_place(tmp_path):
    """Another process stores a chunk when a reader has found the file damaged."""
    vfs = BesideVfs()
    backend = open_disk(tmp_path / "store", vfs=vfs)
    keys = keys_of(1)
    assert await write(backend, keys) == [True]
    (path,) = (tmp_path / "store").glob("*/??/*")
    shutil.copy(path, tmp_path / "good")
    path.write_bytes(b"damaged")
    vfs.on("fstat:chunk:after", lambda: (tmp_path / "good").replace(path))
    assert await backend.read(keys, slots(1, SIZE)) == [True]
    assert os.listdir(tmp_path / "store" / QUARANTINE) == []
    assert backend.counters() == {}
    assert not vfs.acts


async def test_a_damaged_file_that_can_be_neither_moved_nor_removed_is_absent(tmp_path):
    stuck = FailingVfs(
        0,
        errno.EACCES,
        sticky=True,
        when=lambda c, p: c in ("rename", "unlink") and kind_of(p) in ("quarantine", "chunk"),
    )
    backend = open_disk(tmp_path, vfs=stuck)
    keys = keys_of(1)
    assert await write(backend, keys) == [True]
    (path,) = tmp_path.glob("*/??/*")
    overwrite(path, 0, b"damaged")
    stuck.nth = 1
    assert await backend.read(keys, slots(1, SIZE)) == [False]
    assert (backend.holds(keys[0]), await backend.contains(keys)) == (False, [False])
    assert path.exists()
    assert backend.usage().resident_bytes == ON_DISK
    stuck.heal()
    assert await write(backend, keys) == [True]
    assert await backend.read(keys, slots(1, SIZE)) == [True]
