"""A minimum and a maximum of each namespace in the server's memory."""

import random
import threading
import time
from functools import partial

import pytest

from kvoffload.io.service.host_memory import BLOCK, HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.namespace_shares import NamespaceOrder, NamespaceShares
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.tenant_order import TenantShares
from kvoffload.testing.backends import filled, keys_of
from kvoffload.testing.policies import PolicySuite
from tests.io.service.test_adoption import next_to

BLOCKS = 20


def new_memory(least=0, most=None, policy=LRUPolicy, **settings):
    shares = NamespaceShares(least * BLOCK, most and most * BLOCK)
    return HostMemory(BLOCKS * BLOCK, policy, shares=shares, **settings)


@pytest.fixture
async def open_store():
    opened = []

    def opens(memory, namespace):
        opened.append(HostStore(memory, namespace))
        return opened[-1]

    yield opens
    for store in opened:
        await store.close()


async def store_each(store, keys, size=BLOCK):
    """Store chunks one after the other; return how many were taken."""
    return sum([bool((await store.write([key], filled([key], size)))[0]) for key in keys])


def held(store, keys):
    return [key for key in keys if store.holds(key)]


@pytest.mark.parametrize("policy", [LRUPolicy, ARCPolicy, HandicapPolicy])
async def test_a_flood_evicts_its_own_chunks_once_another_namespace_is_down_to_its_minimum(
    open_store, policy
):
    memory = new_memory(least=6, policy=policy)
    one, two, three = (open_store(memory, name) for name in ("one", "two", "three"))
    mine, few = keys_of(10), keys_of(2, "few")
    await store_each(one, mine)
    await store_each(three, few)
    for turn in range(20):
        await store_each(two, keys_of(4, f"flood {turn}"))
    assert len(held(one, mine)) == 6
    assert held(three, few) == few
    assert len(memory) == BLOCKS, "no chunk is refused, and no room is left"
    more = keys_of(3, "more")
    assert await store_each(three, more) == 3
    assert held(three, few + more) == few + more, "below its minimum it takes from the flood"
    assert len(held(one, mine)) == 6


async def test_what_a_namespace_keeps_stays_in_its_order(open_store):
    memory = new_memory(least=6)
    one, two = open_store(memory, "one"), open_store(memory, "two")
    await store_each(one, mine := keys_of(6))
    await store_each(two, keys_of(70, "flood"))
    assert await store_each(one, new := keys_of(3, "new")) == 3
    for i in range(3):
        await store_each(two, keys_of(20, f"flood {i}"))
    assert held(one, mine + new) == mine[3:] + new


async def test_what_a_namespace_without_engines_has_may_leave(open_store):
    memory = new_memory(least=6)
    one, two = HostStore(memory, "one"), open_store(memory, "two")
    await store_each(one, mine := keys_of(6))
    await one.close()
    assert await store_each(two, keys_of(BLOCKS, "flood")) == BLOCKS
    again = open_store(memory, "one")
    assert held(again, mine) == []
    await store_each(again, mine)
    await store_each(two, keys_of(BLOCKS, "flood 2"))
    assert held(again, mine) == mine


async def test_minima_that_are_more_than_the_memory_refuse_no_chunk(open_store):
    memory = new_memory(least=8)
    stores = [open_store(memory, f"{i}") for i in range(4)]
    for turn in range(5):
        for store in stores:
            assert await store_each(store, keys_of(8, f"{turn}")) == 8
    assert len(memory) == BLOCKS


async def test_a_minimum_refuses_no_chunk_while_all_that_could_leave_is_read(open_store):
    memory = new_memory(least=10)
    one, two = open_store(memory, "one"), open_store(memory, "two")
    await store_each(one, keys_of(9))
    await store_each(two, read := keys_of(11, "read"))
    chunks = [memory._find(two._number + key) for key in read]
    for chunk in chunks:
        chunk.num_readers += 1
    assert await store_each(one, new := keys_of(2, "new")) == 2
    assert held(one, new) == new
    memory._end_reading(chunks)
    assert held(two, read) == read
    await store_each(one, keys_of(1, "newer"))
    assert len(held(two, read)) == 10


@pytest.mark.parametrize("policy", [LRUPolicy, HandicapPolicy])
async def test_a_maximum_is_never_exceeded_and_costs_no_other_namespace_a_chunk(open_store, policy):
    memory = new_memory(most=8, policy=policy)
    one, two = open_store(memory, "one"), open_store(memory, "two")
    await store_each(one, mine := keys_of(7))
    for turn in range(20):
        keys = keys_of(4, f"flood {turn}")
        assert await two.write(keys, filled(keys, BLOCK + 1)) == [True] * 4
        assert memory._shares.bytes_of[two._number] == 8 * BLOCK
        assert held(two, keys) == keys
    assert held(one, mine) == mine
    assert len([each for each in two.take_removals() if each.reason == "evicted"]) == 76
    large = keys_of(1, "large")
    assert await store_each(two, large, 8 * BLOCK + 1) == 0
    assert two.counters()["refused_size"] == 1
    assert await store_each(two, large, 8 * BLOCK) == 1


async def test_a_maximum_takes_also_what_queues_need_and_nothing_of_another_queue(open_store):
    memory = new_memory(most=8)
    one, two = open_store(memory, "one"), open_store(memory, "two")
    await store_each(one, mine := keys_of(8))
    await store_each(two, needed := keys_of(8, "needed"))
    one.spare(mine)
    two.spare(needed)
    assert await store_each(two, new := keys_of(2, "new")) == 2
    assert held(two, new) == new
    assert len(held(two, needed)) == 6
    await store_each(open_store(memory, "three"), keys_of(8, "flood"))
    assert held(one, mine) == mine


async def test_blocks_that_a_loan_keeps_count_until_its_end(open_store):
    memory = new_memory(most=8, lends=True)
    store, keys = open_store(memory, "n"), keys_of(8)
    await store_each(store, keys)
    await store.verify(keys[:4], [BLOCK] * 4)
    _, end = store.lend(keys[:4], [BLOCK] * 4)
    await store.remove(keys[:3])
    new = keys_of(8, "new")
    await store_each(store, new)
    assert memory._shares.bytes_of[store._number] == 8 * BLOCK
    assert len(held(store, new)) == 4
    assert store.holds(keys[3])
    end()
    assert memory._shares.bytes_of[store._number] == 5 * BLOCK
    await store.remove([*keys, *new])
    assert not memory._shares.bytes_of


async def test_an_adopted_memory_counts_and_a_lower_maximum_holds_at_once(open_store):
    memory = HostMemory(BLOCKS * BLOCK, LRUPolicy, keeps=True)
    one, two = open_store(memory, "one"), open_store(memory, "two")
    await store_each(one, mine := keys_of(12))
    await store_each(two, few := keys_of(3, "few"))
    after = next_to(memory, blocks=BLOCKS, shares=NamespaceShares(0, 5 * BLOCK))
    one, two = open_store(after, "one"), open_store(after, "two")
    assert held(one, mine) == mine[7:]
    assert held(two, few) == few
    assert after._shares.bytes_of == {one._number: 5 * BLOCK, two._number: 3 * BLOCK}
    assert after.resident_bytes == 8 * BLOCK


async def test_tenants_have_shares_within_their_namespace(open_store):
    memory = new_memory(least=5, most=16, tenants=TenantShares(0.25))
    one, two = open_store(memory, "one"), open_store(memory, "two")
    await store_each(one, mine := keys_of(5))
    kept = keys_of(4, "kept")
    await two.write(kept, filled(kept, BLOCK), [b"b"] * 4)
    for turn in range(10):
        keys = keys_of(4, f"flood {turn}")
        await two.write(keys, filled(keys, BLOCK), [b"a"] * 4)
    assert held(two, kept) == kept
    assert held(one, mine) == mine
    assert sum(memory._shares.bytes_of.values()) == memory.resident_bytes


async def test_threads_that_store_at_once_keep_within_the_shares(open_store):
    memory, errors = new_memory(least=6, most=12), []
    stores = [open_store(memory, f"{i}") for i in range(3)]
    end_s = time.monotonic() + 1.0

    def work(store, seed):
        rng = random.Random(seed)
        try:
            while time.monotonic() < end_s:
                (key,) = keys_of(1, f"{rng.randrange(40)}")
                if rng.random() < 0.1:
                    store.delete(key)
                (chunk,) = filled([key], BLOCK * rng.randint(1, 3))
                memory.write(store._number + key, bytes(8), memoryview(chunk))
                if memory._shares.bytes_of[store._number] > 12 * BLOCK:
                    errors.append("more than its maximum")
        except Exception as error:
            errors.append(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(store, i)) for i, store in enumerate(stores * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    counted = sum(memory._shares.bytes_of.values())
    assert counted == memory.resident_bytes
    rooms = {
        number: sum(c.room for part in parts.values() for c in part.values())
        for number, parts in memory._tables.items()
    }
    assert memory._shares.bytes_of == rooms


@pytest.mark.parametrize("have_shares", [False, True], ids=["alone", "with shares"])
@pytest.mark.parametrize("way", ["emptied", "evicted", "read, and removed", "evicted after a loan"])
async def test_a_namespace_without_engines_and_chunks_leaves_no_table(open_store, have_shares, way):
    """Each engine with new weights has a new namespace: tables of all would stay."""
    shares = NamespaceShares() if have_shares else None
    memory = HostMemory(BLOCKS * BLOCK, LRUPolicy, shares=shares, lends=True)
    old, new, keys = open_store(memory, "old"), open_store(memory, "new"), keys_of(3)
    await store_each(old, keys)
    if way == "emptied":
        await old.purge(["old"])
    is_on_loan = way in ("read, and removed", "evicted after a loan")
    if is_on_loan:
        await old.verify(keys[:1], [BLOCK])
        (start,), end = memory.lend(old._number, keys[:1], [BLOCK])
        assert start >= 0
    await old.close()
    if way == "read, and removed":
        await new.purge(["old"])
    await store_each(new, keys_of(2 * BLOCKS, "more"))
    if is_on_loan:
        end()
    await store_each(new, keys_of(2 * BLOCKS, "still more"))
    assert [*memory._tables] == [new._number]
    if have_shares:
        assert [*memory._by_namespace._policies] == [new._number]


async def test_without_shares_nothing_is_counted(open_store):
    memory = HostMemory(BLOCKS * BLOCK, LRUPolicy)
    await store_each(open_store(memory, "n"), keys_of(BLOCKS + 1))
    assert memory._shares is memory._by_namespace is None
    assert type(memory._order.normal) is LRUPolicy


class TestNamespaceOrder(PolicySuite):
    """With one namespace that has some to spare, the order is the policy's own."""

    def make(self, capacity):
        shares = NamespaceShares()
        shares.count(b"", 1)
        return NamespaceOrder(partial(LRUPolicy, capacity), shares, lambda key: b"")
