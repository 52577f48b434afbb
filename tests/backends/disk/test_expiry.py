"""Chunks that nothing used for ``ttl_s`` are misses at once, and leave in the background."""

import os
import time

import pytest
from disk_parts import SIZE, chunk_bytes, open_disk, stored, until, write

from kvoffload.backends.base import Removal
from kvoffload.backends.disk import quarantine as disk_quarantine
from kvoffload.backends.disk.backend import DiskOptions
from kvoffload.backends.disk.paths import QUARANTINE
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import keys_of, slots
from tests.support.file_faults import overwrite

HOUR_S = 3600.0


def read(backend, keys):
    return backend.read(keys, slots(len(keys), SIZE))


def sweep(backend):
    backend._housekeeper.expire()


async def test_what_expired_is_a_miss_at_once_and_leaves_counted(tmp_path, clock):
    backend, keys = open_disk(tmp_path / "kv", ttl_s=HOUR_S), keys_of(3)
    assert all(await write(backend, keys))
    clock[0] = HOUR_S - 60
    sweep(backend)
    assert all(map(backend.holds, keys))
    clock[0] = HOUR_S + 60
    assert not any(map(backend.holds, keys))
    assert not any(await backend.contains(keys))
    assert not any(await read(backend, keys))
    assert backend.counters()["read_missing"] == 3
    sweep(backend)
    assert not list((tmp_path / "kv").glob("*/??/*"))
    assert backend.counters()["expired"] == 3
    assert sorted(backend.take_removals()) == sorted(Removal(key, "expired") for key in keys)
    assert backend.usage().resident_bytes == 0
    assert all(await write(backend, keys))
    assert all(await read(backend, keys))
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path / "kv")


@pytest.mark.parametrize("use", [read, write])
async def test_a_load_and_a_repeated_store_prolong_a_chunk(tmp_path, clock, use):
    backend, keys = open_disk(tmp_path / "kv", ttl_s=HOUR_S), keys_of(2)
    assert all(await write(backend, keys))
    clock[0] = HOUR_S / 2
    assert await use(backend, keys[:1]) == [True]
    clock[0] = HOUR_S + 60
    sweep(backend)
    assert await read(backend, keys) == [True, False]
    clock[0] = HOUR_S * 3
    sweep(backend)
    assert backend.counters()["expired"] == 2


async def test_a_load_by_another_process_prolongs_a_chunk(tmp_path, clock):
    owner, keys = open_disk(tmp_path / "kv", ttl_s=HOUR_S), keys_of(2)
    assert all(await write(owner, keys))
    other = open_disk(tmp_path / "kv")  # its settings do not say so, the folder does
    clock[0] = HOUR_S / 2
    assert await read(other, keys[:1]) == [True]
    other._store.record_use()
    clock[0] = HOUR_S + 60
    sweep(owner)
    assert await owner.contains(keys) == [True, False]
    assert await read(owner, keys) == [True, False]
    assert await read(other, keys) == [True, False]


async def test_what_expired_while_no_engine_ran_is_a_miss_and_leaves(tmp_path):
    keys = keys_of(2)
    await stored(tmp_path / "kv", keys, ttl_s=HOUR_S)
    for path in (tmp_path / "kv").glob("*/??/*"):
        os.utime(path, (time.time() - 2 * HOUR_S,) * 2)
    backend = open_disk(tmp_path / "kv", ttl_s=HOUR_S)
    assert not any(await backend.contains(keys))
    assert not any(await read(backend, keys))
    assert await until(lambda: backend.counters().get("expired") == 2)


async def test_without_a_time_to_live_nothing_expires(tmp_path, clock):
    backend, keys = open_disk(tmp_path / "kv"), keys_of(2)
    assert all(await write(backend, keys))
    clock[0] = 1e9
    sweep(backend)
    assert all(await read(backend, keys))


async def test_damaged_files_are_kept_a_week_or_as_long_as_chunks(tmp_path, monkeypatch):
    backend, keys = open_disk(tmp_path / "kv"), keys_of(1)
    assert backend._housekeeper.expiry_period_s() == 60
    assert all(await write(backend, keys))
    (path,) = (tmp_path / "kv").glob("*/??/*")
    overwrite(path, 0, b"damaged")
    assert await read(backend, keys) == [False]
    sweep(backend)
    assert len(list((tmp_path / "kv" / QUARANTINE).iterdir())) == 1
    real = time.time_ns
    monkeypatch.setattr(disk_quarantine.time, "time_ns", lambda: real() + int(8 * 86400e9))
    sweep(backend)
    monkeypatch.undo()
    assert not list((tmp_path / "kv" / QUARANTINE).iterdir())
    assert backend.usage().resident_bytes == 0


@pytest.mark.parametrize("ttl_s", [0, 0.5, -1.0, float("nan"), float("inf"), 1e9])
def test_times_to_live_that_make_no_sense_are_refused(tmp_path, ttl_s):
    with pytest.raises(ConfigError) as caught:
        DiskOptions(root=str(tmp_path), ttl_s=ttl_s)
    assert caught.value.field == "ttl_s"
