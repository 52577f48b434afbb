"""What each call asks of the mount: metadata operations are what a file server has least of."""

import asyncio
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from disk_parts import SIZE, load, until
from folder_parts import host_record, new_evictor, open_folder, store, store_at_last, stored

from kvoffload.backends.disk.paths import SHARDS
from kvoffload.backends.folder import known, upkeep
from kvoffload.backends.folder.records import LeaseRecord, Records
from kvoffload.backends.folder.scan import Scan
from kvoffload.backends.header import ALIGNED_BYTES, namespace_digest
from kvoffload.io.remote_tier import ANSWER_S
from kvoffload.testing.backends import filled, keys_of
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import client_over
from tests.support.vfs import HookedVfs, kind_of

FREE = ("preadv", "pwritev", "close", "fstat")
"""Calls on an open file: data, and facts that came with its opening."""


class CountingVfs(HookedVfs):
    """Notes each call on chunks, and on what is written before it is a chunk."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def around(self, call, path, perform):
        if kind_of(path) in ("chunk", "shard", "namespace"):
            self.calls.append((call, path))
        return perform()

    def taken(self):
        """Return how often each metadata operation was made since the last call."""
        calls, self.calls = self.calls, []
        return Counter(call for call, _ in calls if call not in FREE)


@pytest.fixture(params=[1.0, 0.5], ids=["no shares", "shares"])
async def counting(request, tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "TURN_S", 3600)
    vfs = CountingVfs()
    backend = open_folder(tmp_path / "share", vfs=vfs, tenant_share=request.param)
    for shard in SHARDS:
        (tmp_path / "share" / namespace_digest("folder").hex() / shard).mkdir(parents=True)
    await backend.describe({"model": "m"})
    vfs.taken()
    return backend, vfs


async def test_a_store_creates_and_renames_and_a_load_opens_and_a_known_chunk_is_not_looked_up(
    counting,
):
    backend, vfs = counting
    keys = keys_of(50, "new")
    assert await backend.contains(keys) == [False] * 50
    assert vfs.taken() == {"lstat": 50}
    assert await store(backend, keys, b"t" * 16) == [True] * 50
    assert vfs.taken() == {"open": 50, "rename": 50}
    assert await load(backend, keys) == [True] * 50
    assert vfs.taken() == {"open": 50}
    assert await backend.contains(keys) == [True] * 50
    assert vfs.taken() == {}
    assert await store(backend, keys) == [True] * 50
    assert vfs.taken() == {"lstat": 50}  # is it still there? no byte is written again


async def test_a_load_asks_for_the_facts_of_a_file_once_an_hour(counting, tmp_path, monkeypatch):
    backend, vfs = counting
    other, stored, shared = open_folder(tmp_path / "share"), keys_of(9, "new"), keys_of(9, "more")
    assert await store_at_last(other, shared)
    assert await store(backend, stored) == [True] * 9
    assert await until(lambda: backend._records.age_s(0))  # it knows the server's clock
    asked, began_s = [], time.monotonic()
    for passed_s in (0, 0, known.RENEW_S - 60, known.RENEW_S + 60):
        now_s = began_s + passed_s
        monkeypatch.setattr(known, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        vfs.calls.clear()
        assert await load(backend, stored + shared) == [True] * 18
        asked.append(sum(call == "fstat" for call, _ in vfs.calls))
    assert asked == [9, 0, 0, 18]


async def test_a_load_of_an_own_chunk_reads_its_file_and_not_past_the_end(tmp_path):
    """FUSE asks its server how long a file is by now, for a read past what it knows."""
    asked = []

    class Noting(HookedVfs):
        def preadv(self, fd, buffers, offset):
            if kind_of(self._paths[fd]) == "chunk":
                asked.append((offset, sum(map(len, buffers))))
            return super().preadv(fd, buffers, offset)

    backend, keys = open_folder(tmp_path / "share", vfs=Noting()), keys_of(3)
    assert await store(backend, keys) == [True] * 3
    assert await load(backend, keys) == [True] * 3
    assert asked == [(0, ALIGNED_BYTES + SIZE)] * 3


async def test_the_thread_that_moves_a_chunk_computes_its_checksum(tmp_path, monkeypatch):
    backend, keys, threads = open_folder(tmp_path / "share"), keys_of(9), Counter()

    def noted(name, compute):
        def on_thread(*chunk):
            threads[name, threading.current_thread().name.rpartition("-")[0]] += 1
            return compute(*chunk)

        monkeypatch.setattr(backend._frames, name, on_thread)

    noted("pack", backend._frames.pack)
    noted("verdict", backend._frames.verdict)
    assert await store(backend, keys) == [True] * 9
    assert await load(backend, keys) == [True] * 9
    assert threads == dict.fromkeys(
        (("pack", "kvoffload-folder"), ("verdict", "kvoffload-folder")), 9
    )


async def test_another_hosts_chunk_is_looked_up_once(counting, tmp_path):
    backend, vfs = counting
    other, keys = open_folder(tmp_path / "share"), keys_of(50, "new")
    for _ in range(50):  # a new process stores little until it is counted
        if all(await store(other, keys)):
            break
        backend._housekeeper.room._wake()
        await asyncio.sleep(0.05)
    vfs.taken()
    for expected in ({"lstat": 50}, {}):
        assert await backend.contains(keys) == [True] * 50
        assert vfs.taken() == expected


def test_an_engine_asks_for_an_absent_chunk_once_in_two_seconds(tmp_path, until):
    """Of this tier too: its presence cache is the cache of absent keys, so there is no second."""
    vfs, keys, now_s = CountingVfs(), keys_of(50), 0.0
    client = client_over(
        {"folder": open_folder(tmp_path / "share", vfs=vfs)}, Slab(1, SIZE), lookup_timeout_s=30.0
    )
    tier = client.tiers["folder"]
    tier._cache._clock = lambda: now_s

    def answers():
        found = until(lambda: [known] if None not in (known := [*map(tier.holds, keys)]) else None)
        return found[0]

    def asked():
        return sum(call == "lstat" and kind_of(path) == "chunk" for call, path in vfs.calls)

    for _ in range(3):
        assert answers() == [False] * 50
        assert asked() == 50
    other = open_folder(tmp_path / "share")
    assert asyncio.run(store_at_last(other, keys[:9]))
    now_s = ANSWER_S
    assert answers() == [True] * 9 + [False] * 41
    asyncio.run(other.close())
    client.close()


async def test_the_tail_of_a_job_is_written_first_and_so_leaves_first(tmp_path):
    vfs = CountingVfs()
    backend, keys = open_folder(tmp_path / "share", vfs=vfs, threads=1), keys_of(9)
    answers = await backend.write(keys, filled(keys, SIZE))
    assert answers == [True] * 9
    renamed = [path for call, path in vfs.calls if call == "rename" and "/." not in path]
    assert [path.rsplit("/")[-1] for path in renamed] == [key.hex() for key in keys[::-1]]


async def test_a_process_that_joins_during_a_scan_keeps_its_limit_and_its_bytes(tmp_path):
    root = str(tmp_path / "share")
    await stored(root, keys_of(4))
    evictor = new_evictor(root, HookedVfs())
    told = {"holder": "", "host": "", "capacity_bytes": 1 << 30, "resident_bytes": 0}
    told |= {"unsure_bytes": 1, "newcomer_bytes": 0, "counted": {}, "limits": {}}
    evictor.begin(LeaseRecord(**told), is_new=False)  # unsure: it scans in its first turn
    joined = host_record(stored_bytes=1000, limit_bytes=5000, largest_bytes=100)
    evictor.turn({"new": (joined, 0.0)})
    assert evictor.scans == 1
    assert evictor.resident_bytes == 4 * 65536 + 1000
    assert evictor.limits["new"] > 5000
    evictor.turn({"new": (joined, 0.0)})
    assert evictor.resident_bytes == 4 * 65536 + 1000


async def test_a_scan_of_many_names_lists_each_folder_once_and_remembers_few(tmp_path, monkeypatch):
    """Ten million names: 256 listings, memory for the oldest alone, two calls an eviction."""
    monkeypatch.setattr("kvoffload.backends.folder.scan.MOST_OLDEST", 100)
    backend = open_folder(tmp_path / "share")
    keys = keys_of(1000)
    await backend.write(keys, filled(keys, 64))
    await backend.close()
    vfs, gone = CountingVfs(), []
    root = str(tmp_path / "share")
    evictor = new_evictor(root, vfs, capacity=900 << 13, evicted=lambda *names: gone.append(names))
    evictor.begin(None, is_new=False)
    for _ in range(3):
        evictor._scan_due_s = 0.0  # scans are rare: they take a tenth of the time at most
        evictor.turn({})
    assert evictor.resident_bytes <= 810 << 13
    calls = vfs.taken()
    assert calls["unlink"] == len(gone) >= 190
    assert calls["lstat"] <= len(gone) + 2
    begun = evictor.scans + (evictor._scan is not None)
    assert 256 * evictor.scans <= calls["listdir"] <= 256 * begun
    assert evictor.scans <= 2 + len(gone) // 100
    assert len(evictor._oldest) <= 100


async def test_a_file_that_is_evicted_during_a_scan_is_subtracted_once(tmp_path):
    backend, keys = open_folder(tmp_path / "share"), keys_of(300)
    await backend.write(keys, filled(keys, 64))
    await backend.close()
    vfs, root = HookedVfs(), str(tmp_path / "share")
    records = Records(vfs, root, "test")
    evictor = new_evictor(root, vfs)
    evictor.begin(None, is_new=False)
    evictor.turn({})
    evictor._scan = Scan(vfs, root, records)
    while len(evictor._scan.passed) < 128:  # half of the shards
        evictor._scan.advance(0.0)
    for left in (200, 50):
        evictor._goal_bytes = left << 13
        evictor._evict(time.monotonic() + 60)
        if left == 200:
            assert evictor._advance(time.monotonic() + 60)
        files = len(list(tmp_path.glob("share/*/??/*")))
        assert evictor.resident_bytes == files << 13 == left << 13
