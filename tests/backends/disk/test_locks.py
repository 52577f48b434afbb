"""Writers under a root, alive and dead: counts, clean-up, and the bytes they reserved."""

import os
import time
from pathlib import Path

from disk_parts import ON_DISK, open_disk, until, write

from kvoffload.backends.disk.locks import bytes_in_flight, clean_up, count_alive, is_dead
from kvoffload.backends.disk.paths import LEDGER, WRITERS
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import ByteSize
from kvoffload.testing.backends import keys_of


def dead_writer(root, size=20_000):
    """Make the folder of a process killed while it wrote a chunk and a small file; return it."""
    folder = root / WRITERS / "0123456789abcdef"
    folder.mkdir()
    (folder / "lock").write_text("")
    (folder / "7").write_bytes(bytes(size))
    (folder / "small-8").write_bytes(bytes(size))
    return folder


async def test_the_living_are_counted_and_the_dead_are_not(tmp_path):
    backend = open_disk(tmp_path)
    own = os.path.basename(backend._store.root.writer.folder)
    unseen = tmp_path / "unseen"
    (unseen / WRITERS).mkdir(parents=True)
    folder = dead_writer(unseen)
    assert count_alive(Vfs(), str(tmp_path)) == 1
    assert count_alive(Vfs(), str(unseen)) == 0
    assert is_dead(Vfs(), str(folder))
    assert not is_dead(Vfs(), backend._store.root.writer.folder)
    assert clean_up(Vfs(), str(tmp_path), own) == (0, 0)
    assert clean_up(Vfs(), str(tmp_path), "") == (1, 0)
    freed = (folder / "7").stat().st_blocks * 512
    # The quota counts no small file.
    assert clean_up(Vfs(), str(unseen), "") == (0, freed)
    assert os.listdir(unseen / WRITERS) == []
    await backend.close()
    assert count_alive(Vfs(), str(tmp_path)) == 0


def test_a_writer_that_was_never_seen_locked_is_dead_after_a_minute(tmp_path):
    unborn = tmp_path / WRITERS / "new-0123456789abcdef"
    unborn.mkdir(parents=True)
    for age_s, dead in ((50, False), (70, True)):
        os.utime(unborn, (time.time() - age_s,) * 2)
        assert is_dead(Vfs(), str(unborn)) is dead
        assert clean_up(Vfs(), str(tmp_path), "") == (0, 0)
        assert unborn.exists() is not dead


async def test_the_bytes_that_a_dead_writer_reserved_are_released(tmp_path):
    backend = open_disk(tmp_path)
    assert await write(backend, keys_of(2)) == [True] * 2
    (tmp_path / "unseen" / WRITERS).mkdir(parents=True)
    folder = dead_writer(tmp_path / "unseen")  # the living one may clean up at any moment
    backend._store.root.quota.release(-(folder / "7").stat().st_blocks * 512)
    folder.rename(tmp_path / WRITERS / folder.name)
    assert await until(lambda: len(os.listdir(tmp_path / WRITERS)) == 1)
    assert await until(lambda: backend._store.root.quota.refresh() == 2 * ON_DISK)


async def test_bytes_that_other_processes_write_count_when_a_scan_corrects_the_quota(tmp_path):
    owner, other = open_disk(tmp_path), open_disk(tmp_path)
    assert await write(owner, keys_of(2)) == [True] * 2
    for backend in (owner, other):
        folder = Path(backend._store.root.writer.folder)
        for name in ("900", "small-901"):
            (folder / name).write_bytes(bytes(20_480))
    own = os.path.basename(owner._store.root.writer.folder)
    assert bytes_in_flight(Vfs(), str(tmp_path), own) == 20_480
    (tmp_path / LEDGER).write_bytes(os.urandom(40))
    Scanner(owner._store).scan(full=True)
    assert owner._store.root.quota.refresh() == 2 * ON_DISK + 20_480
    other._store.space.add_in_flight(40_960)  # with what it removes, or has only reserved
    assert bytes_in_flight(Vfs(), str(tmp_path), own) == 40_960
    assert bytes_in_flight(Vfs(), str(tmp_path), "") == 40_960 + 20_480


async def test_a_capacity_in_use_by_a_dead_process_alone_is_set_by_the_next(tmp_path):
    await open_disk(tmp_path).close()
    dead_writer(tmp_path)
    backend = open_disk(tmp_path, capacity=ByteSize(2 << 20))
    assert backend.usage().capacity_bytes == 2 << 20
