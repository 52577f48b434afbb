"""Chunks that requests in the engine's queue need leave a disk last."""

import asyncio
import os
import random
from math import inf

import pytest
from disk_parts import ON_DISK, open_disk, stored, write, write_each

from kvoffload.backends.base import Spares
from kvoffload.backends.disk.index import Index, name_of
from kvoffload.backends.disk.paths import SEGMENTS, SHARDS, SNAPSHOT
from kvoffload.config import ByteSize
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.told_return import ToldReturn
from kvoffload.testing.backends import keys_of
from tests.support.vfs import StuckVfs

CHUNKS = 8
SEARCHED = {*SHARDS, SEGMENTS}


@pytest.mark.parametrize("policy", ["lru", "arc", "handicap"])
async def test_what_is_needed_stays_until_it_is_needed_no_more(tmp_path, policy):
    backend = open_disk(
        tmp_path, capacity=ByteSize(CHUNKS * ON_DISK), high_watermark=1.0, policy=policy
    )
    assert isinstance(backend, Spares)
    old, new = keys_of(CHUNKS), keys_of(2 * CHUNKS, "new")
    assert all(await write_each(backend, old))
    backend.spare([*old[:3], b"unknown"])
    assert all(await write_each(backend, new))
    assert [backend.holds(key) for key in old] == [True] * 3 + [False] * 5
    backend.spare(old[:1])
    assert all(await write_each(backend, keys_of(2 * CHUNKS, "more")))
    assert [backend.holds(key) for key in old[:3]] == [True, False, False]
    await backend.close()
    backend.spare(old)


async def test_a_disk_full_of_needed_chunks_still_takes_new_ones(tmp_path):
    backend = open_disk(tmp_path, capacity=ByteSize(CHUNKS * ON_DISK), high_watermark=1.0)
    old, new = keys_of(CHUNKS), keys_of(CHUNKS, "new")
    assert all(await write_each(backend, old))
    backend.spare(old)
    assert all(await write_each(backend, new))
    assert not any(map(backend.holds, old))


async def test_a_process_that_does_not_evict_tells_the_one_that_does(tmp_path):
    evicts = open_disk(tmp_path)
    other = open_disk(tmp_path)
    keys = keys_of(2)
    await write(other, keys)
    other._store.uses.take_unwritten()
    other.spare(keys[:1])
    assert list(other._store.uses.take_unwritten()) == [name_of(0, keys[0])]
    other.spare(keys[:1])
    assert not other._store.uses.take_unwritten()  # it is told already
    evicts.spare(keys)
    assert not evicts._store.uses.take_unwritten()


async def left_by_the_killed(root):
    """Store eight chunks as a process leaves them that is killed; return their keys."""
    keys = keys_of(CHUNKS)
    await stored(root, keys)
    for snapshot in root.glob(f"*/{SNAPSHOT}"):
        snapshot.unlink()
    return keys


def held_search():
    """Find nothing in the folders of an opened root until it is released."""
    return StuckVfs(lambda call, path: call == "listdir" and os.path.basename(path) in SEARCHED)


@pytest.mark.usefixtures("form")
async def test_a_disk_that_was_just_opened_spares_what_it_is_yet_to_find(tmp_path):
    keys, vfs = await left_by_the_killed(tmp_path), held_search()
    room = {"capacity": ByteSize(CHUNKS * ON_DISK), "high_watermark": 1.0}
    backend = open_disk(tmp_path, vfs=vfs, ready=False, **room)
    backend.spare(keys[:3])
    assert not any(map(backend.holds, keys))
    vfs.release()
    assert backend.wait_ready(60)
    assert all(await write_each(backend, keys_of(2 * CHUNKS, "new")))
    assert [backend.holds(key) for key in keys] == [True] * 3 + [False] * 5


@pytest.mark.usefixtures("form")
async def test_a_process_that_does_not_evict_tells_of_what_it_finds_later(tmp_path):
    keys, vfs = await left_by_the_killed(tmp_path), held_search()
    open_disk(tmp_path)  # evicts
    other = open_disk(tmp_path, vfs=vfs, ready=False)
    other.spare(keys[:1])
    assert not other._store.uses.take_unwritten()
    vfs.release()
    assert other.wait_ready(60)
    other._store.uses.take_unwritten()
    while not other.is_complete:
        other.take_changes(3)
    assert list(other._store.uses.take_unwritten()) == [name_of(0, keys[0])]
    other.spare(keys[:1])
    assert not other._store.uses.take_unwritten()


async def test_what_is_needed_stays_also_if_it_is_stored_later(tmp_path):
    backend = open_disk(tmp_path, capacity=ByteSize(CHUNKS * ON_DISK), high_watermark=1.0)
    old, needed = keys_of(CHUNKS), keys_of(2, "needed")
    backend.spare(needed)
    assert await write(backend, [*old[:4], *needed]) == [True] * 6
    assert all(await write_each(backend, keys_of(2 * CHUNKS, "new")))
    assert all(map(backend.holds, needed))
    backend.spare([])
    assert all(await write_each(backend, keys_of(CHUNKS, "more")))
    assert not any(map(backend.holds, needed))


@pytest.mark.parametrize("policy", [LRUPolicy, ARCPolicy, HandicapPolicy])
def test_no_order_of_calls_loses_a_name_or_evicts_what_is_needed(policy):
    rng = random.Random(3)
    names = [name_of(0, b"%d" % i) for i in range(20)]

    index, needed = Index(policy, 8192 * 16), set()
    for _ in range(5000):
        some = rng.sample(names, rng.randrange(1, 5))
        match rng.randrange(10):
            case 0 | 1:
                for name in some:
                    index.add([name], 8192)
            case 2:
                index.touch(some)
            case 3:
                index.reorder(some)
            case 4:
                for name in some:
                    index.drop(name)
            case 5:
                index.spare(some)
                needed = set(some)
            case 6:
                rest = [name for name, _ in index.sizes() if name not in needed]
                taken = index.victims(rng.randrange(1, 4))
                if needed.intersection(taken):
                    assert set(taken).issuperset(rest)
                    needed = set()
                for name in taken:
                    (index.drop if rng.random() < 0.5 else index.put_back)(name)
            case 7:
                known = [(name, 8192) for name in some if name in index]
                index.found(known, again=False, measure=True)
            case 8:
                in_s = rng.choice([None, 0.0, 9.0, inf])
                index.expect([ToldReturn(some[0], some, in_s, rng.randrange(3))], 0.5)
            case 9:
                index.found([(name, 8192) for name in some], again=rng.random() < 0.5)
        assert index._spared == {name for name in needed if name in index}
        assert len(index._order) == len(index.sizes()) if index._order else not index.sizes()


async def test_what_has_expired_is_not_renewed_because_a_request_waits_for_it(tmp_path):
    open_disk(tmp_path, ttl_s=1)  # evicts
    other = open_disk(tmp_path, ttl_s=1)
    keys = keys_of(2)
    await write(other, keys)
    await asyncio.sleep(1.2)
    other.spare(keys)
    assert not other._store.uses.take_unwritten()
