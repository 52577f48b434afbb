"""The shared figure of the quota: reservations, releases, corrections; pauses of expiry."""

import os
import struct

import pytest
from disk_parts import ON_DISK, full, open_disk, until, write

from kvoffload.backends.disk.quota import Quota, recorded_bytes
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.testing.backends import keys_of
from tests.support.vfs import FailingVfs, calls_on


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / ".ledger")


@pytest.fixture
def quota(path):
    quota = Quota(Vfs(), path, fresh=True)
    yield quota
    quota.close()


def test_a_fresh_root_has_the_figure_0_and_another_root_has_none(path, tmp_path):
    quota = Quota(Vfs(), path, fresh=True)
    assert (quota.refresh(), quota.resident_bytes, quota.changes) == (0, 0, 1)
    quota.close()
    other = Quota(Vfs(), f"{tmp_path}/other", fresh=False)
    assert other.refresh() is None
    assert not other.reserve(1, 100)
    other.close()


def test_bytes_are_reserved_up_to_the_limit_and_released(quota, path):
    assert quota.reserve(60, 100)
    assert not quota.reserve(41, 100)
    assert quota.reserve(40, 100)
    assert quota.resident_bytes == quota.refresh() == recorded_bytes(Vfs(), path) == 100
    quota.release(30)
    assert (quota.refresh(), quota.changes) == (70, 4)
    quota.release(-5)
    assert quota.refresh() == 75
    quota.release(1000)
    assert quota.refresh() == 0  # never negative
    assert quota.reserve(100, 100)


def test_two_processes_have_one_figure(quota, path):
    other = Quota(Vfs(), path, fresh=False)
    assert quota.reserve(60, 100)
    assert not other.reserve(50, 100)
    assert other.resident_bytes == 60
    assert other.reserve(40, 100)
    assert quota.resident_bytes == 60  # as it read the file last
    assert (quota.refresh(), quota.resident_bytes) == (100, 100)
    other.close()


def test_bytes_that_cannot_be_released_are_owed_until_they_can(path):
    vfs = FailingVfs(0, 5, sticky=True, when=lambda call, path: call == "pwritev")
    quota = Quota(vfs, path, fresh=True)
    assert quota.reserve(100, 100)
    vfs.nth = 1
    quota.release(60)
    assert quota.resident_bytes == 40
    assert not quota.reserve(1, 1000)
    assert (quota.refresh(), quota.resident_bytes) == (100, 40)
    vfs.heal()
    assert quota.reserve(50, 100)
    assert (quota.refresh(), quota.resident_bytes) == (90, 90)
    vfs.nth = 1
    quota.release(20)
    vfs.heal()
    quota.close()  # writes the bytes it owes
    assert recorded_bytes(Vfs(), path) == 70
    assert not quota.reserve(1, 1000)
    quota.close()
    assert not quota.is_gone()


def test_a_correction_sets_the_figure_unless_it_changed_meanwhile(quota):
    assert quota.reserve(100, 1000)
    changes = quota.changes
    assert quota.correct(40, changes)
    assert (quota.refresh(), quota.changes) == (40, changes + 1)
    assert not quota.correct(7, changes)
    assert not quota.correct(7, changes + 1, lambda: False)
    assert quota.refresh() == 40
    assert quota.correct(7)
    assert quota.refresh() == 7


def test_a_correction_clears_the_bytes_owed(path):
    vfs = FailingVfs(0, 5, sticky=True, when=lambda call, path: call == "pwritev")
    quota = Quota(vfs, path, fresh=True)
    assert quota.reserve(100, 100)
    vfs.nth = 1
    quota.release(60)
    vfs.heal()
    assert quota.correct(100)
    assert quota.reserve(1, 1000)
    assert quota.refresh() == 101
    quota.close()


def test_a_removed_quota_file_is_noticed(quota, path):
    assert quota.reserve(60, 100)
    assert not quota.is_gone()
    os.unlink(path)
    assert quota.is_gone()
    again = Quota(Vfs(), path, fresh=True)
    assert (again.is_gone(), again.refresh()) == (False, 0)
    again.close()
    os.unlink(path)
    again = Quota(Vfs(), path, fresh=False)
    assert again.refresh() is None
    again.close()


@pytest.mark.parametrize("damage", ["short", "seal", "magic", "version"])
def test_a_damaged_record_is_no_figure(quota, path, damage):
    assert quota.reserve(60, 100)
    with open(path, "rb") as file:
        record = bytearray(file.read())
    assert len(record) == struct.calcsize("<8sQqQ") + 8
    changed = {"short": record[:-1]}.get(damage, record)
    if damage != "short":
        changed[{"seal": -1, "magic": 0, "version": 8}[damage]] ^= 1
    with open(path, "wb") as file:
        file.write(changed)
    assert quota.refresh() is None
    assert recorded_bytes(Vfs(), path) is None
    assert not quota.reserve(1, 100)
    assert quota.correct(5)
    assert quota.refresh() == 5


@pytest.mark.parametrize(
    ("ttl_s", "pause"),
    [(None, 60.0), (1.0, 1.0), (100.0, 1.0), (200.0, 2.0), (6000.0, 60.0), (9000.0, 60.0)],
)
async def test_expired_chunks_are_sought_after_a_hundredth_of_the_time_to_live(
    tmp_path, ttl_s, pause
):
    backend = open_disk(tmp_path, ttl_s=ttl_s)
    assert backend._housekeeper.expiry_period_s() == pytest.approx(pause)


async def test_a_store_changes_the_shared_figure_once(tmp_path):
    backend = open_disk(tmp_path)
    quota = backend._store.root.quota
    assert await write(backend, keys_of(1)) == [True]
    for number in (1, 3):
        before = quota.changes
        assert await write(backend, keys_of(number, f"{number}")) == [True] * number
        assert quota.changes == before + number
    before = quota.changes
    assert await write(backend, keys_of(3, "3")) == [True] * 3  # they are there
    assert quota.changes == before


async def test_a_quota_file_removed_under_an_engine_is_made_again_and_counts_the_chunks(tmp_path):
    backend = open_disk(tmp_path)
    assert await write(backend, keys_of(2)) == [True] * 2
    (tmp_path / ".ledger").unlink()
    assert await until(lambda: backend.counters().get("remade") == 1)
    assert await until(lambda: recorded_bytes(Vfs(), str(tmp_path / ".ledger")) == 2 * ON_DISK)
    assert backend._store.root.quota.refresh() == 2 * ON_DISK


async def test_an_eviction_ends_although_the_quota_cannot_be_written(tmp_path):
    """Were the figure to stay as it is, no number of removed chunks would be enough."""
    vfs = FailingVfs(0, 5, sticky=True, when=calls_on("ledger", "pwritev"))
    backend = open_disk(tmp_path, vfs=vfs, **full(8))
    old, new = keys_of(8), keys_of(3, "new")
    assert await write(backend, old) == [True] * 8
    vfs.nth = vfs.calls + 1
    for key in new:
        assert await write(backend, [key]) == [False]
    assert backend.counters()["evicted"] == 1
    assert sum(backend.holds(key) for key in old) == 7
    vfs.heal()
    assert await write(backend, new[:1]) == [True]
    assert recorded_bytes(Vfs(), str(tmp_path / ".ledger")) == 8 * ON_DISK
