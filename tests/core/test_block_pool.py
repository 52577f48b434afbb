import random

import numpy as np
import pytest

from kvoffload.core.block_index import BlockIndex
from kvoffload.core.block_pool import BlockPool
from kvoffload.core.free_queue import FreeBlockQueue
from kvoffload.errors import InsufficientMemoryError, UsageError
from tests.support.block_checks import check_pool, check_queue, free_in_order


def digest(number):
    return random.Random(repr(number)).randbytes(32)


@pytest.mark.parametrize("batch", [1, 5, 40, 300])
def test_the_index_answers_as_a_dict_does(batch):
    rng = random.Random(batch)
    index, model, stored = BlockIndex(1000), {}, {}
    for _ in range(6000 // batch):
        free = [b for b in rng.sample(range(1, 1000), min(3 * batch, 999)) if b not in stored]
        added = free[:batch]
        hashes = [digest((batch, rng.random())) for _ in added]
        group = rng.randrange(3)
        if added:
            many = np.array(added, dtype=np.int32) if len(added) > 12 else added
            index.store(group, many, hashes)
            index.add(many)
            for block, block_hash in zip(added, hashes, strict=True):
                model[group, block_hash] = block
                stored[block] = group, block_hash
        gone = rng.sample(sorted(stored), min(len(stored), rng.randrange(2 * batch)))
        index.remove(np.array(gone, dtype=np.int32) if len(gone) > 12 else gone)
        for block in gone:
            del model[stored.pop(block)]
        asked = [key[1] for key in rng.sample(sorted(model), min(len(model), batch))]
        asked += [digest(("absent", rng.random())) for _ in range(batch)]
        for group in range(3):
            assert index.find(group, asked).tolist() == [model.get((group, h), 0) for h in asked]
            assert [index.get(group, h) for h in asked[:5]] == [
                model.get((group, h), 0) for h in asked[:5]
            ]
        assert len(index) == len(model)


def test_eight_equal_bytes_are_not_taken_for_the_whole_hash():
    index = BlockIndex(100)
    hashes = [b"same....." + bytes([i]) + bytes(22) for i in range(30)]
    blocks = list(range(1, 31))
    index.store(0, blocks[:12], hashes[:12])
    index.add(blocks[:12])
    rest = np.array(blocks[12:], dtype=np.int32)
    index.store(0, rest, hashes[12:])
    index.add(rest)
    assert index.find(0, hashes).tolist() == blocks
    assert not index.find(0, [h[:-1] + b"x" for h in hashes]).any()
    assert not index.find(1, hashes).any()


def test_hashes_of_another_length_are_refused():
    pool = BlockPool(10)
    pool.register(0, pool.take(1), [bytes(32)])
    with pytest.raises(UsageError, match="one algorithm"):
        pool.register(0, pool.take(1), [bytes(16)])


@pytest.mark.parametrize("size", [1, 3, 50])
def test_the_free_queue_orders_as_a_list_does(size):
    rng = random.Random(size)
    queue, model, out, cached = FreeBlockQueue(200), list(range(1, 200)), [], set()
    for _ in range(3000 // size):
        act = rng.choice(["pop", "few", "append", "prepend", "remove"])
        count = rng.randrange(1, size + 1)
        if act in ("pop", "few"):
            count = min(count, len(model))
            got = queue.pop(count).tolist() if act == "pop" else queue.pop_few(count)
            assert got == model[:count]
            del model[:count]
            cached -= set(got)
            out += got
        elif act == "remove":  # only blocks with contents are adopted from the middle
            some = rng.sample(sorted(cached), min(count, len(cached)))
            queue.remove(some)
            model = [block for block in model if block not in some]
            cached -= set(some)
            out += some
        else:
            rng.shuffle(out)
            back, out = out[:count], out[count:]
            if act == "append":
                queue.append(back)
                model += back
                cached |= set(back)
            else:
                queue.prepend(back)
                model = back + model
        assert free_in_order(queue) == model
        assert check_queue(queue) == set(model)


def test_taking_more_than_is_free_takes_nothing():
    pool = BlockPool(20)
    for count in (20, 5000):
        with pytest.raises(InsufficientMemoryError, match="19 are free"):
            pool.take(count)
    assert len(pool.take(19)) == 19
    check_pool(pool)


@pytest.mark.parametrize("count", [1, 30])
def test_a_block_is_not_released_more_often_than_held(count):
    pool = BlockPool(50)
    blocks = pool.take(count)
    pool.release(blocks)
    with pytest.raises(UsageError, match="not held"):
        pool.release(blocks)
    with pytest.raises(UsageError, match="not held"):
        pool.release([0] * count)
    check_pool(pool)
    assert pool.num_free == 49


@pytest.mark.parametrize("count", [1, 30])
def test_a_cached_block_is_not_registered_again(count):
    pool = BlockPool(50)
    blocks = pool.take(count)
    pool.register(0, blocks, [digest(i) for i in range(count)])
    with pytest.raises(UsageError, match="cached already"):
        pool.register(0, blocks, [digest(i + 100) for i in range(count)])


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(InsufficientMemoryError, match="at least 2"):
        BlockPool(1)
