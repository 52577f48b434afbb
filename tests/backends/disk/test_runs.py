"""Chunks in slots that follow one another are read by one call; each is verified by itself."""

from collections import Counter

from disk_parts import SIZE, flip_chunk, open_disk, write

from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk.chunk_file import MOST_IN_RUN
from kvoffload.testing import payload_of
from kvoffload.testing.backends import keys_of, slots
from tests.support.vfs import HookedVfs

READS = "read_cached", "preadv"


class CountingVfs(HookedVfs):
    def __init__(self):
        super().__init__()
        self.reads = Counter()

    def around(self, call, path, perform):
        if call in READS and path.endswith(".slots"):
            self.reads[call] += 1
        return perform()


async def read(backend, keys):
    """Read keys; return the answers, and the places told of, once each and only of hits."""
    into, arrived = slots(len(keys), SIZE), []
    answers = await backend.read_each(keys, into, arrived.append)
    for key, slot, good in zip(keys, into, answers, strict=True):
        assert not good or bytes(slot) == payload_of(key, SIZE)
    assert sorted(arrived) == [i for i, good in enumerate(answers) if good]
    return answers


def open_with(vfs, root, **settings):
    return open_disk(root, form="segments", vfs=vfs, **settings)


async def test_a_run_is_one_read(tmp_path):
    vfs = CountingVfs()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(2 * MOST_IN_RUN + 1)
    assert all(await write(backend, keys))
    assert await read(backend, keys) == [True] * len(keys)
    assert vfs.reads.total() == 3
    await backend.close()


async def test_only_neighbours_in_one_order_are_a_run(tmp_path):
    vfs = CountingVfs()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(6)
    for key in keys:
        assert await write(backend, [key]) == [True]
    wanted = [keys[0], keys[2], keys[1], *keys[3:]]
    assert await read(backend, wanted) == [True] * 6
    assert vfs.reads.total() == 4  # the last three are neighbours
    await backend.close()


async def test_damage_in_a_run_is_one_miss(tmp_path):
    backend = open_with(CountingVfs(), tmp_path)
    keys = keys_of(5)
    for key in keys:
        assert await write(backend, [key]) == [True]
    flip_chunk(tmp_path, keys[2], -1)
    answers = await read(backend, keys)
    assert answers == [True, True, ReadResult.CORRUPT, True, True]
    assert backend.counters()["corrupt_payload"] == 1
    await backend.close()


async def test_missing_chunks_end_a_run(tmp_path):
    backend = open_with(CountingVfs(), tmp_path)
    keys = keys_of(6)
    for key in keys:
        assert await write(backend, [key]) == [True]
    await backend.remove(keys[1:3])
    answers = await read(backend, keys)
    assert [bool(each) for each in answers] == [True, False, False, True, True, True]
    assert backend.counters()["read_missing"] == 2
    await backend.close()


async def test_a_read_that_fails_is_tried_chunk_by_chunk(tmp_path):
    class Refusing(CountingVfs):
        def around(self, call, path, perform):
            counted = super().around(call, path, perform)
            if call in READS and path.endswith(".slots") and self.reads.total() <= self.refused:
                raise OSError(5, "refused")
            return counted

        refused = 0

    vfs = Refusing()
    backend = open_with(vfs, tmp_path)
    keys = keys_of(4)
    for key in keys:
        assert await write(backend, [key]) == [True]
    vfs.reads.clear()
    vfs.refused = 2  # from the page cache, and directly
    assert await read(backend, keys) == [True] * 4
    await backend.close()
