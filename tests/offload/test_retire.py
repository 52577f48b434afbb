"""Tails of a prefix leave before heads, whenever the transfers of its chunks end."""

import pytest
from manager_parts import Store, keys, new_manager, write_through

from kvoffload.offload.base import ReqContext
from kvoffload.policies.lru import LRUPolicy
from tests.support.manager_check import check

A, B = ReqContext("a"), ReqContext("b")
POLICIES = ["lru", "arc", "handicap"]


def stored(manager, chunks, context=A):
    manager.prepare_store(chunks, context)
    manager.complete_store(chunks, context)
    return chunks


def evicted_one_by_one(manager, count):
    """Store other chunks, one at a time, and return which chunk each of them evicted."""
    gone = []
    for key in keys("filler", count):
        gone += manager.prepare_store([key]).evicted_keys
    return gone


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("parts", [[(2, 4)], [(2, 3), (3, 4)], [(3, 4), (2, 3)]])
def test_stores_that_end_after_their_request_keep_the_tail_first(policy, parts):
    manager = new_manager(4, policy=policy)
    a = keys("a", 4)
    manager.touch(a, A)
    stored(manager, a[:2])
    manager.prepare_store(a[2:], A)
    manager.retire(a, A)
    for first, end in parts:
        manager.complete_store(a[first:end], A)
    check(manager)
    assert evicted_one_by_one(manager, 4) == a[::-1]


def stored_in_steps(manager):
    """Store six chunks of a request, two a step; return them."""
    a = keys("a", 6)
    manager.touch(a, A)
    for i in range(0, 6, 2):
        stored(manager, a[i : i + 2])
    return a


def written(manager, transfers):
    for transfer in transfers:
        manager.complete(transfer, [True] * len(transfer.keys))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unsettled", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_slot_released_after_all_other_writes_keeps_the_tail_first(policy, order, unsettled):
    manager = new_manager(6, [Store()], policy=policy, max_persisting_slots=6)
    a = stored_in_steps(manager)
    transfers = manager.take_transfers()
    manager.retire(a, A)
    for i in order:
        manager.complete(transfers[i], [i != unsettled] * 2, settled=i != unsettled)
        check(manager)
    manager.release_slots(transfers[unsettled].unsettled_slots())
    check(manager)
    assert evicted_one_by_one(manager, 6) == a[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_ends_before_a_slot_is_released_keeps_the_tail_first(policy):
    manager = new_manager(6, [Store()], policy=policy, max_persisting_slots=6)
    a = stored_in_steps(manager)
    *others, last = manager.take_transfers()
    written(manager, others)
    manager.complete(last, [False] * 2, settled=False)
    manager.retire(a, A)
    check(manager)
    manager.release_slots(last.unsettled_slots())
    check(manager)
    assert evicted_one_by_one(manager, 6) == a[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_writes_that_begin_after_the_request_keep_the_tail_first(policy):
    manager = new_manager(6, [Store(), Store()], policy=policy, max_persisting_slots=2)
    a = stored_in_steps(manager)
    manager.retire(a, A)
    write_through(manager)
    check(manager)
    assert evicted_one_by_one(manager, 6) == a[::-1]


@pytest.mark.parametrize("failed", [0, 1, 2, 3])
def test_a_store_that_fails_after_its_request_leaves_the_others_in_order(failed):
    manager = new_manager(4)
    a = keys("a", 4)
    manager.prepare_store(a, A)
    manager.retire(a, A)
    rest = [key for key in a if key != a[failed]]
    for key in rest:
        manager.complete_store([key], A)
    manager.complete_store([a[failed]], A, success=False)
    check(manager)
    assert evicted_one_by_one(manager, 4) == rest[::-1]


def test_of_two_requests_with_one_head_both_tails_leave_before_it():
    manager = new_manager(5)
    head, (a2, a3), (b2,) = keys("h", 2), keys("a", 2), keys("b", 1)
    manager.prepare_store([*head, a2, a3], A)
    manager.complete_store([*head[:1], a3], A)
    manager.retire([*head, a2, a3], A)
    manager.prepare_store([b2], B)
    manager.retire([*head, b2], B)
    manager.complete_store([a2], A)
    manager.complete_store([head[1]], A)
    manager.complete_store([b2], B)
    check(manager)
    gone = evicted_one_by_one(manager, 5)
    assert gone[-2:] == head[::-1]
    assert gone.index(a3) < gone.index(a2)


def test_a_write_that_was_dropped_is_not_waited_for():
    manager = new_manager(2, [Store()], max_persisting_slots=1)
    a = stored(manager, keys("a", 2))
    (first,) = manager.take_transfers()
    manager.retire(a, A)
    assert manager.prepare_store(keys("b", 1), B).evicted_keys == (a[1],)
    manager.complete(first, [True])
    assert manager.figures.not_stored["tier0", "back_pressure"] == 1
    check(manager)


@pytest.mark.parametrize("forget", ["reset_cache", "replace_tiers"])
def test_nothing_is_waited_for_after_everything_was_forgotten(forget):
    manager = new_manager(4, [Store()], max_persisting_slots=1)
    a = stored(manager, keys("a", 2))
    manager.retire(a, A)
    manager.reset_cache() if forget == "reset_cache" else manager.replace_tiers([])
    check(manager)


class CountingLRU(LRUPolicy):
    added = 0

    def add(self, keys):
        self.added += len(keys)
        super().add(keys)


@pytest.mark.parametrize("lengths", [range(1, 33), range(32, 0, -1), [32] * 32])
def test_writes_that_land_together_cost_the_same_however_many_requests_wait(lengths):
    order = CountingLRU(32)
    manager = new_manager(32, [Store()], policy=order, max_persisting_slots=32)
    a = stored(manager, keys("a", 32))
    (transfer,) = manager.take_transfers()
    for i, length in enumerate(lengths):
        manager.retire(a[:length], ReqContext(f"r{i}"))
    before = order.added
    manager.complete(transfer, [True] * 32)
    check(manager)
    assert order.added - before <= 32 + 32, "as their pins end, and in the requests' order"
    assert evicted_one_by_one(manager, 32) == a[::-1]


def test_a_request_that_ends_again_is_put_in_order_once():
    order = CountingLRU(33)
    manager = new_manager(33, [Store()], policy=order, max_persisting_slots=1)
    a = stored(manager, keys("a", 32))
    for length in range(32, 0, -1):
        manager.retire(a[:length], A)
    before = order.added
    manager.retire(a, B)
    assert order.added - before <= 32


def test_a_tier_that_hangs_does_not_let_the_lists_of_ended_requests_grow():
    manager = new_manager(64, [Store()], max_persisting_slots=1)
    head = stored(manager, keys("h", 40))
    for i in range(200):
        context, own = ReqContext(f"r{i}"), keys(f"own {i} ", 1)
        stored(manager, own, context)
        manager.retire([*head, *own], context)
        check(manager)
    waiting = {id(it): it for it in manager._retirement._in_flight.values()}
    assert 0 < sum(len(it.chunks) for it in waiting.values()) <= 8 * 64


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_load_of_a_tail_that_ends_after_its_request_keeps_the_tail_first(policy, first, ok):
    manager = new_manager(4, policy=policy)
    a = keys("a", 4)
    manager.touch(a, A)
    stored(manager, a)
    manager.retire(a, A)
    manager.touch(a, B)
    job = manager.begin_load(a[first:], B)  # the head is in GPU memory
    manager.retire(a, B)
    manager.complete(job, [True, *[ok] * (3 - first)])
    check(manager)
    rest = a if ok else a[: first + 1]
    assert evicted_one_by_one(manager, 4) == rest[::-1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("settled", [True, False])
def test_a_fetch_of_a_tail_that_ends_after_its_request_keeps_the_tail_first(policy, settled):
    a = keys("a", 4)
    manager = new_manager(5, [Store(a[2:])], policy=policy)
    manager.touch(a, A)
    stored(manager, a[:2])
    write_through(manager)
    job = manager.begin_load(a[2:], A)  # the head is in GPU memory
    manager.retire(a, A)
    ok = [True, settled]
    manager.complete(job, ok, settled)
    manager.release_slots(job.unsettled_slots())
    check(manager)
    rest = a if settled else a[:3]
    assert evicted_one_by_one(manager, 5) == rest[::-1]
