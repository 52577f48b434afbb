"""Sessions that said when they return: a disk evicts what is needed last."""

import random
from math import inf

import pytest
from disk_parts import ON_DISK, open_disk, write

from kvoffload.backends.disk.index import Index, name_of
from kvoffload.config import ByteSize
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.told_return import ToldReturn
from kvoffload.testing.backends import keys_of

POLICIES = [LRUPolicy, ARCPolicy, HandicapPolicy]


def told(name, keys, in_s, num_used=0):
    return ToldReturn(name, keys, in_s, num_used)


@pytest.fixture
def full(tmp_path):
    """A disk of 14 chunks that has three prompts of four chunks, and what they share."""
    backend = open_disk(tmp_path, capacity=ByteSize(14 * ON_DISK), high_watermark=1.0)
    return backend, keys_of(2, "system"), *(keys_of(4, name) for name in "abc")


async def test_the_session_that_returns_last_makes_room(full):
    backend, system, *sessions = full
    for keys in (system, *sessions):
        assert all(await write(backend, keys))
    backend.expect(
        [
            told(b"a", [*system, *sessions[0]], 10.0),
            told(b"b", [*system, *sessions[1]], inf),
            told(b"c", [*system, *sessions[2]], 20.0),
        ],
        1.0,
    )
    assert all(await write(backend, keys_of(4, "new")))
    assert [sum(map(backend.holds, keys)) for keys in (system, *sessions)] == [2, 4, 0, 4]
    backend.expect([told(b"a", [*system, *sessions[0]], None, 6)], 1.0)  # now it says nothing
    assert all(await write(backend, keys_of(4, "newer")))
    assert [sum(map(backend.holds, keys)) for keys in (system, *sessions)] == [2, 4, 0, 4]
    await backend.close()
    backend.expect([told(b"c", sessions[2], 0.0)], 1.0)


async def test_a_share_of_the_disk_is_the_most_that_told_chunks_hold(full):
    backend, system, *sessions = full
    for keys in (*sessions, system):
        assert all(await write(backend, keys))
    backend.expect([told(keys[0], keys, 1.0) for keys in sessions], 0.5)
    for i in range(20):
        assert await write(backend, keys_of(1, f"new{i}")) == [True]
    assert sum(backend.holds(key) for keys in sessions for key in keys) == 7


async def test_a_chunk_that_is_stored_after_its_session_was_told_counts(full):
    backend, system, *sessions = full
    assert all(await write(backend, system))
    backend.expect([told(b"a", [*system, *sessions[0]], 5.0)], 1.0)
    assert all(await write(backend, [*sessions[0], *sessions[1], *sessions[2]]))
    assert all(await write(backend, keys_of(8, "new")))
    assert [sum(map(backend.holds, keys)) for keys in (system, *sessions)] == [2, 4, 0, 0]


def test_the_share_is_one_of_the_chunks_that_fit_whatever_the_first_was():
    """The policy's capacity is an estimate from the first file, which may be a small one."""
    index = Index(LRUPolicy, 8192 * 1000)
    index.add([name_of(0, b"small")], 8192)
    sessions = [[name_of(0, b"%d %d" % (i, j)) for j in range(5)] for i in range(8)]
    for name in (name for names in sessions for name in names):
        index.add([name], 8192 * 20)
    index.expect([told(names[0], names, 1.0) for names in sessions], 0.5)
    for i in range(60):
        (victim,) = index.victims(1)
        index.drop(victim)
        index.add([name_of(0, b"new %d" % i)], 8192 * 20)
    left = sum(name in index for names in sessions for name in names)
    assert left == 20


@pytest.mark.parametrize("policy", POLICIES)
def test_told_nothing_of_its_chunks_a_disk_evicts_as_ever(policy):
    """Call for call; a disk that was never told has no order of returns at all."""
    plain, other = (Index(policy, 8192 * 40) for _ in range(2))
    rng, evicted = random.Random(1), [[], []]
    for _ in range(3000):
        some = [name_of(0, b"%d" % i) for i in rng.sample(range(120), rng.randrange(1, 6))]
        for index, gone in zip((plain, other), evicted, strict=True):
            index.touch(some)
            for name in some:
                index.add([name], 8192)
            while len(index) > 40:
                (victim,) = index.victims(1)
                index.drop(victim)
                gone.append(victim)
        other.expect([told(b"a", [b"unknown %d" % rng.randrange(99)], rng.random())], 0.5)
    assert evicted[0] == evicted[1]
    assert len(evicted[0]) > 1000
    assert plain._returns is None
