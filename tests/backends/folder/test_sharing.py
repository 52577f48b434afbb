"""Two engines on two mounts of one folder: what one stores the other finds; one of them evicts."""

import asyncio
import os
import time
from itertools import count

import pytest
from disk_parts import ON_DISK, SIZE, load, until
from folder_parts import open_folder, path_of, store, store_at_last, stored_bytes

from kvoffload.backends.folder import known, upkeep
from kvoffload.backends.folder.places import LEASE
from kvoffload.backends.header import ALIGNED_BYTES, pack_header
from kvoffload.testing.backends import filled, keys_of


async def test_a_chunk_of_one_host_is_found_and_read_by_the_other(mounts):
    one, two = (open_folder(mount / "kv") for mount in mounts)
    keys = keys_of(20)
    assert await two.contains(keys) == [False] * 20
    assert await store(one, keys) == [True] * 20
    assert await two.contains(keys) == [True] * 20
    assert await load(two, keys) == [True] * 20
    assert two.place != one.place


async def test_the_capacity_holds_for_all_hosts_and_one_of_them_evicts(mounts, monkeypatch):
    monkeypatch.setattr(upkeep, "TURN_S", 0.05)
    capacity, root = 200 * ON_DISK, mounts[0] / "kv"
    hosts = [open_folder(mount / "kv", capacity=capacity) for mount in (*mounts, mounts[0])]
    most, is_over = 0, False

    async def work(number, host):
        stored, until_s = 0, time.monotonic() + 60
        for turn in count():
            stored += sum(await store(host, keys_of(5, f"{number}-{turn}")))
            if stored > 100 or time.monotonic() > until_s:
                return stored

    async def watch():
        nonlocal most
        while not is_over:
            most = max(most, stored_bytes(root))
            await asyncio.sleep(0.01)

    watching = asyncio.ensure_future(watch())
    stored = await asyncio.gather(*(work(i, host) for i, host in enumerate(hosts)))
    is_over = True
    await watching
    assert most <= capacity * 1.02
    assert most > capacity * 0.8
    assert min(stored) > 100  # each had its share
    assert sum(host.usage().gauges["evictor"] for host in hosts) == 1
    await asyncio.gather(*(host.close() for host in hosts))


async def test_a_process_that_tells_late_has_its_room_reserved(mounts):
    """Another host may fill the store in the second before it tells what it has stored."""
    one, two = (open_folder(mount / "kv", capacity=64 * ON_DISK) for mount in mounts)
    assert await until(lambda: two._housekeeper.room.limit_bytes)
    two._housekeeper._turn = lambda: None  # it tells nothing, and learns of no lower limit
    stored = 0
    for turn in range(40):
        stored += sum(await store(two, keys_of(1, f"late{turn}")))
        await store(one, keys_of(3, f"new{turn}"))
        await asyncio.sleep(0.01)
        assert stored_bytes(mounts[0] / "kv") <= 64 * ON_DISK
    assert stored > 0
    del two._housekeeper._turn


async def test_the_least_recently_used_of_all_hosts_leave_first(mounts, monkeypatch):
    monkeypatch.setattr(upkeep, "TURN_S", 0.05)
    one, two = (open_folder(mount / "kv", capacity=64 * ON_DISK) for mount in mounts)
    used, old = keys_of(8, "used"), keys_of(16, "old")
    assert await store_at_last(two, [*used, *old])
    for key in used:
        os.utime(path_of(mounts[0], key))
    new = iter(keys_of(3000))
    while one.counters().get("evicted", 0) < 4:
        await store(one, [next(new)])
        await asyncio.sleep(0.01)
    three = open_folder(mounts[1] / "kv", capacity=64 * ON_DISK)
    assert await three.contains(used) == [True] * 8
    assert not all(await three.contains(old))
    await asyncio.gather(*(each.close() for each in (one, two, three)))


async def test_what_another_host_evicted_is_a_miss_that_is_told_once(mounts):
    one, two = (open_folder(mount / "kv") for mount in mounts)
    keys = keys_of(3)
    await store(one, keys)
    await two.remove(keys[:1])
    assert await one.contains(keys) == [True] * 3  # its own it knows
    assert await load(one, keys) == [False, True, True]
    assert [each.reason for each in one.take_removals()] == ["vanished"]
    assert await one.contains(keys) == [False, True, True]
    assert one.take_removals() == []
    assert await store(one, keys) == [True] * 3


@pytest.mark.parametrize("skew_s", [600, pytest.param(-600, marks=pytest.mark.chaos)])
async def test_a_dead_evictors_lease_ends_by_the_servers_clock(mounts, monkeypatch, skew_s):
    real_s, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real_s() + skew_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(skew_s * 1e9))
    monkeypatch.setattr(upkeep, "LEASE_S", 1.0)
    monkeypatch.setattr(upkeep, "_RENEW_S", 0.1)
    monkeypatch.setattr(upkeep, "TURN_S", 0.05)
    one, two = (open_folder(mount / "kv") for mount in mounts)
    assert [each.usage().gauges["evictor"] for each in (one, two)] == [1, 0]
    await asyncio.sleep(1.3)  # a lease that is renewed does not end
    assert [each.usage().gauges["evictor"] for each in (one, two)] == [1, 0]
    one._housekeeper._turn = lambda: None  # stopped, as by SIGSTOP
    assert await until(lambda: two.usage().gauges["evictor"] == 1, 10)
    del one._housekeeper._turn  # thawed
    assert await until(lambda: one.usage().gauges["evictor"] == 0, 10)
    keys = keys_of(4)
    assert await store(one, keys) == [True] * 4
    assert await load(two, keys) == [True] * 4


async def test_an_evictor_that_closes_hands_over_at_once(mounts):
    one, two = (open_folder(mount / "kv") for mount in mounts)
    keys = keys_of(10)
    await store(one, keys)
    await one.close()
    two._housekeeper.room._wake()
    assert await until(lambda: two.usage().gauges["evictor"] == 1, 5)
    assert two.usage().resident_bytes == 10 * ON_DISK  # as the lease told, without a scan
    assert two._housekeeper._evictor.scans == 0


async def test_a_root_without_a_usable_lease_is_counted_again(mounts):
    one = open_folder(mounts[0] / "kv")
    await store(one, keys_of(10))
    await one.close()
    (mounts[0] / "kv" / LEASE).write_bytes(b"{")
    os.utime(mounts[0] / "kv" / LEASE, (1, 1))
    two = open_folder(mounts[1] / "kv")
    assert await until(lambda: two.usage().resident_bytes == 10 * ON_DISK)
    assert await store(two, keys_of(1, "more")) == [True]


async def test_a_use_is_written_to_the_files_time_once_an_hour(mounts, monkeypatch):
    monkeypatch.setattr(upkeep, "TURN_S", 0.02)
    one, two = (open_folder(mount / "kv") for mount in mounts)
    keys = keys_of(2)
    await store(one, keys)
    for age_s, key in zip((10, known.RENEW_S + 60), keys, strict=True):
        then = time.time() - age_s
        os.utime(path_of(mounts[0], key), (then, then))
    before = [path_of(mounts[0], key).stat().st_mtime for key in keys]
    for _ in range(3):
        await load(two, keys)
        await asyncio.sleep(0.1)
    after = [path_of(mounts[0], key).stat().st_mtime for key in keys]
    assert after[0] == before[0]
    assert abs(after[1] - time.time()) < 10
    assert two.counters()["time_renewed"] == 1


async def test_hosts_with_a_secret_share_and_those_with_another_see_nothing(mounts, tmp_path):
    secrets = []
    for name in ("a", "b"):
        secrets.append(tmp_path / name)
        secrets[-1].write_bytes(os.urandom(32).hex().encode())
    one = open_folder(mounts[0] / "kv", secret_file=str(secrets[0]))
    two = open_folder(mounts[1] / "kv", secret_file=str(secrets[0]))
    other = open_folder(mounts[1] / "kv", secret_file=str(secrets[1]))
    plain = open_folder(mounts[1] / "kv")
    keys = keys_of(2)
    await store(one, keys)
    assert await load(two, keys) == [True] * 2
    for stranger in (other, plain):
        assert await load(stranger, keys) == [False] * 2
        assert "corrupt_mac" not in stranger.counters()
    # Who can write to the folder, and lacks the secret, makes no chunk of it.
    path, chunk = path_of(mounts[0], keys[0]), filled(keys, SIZE)[0]
    digest = bytes.fromhex(path.parents[1].name)
    path.write_bytes(pack_header(keys[0], digest, chunk, header_bytes=ALIGNED_BYTES) + chunk)
    assert await load(two, keys) == [False, True]
    assert two.counters()["corrupt_mac"] == 1
    assert not path.exists()
    await asyncio.gather(*(each.close() for each in (one, two, other, plain)))
