"""Runs of chunks under faults: each chunk is answered right, and the accounting stays exact."""

import asyncio
import errno
import shutil

import pytest
from disk_parts import (
    ON_DISK,
    SIZE,
    chunk_bytes,
    full,
    let_policy_refuse,
    load,
    open_disk,
    table_of,
    write,
)

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.index import name_of
from kvoffload.backends.encryption import CipherSeal
from kvoffload.config import ByteSize
from kvoffload.testing import payload_of
from kvoffload.testing.backends import filled, keys_of
from tests.support.vfs import BesideVfs, CountedWrites, FailingVfs, HookedVfs, kind_of

SMALL, SMALL_ON_DISK = 8192, 12288
PLACES = 24
GENERATIONS = 2
"""The first finds free slots, the second overwrites chunks."""


def open_slots(root, vfs=None, **settings):
    return open_disk(root, form="segments", vfs=vfs, **settings)


async def life(root, nth, error, when):
    """Store, overwrite and load runs while a call fails; return the calls made."""
    vfs = FailingVfs(0, error, when=when)
    options = DiskOptions(
        root=str(root),
        capacity=ByteSize(PLACES * SMALL_ON_DISK),
        min_free=ByteSize(0),
        high_watermark=1.0,
        low_watermark=1.0,
        policy="lru",
        io="buffered",
    )
    backend = DiskBackend(options, "runs", vfs=vfs)
    assert await asyncio.to_thread(backend.wait_ready, 60)
    first = keys_of(4, "first")
    assert all(await backend.write(first, filled(first, SMALL)))
    vfs.calls, vfs.nth = 0, nth
    for generation in range(GENERATIONS):
        keys = keys_of(16, f"{generation}")
        await backend.write(keys, filled(keys, SMALL))
        assert chunk_bytes(root) <= PLACES * SMALL_ON_DISK
        await load(backend, keys, SMALL)
    backend._store.record_use()
    calls = vfs.calls
    vfs.heal()
    for generation in range(GENERATIONS):
        await load(backend, keys_of(16, f"{generation}"), SMALL)
    backend._store.segments.clean_up()
    num_known = len(backend._store.index)
    assert backend._store.root.quota.refresh() == chunk_bytes(root) == num_known * SMALL_ON_DISK
    last = keys_of(PLACES, "last")
    assert all(await backend.write(last, filled(last, SMALL)))
    assert all(await load(backend, last, SMALL))
    await backend.close()
    shutil.rmtree(root)
    return calls


async def test_each_call_on_a_segment_fails_once(ram_path):
    def when(call, path):
        return kind_of(path) in ("table", "slots") and call != "lock_part"

    nth = 1
    while await life(ram_path / f"{nth}", nth, errno.EIO, when) >= nth:
        nth += 1
    assert nth > 120


async def is_exact(backend, root):
    backend._store.segments.clean_up()
    num_known = len(backend._store.index)
    assert backend.usage().resident_bytes == chunk_bytes(root) == num_known * ON_DISK
    assert backend._store.space.in_flight_bytes == 0


@pytest.mark.parametrize("kind", ["slots", "table"])
async def test_an_unforeseen_error_of_a_run_leaks_no_slot(tmp_path, kind):
    vfs = CountedWrites(RuntimeError("a test"))
    backend = open_slots(tmp_path, vfs)
    first, keys = keys_of(1, "first"), keys_of(4)
    assert await write(backend, first) == [True]
    vfs.writes.clear()
    vfs.failing = {"slots": {1}} if kind == "slots" else {"table": {2}}
    assert await write(backend, keys) == [False] * 4
    await is_exact(backend, tmp_path)
    assert all(await write(backend, keys))
    await is_exact(backend, tmp_path)


async def test_a_policy_that_raises_while_the_table_cannot_be_written(tmp_path, monkeypatch):
    vfs = CountedWrites()
    backend = open_slots(tmp_path, vfs)
    first, keys = keys_of(1, "first"), keys_of(4)
    assert await write(backend, first) == [True]
    let_policy_refuse(backend, keys[1], monkeypatch)
    vfs.writes.clear()
    vfs.failing = {"table": {3}}  # the first that takes a chunk back
    assert await write(backend, keys) == [False] * 4
    monkeypatch.undo()
    await is_exact(backend, tmp_path)
    assert all(await write(backend, keys))
    assert all(await load(backend, keys))
    await is_exact(backend, tmp_path)


async def test_each_refused_chunk_of_a_run_is_counted_once(tmp_path):
    backend = open_slots(tmp_path, capacity=ByteSize(ON_DISK // 2))
    assert await write(backend, keys_of(5)) == [False] * 5
    assert backend.counters() == {"refused_size": 5}


async def test_a_run_that_fits_in_part_is_stored_in_part(tmp_path):
    backend = open_slots(tmp_path, **full(3))
    backend._store.ready.clear()
    answers = await write(backend, keys_of(5))
    assert answers == [True] * 3 + [False] * 2
    assert backend.counters() == {"refused_capacity": 2}
    await is_exact(backend, tmp_path)


class HealingVfs(FailingVfs):
    """Works again once the place of a chunk is freed."""

    def around(self, call, path, perform):
        if call == "punch":
            self.heal()
        return super().around(call, path, perform)


async def test_a_store_that_the_ledger_refused_counts_as_that_though_a_release_works(tmp_path):
    def when(call, path):
        return call == "pwritev" and kind_of(path) == "ledger"

    vfs = HealingVfs(0, errno.EIO, sticky=True, when=when)
    backend = open_slots(tmp_path, vfs, **full(3))
    assert await write(backend, keys_of(3)) == [True] * 3
    vfs.nth = vfs.calls + 1
    assert await write(backend, keys_of(1, "next")) == [False]
    assert backend.counters() == {"evicted": 1, "write_io_EIO": 1}
    await is_exact(backend, tmp_path)


def two_on(root, vfs, places, io="buffered"):
    room = full(places)
    room |= {"policy": "lru", "io": io}
    return open_slots(root, vfs, **room), open_slots(root, **room)


async def both_are_exact(one, two, root):
    for backend in (one, two):
        backend._store.segments.refresh(0)
        backend._store.segments.clean_up()
    assert one._store.root.quota.refresh() == chunk_bytes(root)
    for backend in (one, two):
        assert backend._store.space.in_flight_bytes == 0


@pytest.mark.parametrize("at", [0, 3, 7])
async def test_another_process_removes_a_chunk_of_a_run_that_is_claimed(tmp_path, at):
    vfs = BesideVfs()
    one, two = two_on(tmp_path, vfs, 128)
    old, new = keys_of(128, "old"), keys_of(32, "new")
    assert all(await write(one, old))
    two._store.segments.refresh(0)
    assert all(await load(two, old))
    victims = [n[2:] for n in one._store.segments.in_order([name_of(0, key) for key in old])]
    gone = [victims[i + at] for i in range(0, 128, 8)]
    vfs.on("lock_part:table:before", lambda: [two.delete(key) for key in gone])
    answers = await write(one, new)
    assert all(answers)
    two._store.segments.refresh(0)
    await load(one, old)
    await load(two, old)
    assert all(await load(one, new))
    assert all(await load(two, new))
    assert not any(await load(one, gone))
    for backend in (one, two):
        assert not [name for name in backend.counters() if "corrupt" in name]
    await both_are_exact(one, two, tmp_path)


@pytest.mark.parametrize("call", ["read_cached", "preadv"])
async def test_a_run_is_overwritten_by_other_chunks_while_it_is_read(tmp_path, kernel_files, call):
    vfs = BesideVfs()
    one, two = two_on(tmp_path, vfs, 128, "auto" if call == "read_cached" else "buffered")
    old, new = keys_of(8, "old"), keys_of(8, "new")
    assert all(await write(two, old))
    one._store.segments.refresh(0)
    assert all(await load(one, old))

    def replace():
        for key in old[2:5]:
            two.delete(key)
        for key, chunk in zip(new, filled(new, SIZE), strict=True):
            assert two.store(key, chunk)

    vfs.on(f"{call}:slots:before", replace)
    answers = await load(one, old)
    assert [bool(answer) for answer in answers] == [True] * 2 + [False] * 3 + [True] * 3
    assert not [name for name in one.counters() if "corrupt" in name]
    one._store.segments.refresh(0)
    assert all(await load(one, new))
    await both_are_exact(one, two, tmp_path)


async def test_another_process_stores_chunks_of_a_run_meanwhile(tmp_path):
    vfs = BesideVfs()
    one, two = two_on(tmp_path, vfs, 128)
    keys = keys_of(8)
    assert all(await write(one, keys_of(1, "first")))

    def store():
        for key, chunk in zip(keys[3:5], filled(keys[3:5], SIZE), strict=True):
            assert two.store(key, chunk)
        one._store.segments.refresh(0)

    vfs.on("pwritev:slots:before", store)
    assert all(await write(one, keys))
    assert not vfs.acts
    assert all(await load(one, keys))
    two._store.segments.refresh(0)
    assert all(await load(two, keys))
    await both_are_exact(one, two, tmp_path)
    assert chunk_bytes(tmp_path) == 9 * ON_DISK


async def test_another_process_marks_a_chunk_as_damaged_while_uses_are_noted(tmp_path):
    vfs = BesideVfs()
    one, two = two_on(tmp_path, vfs, 128)
    keys = keys_of(8)
    assert all(await write(one, keys))
    two._store.segments.refresh(0)
    assert all(await load(two, keys))
    assert all(await load(one, keys))
    vfs.on("lock_part:table:before", lambda: two.delete(keys[4]))
    one._store.record_use()
    answers = await load(one, keys)
    assert [bool(answer) for answer in answers] == [True] * 4 + [False] + [True] * 3
    assert not [name for name in one.counters() if "corrupt" in name]
    await both_are_exact(one, two, tmp_path)


async def test_evicting_for_a_run_takes_no_tenant_below_its_share(tmp_path):
    backend = open_slots(tmp_path, **full(128), policy="lru", tenant_share=0.5)
    small, large, new = keys_of(63, "small"), keys_of(65, "large"), keys_of(8, "new")
    for tenant, keys in ((b"small", small), (b"large", large), (b"new", new)):
        for start in range(0, len(keys), 8):
            part = keys[start : start + 8]
            chunks, tenants = filled(part, SIZE), [tenant] * len(part)
            assert all(await backend.write(part, chunks, tenants))
    assert sum(map(backend.holds, large)) == 64
    assert sum(map(backend.holds, small)) == 56
    assert all(await load(backend, new))
    await is_exact(backend, tmp_path)


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
async def test_memory_and_lengths_of_every_kind(tmp_path, io, is_encrypted):
    backend = open_slots(tmp_path, io=io)
    if is_encrypted:
        backend.encrypt_with(CipherSeal([b"0123456789abcdef" * 4]))
    sizes = [8192] * 5 + [4096] * 3 + [5000] * 3 + [8192] * 4 + [0] * 2 + [262144] * 3
    keys = keys_of(len(sizes))
    chunks = [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]
    shifted = [memoryview(bytearray(b"x" + chunk))[1:] for chunk in chunks]
    tenants = [bytes([65 + i % 3]) * 16 for i in range(len(keys))]
    assert all(await backend.write(keys, shifted, tenants))
    for order in (range(len(keys)), range(5), range(8), range(11, 15), range(17, 20)):
        for shift in (0, 1):
            into = [memoryview(bytearray(shift + sizes[i]))[shift:] for i in order]
            assert all(await backend.read([keys[i] for i in order], into))
            assert [bytes(each) for each in into] == [chunks[i] for i in order]
    wrong = [memoryview(bytearray(4096)) for _ in range(5)]
    assert not any(await backend.read(keys[:5], wrong))  # of another length
    assert all(await backend.write([b"another"], [memoryview(b"y" * 8192)]))


class Shortening(HookedVfs):
    """Writes half of what a test names by its number, and asks what the table has after it."""

    def __init__(self, look):
        super().__init__()
        self.look, self.left, self.seen = look, 0, None

    def pwritev(self, fd, buffers, offset):
        if kind_of(self._paths[fd]) == "table" and self.left:
            self.left -= 1
            if not self.left:
                self.seen = ()
                return super().pwritev(fd, [bytes(buffers[0])[: len(buffers[0]) // 2]], offset)
        elif kind_of(self._paths[fd]) == "slots" and self.seen == ():
            self.seen = self.look()
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("step", ["mark", "publish", "claim"])
async def test_a_run_of_which_the_table_takes_a_part_is_taken_back(tmp_path, step):
    """As at the end of a page of the table, if the file system is full."""

    def look():
        tables = [table_of(path) for path in tmp_path.glob("*/segments/*.table")]
        return chunk_bytes(tmp_path) // ON_DISK, {key for table in tables for key in table}

    vfs = Shortening(look)
    backend = open_slots(tmp_path, vfs, policy="lru", **full(128))
    old, keys = keys_of(128 if step == "claim" else 1, "old"), keys_of(8)
    assert all(await write(backend, old))
    vfs.left = 2 if step == "publish" else 1
    assert all(await write(backend, keys))
    used, known = vfs.seen
    assert used == {"mark": 2, "publish": 9, "claim": 128}[step]
    assert not known & {*keys}
    await is_exact(backend, tmp_path)
    assert all(await load(backend, keys))


async def test_chunks_in_slots_of_two_processes_are_runs_as_well(tmp_path):
    vfs = CountedWrites()
    one, two = two_on(tmp_path, vfs, 128)
    mine, others = keys_of(16, "mine"), keys_of(16, "others")
    assert all(await write(one, mine))
    assert all(await write(two, others))
    one._store.segments.refresh(0)
    assert all(await load(one, [*mine, *others]))
    vfs.writes.clear()
    one._store.record_use()
    assert vfs.writes["table"] <= 1 + len(others)  # those of the other process one by one


async def test_a_policy_that_raises_among_victims_keeps_all_evictable(tmp_path, monkeypatch):
    backend = open_slots(tmp_path, policy="lru", **full(128))
    assert all(await write(backend, keys_of(128, "old")))
    index, left = backend._store.index, [5]
    victims = index._order.victims

    def raising(count):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("a test")
        return victims(count)

    monkeypatch.setattr(index._order, "victims", raising)
    assert await write(backend, keys_of(8, "new")) == [False] * 8
    assert index.is_whole
    await is_exact(backend, tmp_path)
    assert all(await write(backend, keys_of(8, "new")))
    await is_exact(backend, tmp_path)
