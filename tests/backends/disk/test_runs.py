"""Chunks in slots that follow one another are moved by one call; each stands by itself."""

import time
from collections import Counter

import pytest
from disk_parts import (
    ON_DISK,
    chunk_bytes,
    flip_chunk,
    full,
    let_policy_refuse,
    load,
    open_disk,
    write,
    write_each,
)

from kvoffload.backends.base import ReadResult, WriteResult
from kvoffload.backends.disk.chunk_file import MOST_IN_RUN
from kvoffload.backends.disk.index import name_of
from kvoffload.testing import payload_of
from kvoffload.testing.backends import keys_of, slots
from tests.support.vfs import CountedWrites, HookedVfs

READS = "read_cached", "preadv"


class CountingVfs(HookedVfs):
    """Counts reads of slots, but not what a file system refuses: tmpfs has no RWF_NOWAIT."""

    def __init__(self):
        super().__init__()
        self.reads = Counter()

    def around(self, call, path, perform):
        answer = perform()
        if call in READS and path.endswith(".slots"):
            self.reads[call] += 1
        return answer


def open_with(vfs, root, **settings):
    return open_disk(root, form="segments", vfs=vfs, **settings)


async def test_a_run_is_one_read(tmp_path):
    vfs = CountingVfs()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(2 * MOST_IN_RUN + 1)
    assert all(await write(backend, keys))
    assert await load(backend, keys) == [True] * len(keys)
    assert vfs.reads.total() == 3


@pytest.mark.parametrize(("kib", "in_a_run"), [(128, 8), (256, 4)])
async def test_a_run_of_larger_chunks_has_a_mib(tmp_path, kib, in_a_run):
    vfs = CountingVfs()
    # One thread: of two, the second may take its slots first, and a run ends where they meet.
    backend = open_with(vfs, tmp_path, write_threads=1)
    size, keys = kib << 10, keys_of(2 * in_a_run)
    chunks = [memoryview(payload_of(key, size)) for key in keys]
    assert all(await backend.write(keys, chunks))
    vfs.reads.clear()
    into = slots(len(keys), size)
    assert await backend.read(keys, into) == [True] * len(keys)
    assert [*into] == chunks
    assert vfs.reads.total() == 2


async def test_only_neighbours_in_one_order_are_a_run(tmp_path):
    vfs = CountingVfs()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(6)
    assert all(await write_each(backend, keys))
    wanted = [keys[0], keys[2], keys[1], *keys[3:]]
    assert await load(backend, wanted) == [True] * 6
    assert vfs.reads.total() == 4  # the last three are neighbours


async def test_damage_in_a_run_is_one_miss(tmp_path):
    backend = open_with(CountingVfs(), tmp_path)
    keys = keys_of(5)
    assert all(await write_each(backend, keys))
    flip_chunk(tmp_path, keys[2], -1)
    answers = await load(backend, keys)
    assert answers == [True, True, ReadResult.CORRUPT, True, True]
    assert backend.counters()["corrupt_payload"] == 1


async def test_missing_chunks_end_a_run(tmp_path):
    backend = open_with(CountingVfs(), tmp_path)
    keys = keys_of(6)
    assert all(await write_each(backend, keys))
    await backend.remove(keys[1:3])
    answers = await load(backend, keys)
    assert [bool(each) for each in answers] == [True, False, False, True, True, True]
    assert backend.counters()["read_missing"] == 2


async def test_a_read_that_fails_is_tried_chunk_by_chunk(tmp_path):
    class Refusing(CountingVfs):
        """Refuses runs, whose buffers are many: from the page cache, if it has them, and directly.

        A machine that is short of memory has none of them there.
        """

        def preadv(self, fd, buffers, offset):
            return super().preadv(fd, self.none_of(buffers), offset)

        def read_cached(self, fd, buffers, offset):
            return super().read_cached(fd, self.none_of(buffers), offset)

        def none_of(self, buffers):
            if self.refuses and len(buffers) > 2:
                raise OSError(5, "refused")
            return buffers

        refuses = False

    vfs = Refusing()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(4)
    assert all(await write_each(backend, keys))
    vfs.reads.clear()
    vfs.refuses = True
    assert await load(backend, keys) == [True] * 4
    assert vfs.reads.total() == 4


async def all_are_there(backend, keys, root):
    assert all(await load(backend, keys))
    assert backend.usage().resident_bytes == chunk_bytes(root) == len(keys) * ON_DISK


async def test_a_run_is_stored_by_three_writes(tmp_path):
    vfs = CountedWrites()
    backend = open_with(vfs, tmp_path)
    first, keys = keys_of(1, "first"), keys_of(2 * MOST_IN_RUN)
    assert await write(backend, first) == [True]  # makes the segment
    vfs.writes.clear()
    assert await write(backend, keys) == [True] * len(keys)
    assert (vfs.writes["slots"], vfs.writes["table"]) == (2, 4)
    await all_are_there(backend, [*first, *keys], tmp_path)
    await backend.close()
    backend = open_with(CountedWrites(), tmp_path)
    await all_are_there(backend, [*first, *keys], tmp_path)


async def test_runs_of_a_full_store_overwrite_runs(tmp_path):
    vfs, chunks = CountedWrites(), 16 * MOST_IN_RUN  # a sixteenth is reserved at once
    backend = open_with(vfs, tmp_path, **full(chunks), policy="lru")
    for generation in range(4):
        vfs.writes.clear()
        keys = keys_of(chunks, str(generation))
        for half in (keys[: chunks // 2], keys[chunks // 2 :]):
            assert await write(backend, half) == [True] * len(half)
    assert vfs.writes["slots"] == 16
    await all_are_there(backend, keys, tmp_path)
    assert backend.counters()["overwritten"] == backend.counters()["evicted"] == 3 * chunks


async def test_a_run_that_cannot_be_written_is_written_chunk_by_chunk(tmp_path):
    vfs = CountedWrites()
    backend = open_with(vfs, tmp_path)
    vfs.failing["slots"] = {1, 3}  # the run, and its second chunk
    keys = keys_of(4)
    assert await write(backend, keys) == [True, False, True, True]
    assert backend.counters() == {"write_io_EIO": 1}
    await all_are_there(backend, [keys[0], *keys[2:]], tmp_path)
    assert await write(backend, keys) == [WriteResult.PRESENT, True, *[WriteResult.PRESENT] * 2]
    await all_are_there(backend, keys, tmp_path)


async def test_a_policy_that_raises_leaves_the_accounting_right(tmp_path, monkeypatch):
    backend = open_with(CountedWrites(), tmp_path)
    first, keys = keys_of(1, "first"), keys_of(4)
    assert await write(backend, first) == [True]
    let_policy_refuse(backend, keys[2], monkeypatch)
    assert await write(backend, keys) == [False] * 4
    monkeypatch.undo()
    there = [key for key in keys if backend.holds(key)]
    assert keys[2] not in there
    await all_are_there(backend, [*first, *there], tmp_path)
    assert all(await write(backend, keys))
    await all_are_there(backend, [*first, *keys], tmp_path)


async def test_a_chunk_named_twice_in_a_call_is_stored_once(tmp_path):
    backend = open_with(CountedWrites(), tmp_path)
    keys = keys_of(3)
    assert all(await write(backend, [*keys, keys[1]]))
    await all_are_there(backend, keys, tmp_path)


async def test_the_uses_of_a_run_are_noted_by_one_write(tmp_path):
    vfs = CountedWrites()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(MOST_IN_RUN)
    assert all(await write(backend, keys))
    before_ns = time.time_ns()
    assert all(await load(backend, keys))
    vfs.writes.clear()
    backend._store.record_use()
    assert vfs.writes["table"] <= 1  # 0: the housekeeper has done it
    assert min(backend._store.used_ns(name_of(0, key)) for key in keys) >= before_ns
