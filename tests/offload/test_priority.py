"""Priorities: who leaves when, and that they cost the same however much is resident."""

import tracemalloc

import pytest
from kvoffload_policies.fifo import FIFOPolicy

from kvoffload.config import KNOWN_HINTS
from kvoffload.offload.base import ReqContext, make_offload_key
from kvoffload.offload.extents import ExtentCache
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.offload.priority import FURTHEST, PriorityPolicy
from kvoffload.policies.lru import LRUPolicy
from tests.support.manager_check import check, marked


class Counted(bytes):
    """A key that counts how often any table is asked about it, or any other of its kind."""

    lookups = 0

    def __hash__(self):
        Counted.lookups += 1
        return super().__hash__()

    __eq__ = bytes.__eq__


def keys(prompt, count):
    return [Counted(make_offload_key(f"{prompt} {i}".encode().ljust(32), 0)) for i in range(count)]


def put(manager, wanted, priority=0):
    context = ReqContext(str(wanted[0]), {"kvoffload": {"priority": priority}})
    output = manager.prepare_store(wanted, context)
    manager.complete_store(output.keys_to_store, context)
    return output


def put_one(manager, prompt, priority):
    chunk = keys(prompt, 1)
    put(manager, chunk, priority)
    return chunk


def one_size(slots):
    return TieredOffloadingManager(HostCache(slots, FIFOPolicy(slots)), client_hints=KNOWN_HINTS)


def two_sizes(slots):
    geometry = HostGeometry.plan(slots * 4096 * 10, [4096, 3 * 4096])
    return TieredOffloadingManager(ExtentCache(geometry, FIFOPolicy), client_hints=KNOWN_HINTS)


def cost(manager, priority):
    """Lookups in tables, and the most bytes ever held, in five one-chunk stores."""
    Counted.lookups = 0
    tracemalloc.start()
    for i in range(5):
        put(manager, keys(f"new {priority} {i}", 1), priority)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Counted.lookups, held


@pytest.mark.parametrize(
    ("new_manager", "full"), [(one_size, True), (one_size, False), (two_sizes, True)]
)
@pytest.mark.parametrize("of_resident", [lambda i: -1, lambda i: 1, lambda i: i % 300 - 50])
@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_a_store_costs_the_same_whoever_is_resident(
    new_manager, full, of_resident, priority, monkeypatch
):
    for module in ("eviction_order", "orders_by_size"):  # also where every resident is above 0
        monkeypatch.setattr(f"kvoffload.offload.{module}.SHARE_ABOVE", 1.0)
    costs = []
    for residents in (100, 3000):
        manager = new_manager(residents if full else residents + 10)
        priorities = [of_resident(i) for i in range(residents)]
        for of_these in sorted(set(priorities)):
            put(manager, keys(f"old {of_these}", priorities.count(of_these)), of_these)
        costs.append(cost(manager, priority))
    (few_lookups, few_bytes), (many_lookups, many_bytes) = costs
    assert many_lookups <= few_lookups * 1.1
    assert many_bytes < few_bytes + 16_000  # a list of the residents alone has 24,000


def test_priorities_below_0_leave_first_and_those_above_last_each_in_order_of_use():
    manager = TieredOffloadingManager(HostCache(6, LRUPolicy(6)), client_hints=KNOWN_HINTS)
    stored = {p: keys(f"prompt {p}", 1) for p in (2, 1, 0, -2, -1)}
    for priority, chunk in stored.items():
        put(manager, chunk, priority)
    again = keys("prompt 1 as well", 1)
    put(manager, again, 1)
    manager.touch(stored[1])
    gone = put(manager, keys("new", 6)).evicted_keys
    assert list(gone) == [
        *(stored[p][0] for p in (-2, -1, 0)),
        again[0],
        stored[1][0],
        stored[2][0],
    ]


@pytest.mark.parametrize("new_manager", [one_size, two_sizes])
def test_priorities_above_0_hold_at_most_half_of_host_memory(new_manager):
    manager = new_manager(8)
    num_slots = manager._host.num_slots
    kept = [key for i in range(num_slots) for key in put_one(manager, f"greedy {i}", FURTHEST)]
    assert len(marked(manager._host.order)) == num_slots // 2
    for i in range(3 * num_slots):
        put_one(manager, f"others {i}", 0)
    assert sum(manager.lookup(key) for key in kept) == num_slots // 2
    check(manager)
    # What leaves makes room for other chunks of a high priority.
    manager.reset_cache()
    put_one(manager, "later", 1)
    assert len(marked(manager._host.order)) == 1


def test_priorities_far_from_0_are_equal():
    manager = one_size(6)
    for i, priority in enumerate((10**30, FURTHEST, FURTHEST + 1)):
        put(manager, keys(f"prompt {i}", 1), priority)
    gone = put(manager, keys("new", 6)).evicted_keys
    assert list(gone) == [key for i in range(3) for key in keys(f"prompt {i}", 1)]


@pytest.mark.parametrize("new_manager", [one_size, two_sizes])
def test_a_chunk_that_left_is_of_no_priority_any_more(new_manager):
    manager = new_manager(4)
    host = manager._host
    size = host.num_slots
    put(manager, keys("evicted", 2), -1)
    put(manager, keys("others", size))
    assert marked(host.order) == set()
    high = keys("reset", 1)
    put(manager, high, 1)
    assert marked(host.order) == set(high)
    manager.reset_cache()
    assert marked(host.order) == set()
    failed = keys("failed", 1)
    context = ReqContext("r", {"kvoffload": {"priority": 1}})
    manager.prepare_store(failed, context)
    manager.complete_store(failed, context, success=False)
    assert marked(host.order) == set()
    lost = keys("lost", 1)
    put(manager, lost, 1)
    manager.prepare_load(lost)
    manager.complete_load(lost, success=False)
    assert marked(host.order) == set()
    check(manager)


def test_a_chunk_spared_by_a_store_keeps_its_priority():
    manager = one_size(2)
    low, high = keys("low", 1), keys("high", 1)
    put(manager, low, -1)
    put(manager, high, 1)
    assert put(manager, [*low, *keys("new", 1)]).evicted_keys == tuple(high)
    assert put(manager, keys("newer", 1)).evicted_keys == tuple(low)


def test_as_a_policy_it_contains_what_its_orders_contain():
    order = PriorityPolicy(LRUPolicy(4))
    order.mark([b"low"], -1)
    order.add([b"low", b"normal"])
    assert len(order) == 2
    assert b"low" in order
    assert b"normal" in order
    order.remove([b"low"])
    assert b"low" not in order
    order.add([b"low"])
    assert list(order.victims(2)) == [b"low", b"normal"]
