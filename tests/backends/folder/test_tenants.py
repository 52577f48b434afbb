"""Shares of tenants in a folder: a flood evicts its own chunks, whoever stored them, and when."""

import asyncio
import errno
import os
import shutil
import time
from collections import Counter

import pytest
from disk_parts import ON_DISK
from folder_parts import (
    host_record,
    new_evictor,
    open_folder,
    path_of,
    store,
    store_at_last,
    stored_bytes,
)

from kvoffload import open_backend
from kvoffload.backends.folder import scan, upkeep
from kvoffload.testing.backends import keys_of
from tests.support.vfs import FailingVfs, HookedVfs, calls_on, kind_of

A, B = b"a" * 16, b"b" * 16
CHUNKS, ROOMY = 100, 120
"""How many chunks the tests of an evictor begin with, and a capacity that none must leave for."""
FULL, LEAVE = 104, 7
"""A capacity of which those chunks leave less than 5 % free; and how many leave, to free 10 %."""


class OpeningVfs(HookedVfs):
    """Counts how often each chunk is opened."""

    def __init__(self):
        super().__init__()
        self.opened = Counter()
        self.delay_s = 0.0

    def around(self, call, path, perform):
        if call == "open" and kind_of(path) == "chunk":
            self.opened[path] += 1
            time.sleep(self.delay_s)
        return perform()


async def stored(root, *owned, **settings):
    """Store so many chunks of each tenant, the first used longest ago; return their keys."""
    backend, keys, age_s = open_folder(root, **settings), [], 10_000
    for number, (tenant, count) in enumerate(owned):
        keys.append(keys_of(count, f"{number}{tenant.hex()}"))
        assert await store_at_last(backend, keys[-1], tenant)
        for key in keys[-1]:
            age_s -= 1
            os.utime(path_of(root, key), (1e9 - age_s, 1e9 - age_s))
    await backend.close()
    return keys


def evictor_of(root, share=0.5, *, capacity=FULL, vfs=None):
    evictor = new_evictor(root, vfs or HookedVfs(), capacity=capacity * ON_DISK, share=share)
    evictor.begin(None, is_new=False)
    return evictor


def turn(evictor, turns=1, *, capacity=0, hosts=None):
    """Do turns, each until its scan is complete, as if it were due; or with another capacity."""
    if capacity:
        evictor._capacity_bytes = capacity * ON_DISK
    for _ in range(turns):
        evictor._scan_due_s = 0.0
        evictor.turn(hosts or {})
        while evictor._scan is not None:
            evictor.turn(hosts or {})


def those_there(root, keys):
    names = {path.name for path in root.glob("*/??/*")}
    return [key for key in keys if key.hex() in names]


async def test_the_least_recently_used_chunks_of_the_tenant_above_its_share_leave(tmp_path):
    old, many = await stored(tmp_path / "kv", (B, 30), (A, 70))
    evictor = evictor_of(tmp_path / "kv", capacity=ROOMY)
    turn(evictor, 2)
    turn(evictor, capacity=FULL)
    assert those_there(tmp_path / "kv", old) == old
    assert those_there(tmp_path / "kv", many) == many[LEAVE:]
    assert evictor.resident_bytes == stored_bytes(tmp_path / "kv")


@pytest.mark.parametrize(
    ("share", "tenants"),
    [(1.0, (B, A)), (0.75, (B, A)), (0.5, (b"", b"")), (0.5, (B, b""))],
    ids=["no share", "none above", "no tags", "a flood without a tag"],
)
async def test_else_the_least_recently_used_of_all_leave(tmp_path, share, tenants):
    old, many = await stored(tmp_path / "kv", *zip(tenants, (30, 70), strict=True))
    evictor = evictor_of(tmp_path / "kv", share, capacity=ROOMY)
    turn(evictor, 2)
    turn(evictor, capacity=FULL)
    assert those_there(tmp_path / "kv", old) == old[LEAVE:]
    assert those_there(tmp_path / "kv", many) == many


async def test_a_tenant_gives_back_what_is_above_its_share_and_no_more(tmp_path):
    old, many = await stored(tmp_path / "kv", (B, 45), (A, 55))
    evictor = evictor_of(tmp_path / "kv", 0.5, capacity=ROOMY)
    turn(evictor, 2)
    turn(evictor, capacity=FULL)
    evictor = evictor_of(tmp_path / "kv", 0.5)
    turn(evictor, 2)
    assert len(those_there(tmp_path / "kv", old)) + len(those_there(tmp_path / "kv", many)) == 93


async def test_each_header_is_read_once_and_none_without_a_share_or_while_stores_wait(tmp_path):
    root = tmp_path / "kv"
    await stored(root, (B, 30), (A, 70))
    vfs = OpeningVfs()
    turn(evictor_of(root, 1.0, capacity=ROOMY, vfs=vfs), 3)
    evictor = evictor_of(root, capacity=ROOMY, vfs=vfs)
    turn(evictor)
    assert evictor.resident_bytes == CHUNKS * ON_DISK  # now processes may store
    turn(evictor)
    assert sorted(vfs.opened.values()) == [1] * CHUNKS
    for _ in range(3):
        evictor._scan_again_s = 0.0
        turn(evictor)
    more = open_folder(root)
    (key,) = keys_of(1, "more")
    assert await store(more, [key], A) == [True]
    await more.close()
    evictor._scan_again_s = 0.0
    turn(evictor)
    assert sorted(vfs.opened.values()) == [1] * (CHUNKS + 1)
    assert evictor.scans == 6
    shutil.rmtree(next(root.glob("?" * 64)))
    evictor._scan_again_s = 0.0
    turn(evictor)
    assert evictor._oldest.tags._known == {}


@pytest.mark.parametrize(("share", "scans"), [(1.0, 1), (0.5, 4)])
async def test_headers_are_read_while_the_folder_fills(tmp_path, share, scans):
    await stored(tmp_path / "kv", (A, 10))
    evictor = evictor_of(tmp_path / "kv", share, capacity=ROOMY)
    turn(evictor, 2)
    for chunks in range(0, 20, 2):
        record = host_record(stored_bytes=chunks * ON_DISK, largest_bytes=1)
        turn(evictor, hosts={"h": (record, 0.0)})
    assert evictor.scans == scans


async def test_time_to_read_headers_does_not_put_off_the_next_listing(tmp_path):
    await stored(tmp_path / "kv", (A, CHUNKS))
    vfs = OpeningVfs()
    vfs.delay_s = 0.01
    evictor = evictor_of(tmp_path / "kv", capacity=ROOMY, vfs=vfs)
    turn(evictor)
    began_s = time.monotonic()
    turn(evictor)
    assert evictor.scans == 2
    taken_s = time.monotonic() - began_s
    assert taken_s > CHUNKS * vfs.delay_s
    assert evictor._scan_due_s - time.monotonic() < taken_s * 5  # else 10 times as long as it took


async def test_of_more_files_than_one_scan_remembers_those_of_a_flood_are_found(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(scan, "MOST_OLDEST", 20)
    old, many = await stored(tmp_path / "kv", (B, 40), (A, 60))
    evictor = evictor_of(tmp_path / "kv", 0.3, capacity=ROOMY)
    turn(evictor, 2)
    turn(evictor, capacity=FULL)
    assert those_there(tmp_path / "kv", old) == old
    assert those_there(tmp_path / "kv", many) == many[LEAVE:]


async def test_damaged_and_foreign_files_are_nobodys_and_stop_no_eviction(tmp_path):
    root = tmp_path / "kv"
    old, many = await stored(root, (B, 30), (A, 70))
    paths = [path_of(root, key) for key in old]
    content = bytearray(paths[0].read_bytes())
    content[230] ^= 1  # in the tag
    paths[0].write_bytes(content)
    paths[1].write_bytes(b"")
    paths[2].unlink()
    paths[2].symlink_to("/etc/passwd")
    paths[3].unlink()
    os.mkfifo(paths[3])
    paths[4].unlink()
    paths[4].mkdir()
    paths[5].write_bytes(path_of(root, many[0]).read_bytes())  # named as another chunk
    paths[6].chmod(0)
    of_heads = calls_on("chunk", "open", "preadv")
    vfs = FailingVfs(3, errno.EIO, sticky=True, when=of_heads)
    for each in (FailingVfs(1, errno.ESTALE, when=of_heads), vfs, HookedVfs()):
        evictor = evictor_of(root, capacity=ROOMY, vfs=each)
        turn(evictor, 3)
    turn(evictor, capacity=CHUNKS)  # the damaged ones need less room
    assert those_there(root, old[7:]) == old[7:]
    assert len(those_there(root, many)) < 70


async def test_a_folder_that_cannot_be_listed_ends_no_eviction_of_known_files(tmp_path):
    old, many = await stored(tmp_path / "kv", (B, 30), (A, 70))
    vfs = FailingVfs(0, errno.EIO, sticky=True, when=lambda call, path: call == "listdir")
    evictor = evictor_of(tmp_path / "kv", capacity=ROOMY, vfs=vfs)
    turn(evictor, 2)
    vfs.nth = vfs.calls + 1
    turn(evictor, capacity=FULL)
    assert those_there(tmp_path / "kv", [*old, *many]) == [*old, *many[LEAVE:]]


async def test_two_evictors_keep_to_the_shares_and_evict_at_most_too_much(tmp_path):
    root = tmp_path / "kv"
    old, many = await stored(root, (B, 30), (A, 70))
    evictors = [evictor_of(root, capacity=ROOMY) for _ in range(2)]
    for each in evictors:
        turn(each, 2)
    for each in evictors:
        turn(each, capacity=FULL)
    assert those_there(root, old) == old
    assert len(those_there(root, many)) >= 70 - 2 * LEAVE
    for each in evictors:
        each._scan_again_s = 0.0
        turn(each)
        assert each.resident_bytes == stored_bytes(root)


@pytest.mark.parametrize(
    "form", ["plain", "encrypted", pytest.param("secret", marks=pytest.mark.chaos)]
)
async def test_a_flood_from_two_hosts_leaves_the_chunks_of_another_tenant(
    tmp_path, monkeypatch, encryption, form
):
    monkeypatch.setattr(upkeep, "TURN_S", 0.05)
    monkeypatch.setattr(upkeep, "_LONG_PAUSE_S", 0.02)
    root, capacity, most = tmp_path / "kv", 100 * ON_DISK, 0
    settings = {"root": str(root), "capacity": capacity, "trust_parent_folders": True}
    if form == "secret":
        (tmp_path / "secret").write_bytes(bytes(range(32)))
        settings["secret_file"] = str(tmp_path / "secret")
    elif form == "encrypted":
        settings["encryption"] = encryption
    settings["tenant_share"] = 0.5
    hosts = [open_backend("folder", settings, "folder") for _ in range(2)]
    kept = keys_of(25, "kept")
    assert await store_at_last(hosts[1], kept, B)
    for number in range(30):
        for host in hosts:
            assert await store_at_last(host, keys_of(3, f"{number}{id(host)}"), A)
            most = max(most, stored_bytes(root))
    assert those_there(root, kept) == kept
    assert 0.8 * capacity < most <= capacity
    assert sum(host.counters().get("evicted", 0) for host in hosts) > 80
    await asyncio.gather(*(host.close() for host in hosts))
