"""Rules of the manager that a reader should be able to look up one by one."""

import pytest
from manager_parts import Store, figures, keys, new_manager, put, write_through

from kvoffload.offload.base import Reason
from tests.support.manager_check import check


def test_a_chunk_is_visible_only_after_it_is_wholly_stored():
    manager = new_manager(4)
    (key,) = keys("a", 1)
    manager.prepare_store([key])
    assert manager.lookup(key) is False
    manager.complete_store([key])
    assert manager.lookup(key) is True


def test_a_failed_store_is_never_visible_and_its_slot_is_free_again():
    manager = new_manager(1)
    manager.prepare_store(keys("a", 1))
    manager.complete_store(keys("a", 1), success=False)
    assert manager.lookup(keys("a", 1)[0]) is False
    assert put(manager, keys("b", 1)).evicted_keys == ()


def test_nothing_named_in_a_store_is_evicted_for_it():
    manager = new_manager(4)
    a = keys("a", 4)
    put(manager, a[:2])
    put(manager, keys("b", 2))
    output = manager.prepare_store(a)  # a0 and a1 are the oldest
    assert set(output.evicted_keys) == set(keys("b", 2))
    assert output.keys_to_store == tuple(a[2:])


def test_what_does_not_fit_is_cut_at_the_tail():
    manager = new_manager(2)
    output = manager.prepare_store(keys("a", 5))
    assert output.keys_to_store == tuple(keys("a", 2))
    assert manager.prepare_store(keys("b", 1)) is None  # all slots are being written
    assert manager.figures.not_stored["cpu", "no_room"] == 4


def test_of_one_prompt_the_tail_leaves_first():
    manager = new_manager(4)
    a = keys("a", 4)
    put(manager, a[:2])  # stored over two steps, as chunked prefill does
    put(manager, a[2:])
    manager.retire(a)
    assert put(manager, keys("b", 1)).evicted_keys == (a[3],)
    assert put(manager, keys("c", 1)).evicted_keys == (a[2],)


def test_a_chunk_being_loaded_is_not_evicted():
    manager = new_manager(2)
    a = keys("a", 2)
    put(manager, a)
    manager.prepare_load(a[1:])
    assert put(manager, keys("b", 2)).keys_to_store == tuple(keys("b", 1))
    assert manager.lookup(a[1]) is True
    manager.complete_load(a[1:])
    assert put(manager, keys("c", 2)).evicted_keys != ()


def test_a_load_names_what_to_fetch_and_from_where():
    a = keys("a", 4)
    manager = new_manager(4, [Store(a[1:3]), Store(a[2:])])
    put(manager, a[:1])
    manager.take_transfers()
    assert manager.lookup_prefix(a) == (4, False)
    spec = manager.prepare_load(a)
    assert spec.fetches
    assert [(f.tier, f.positions) for f in spec.fetches] == [("tier0", (1, 2)), ("tier1", (3,))]
    assert manager.lookup(a[3]) is None  # shared: about to be in host memory
    manager.complete_load(a)
    assert manager.lookup_prefix(a) == (4, False)
    assert [e.keys for e in manager.take_events()][-1] == tuple(a[1:])


def test_a_failed_fetch_is_forgotten_by_its_tier_first():
    a = keys("a", 1)
    manager = new_manager(4, [Store(a)])
    manager.prepare_load(a)
    manager.complete_load(a, success=False)
    assert manager.lookup(a[0]) is False


def test_a_load_of_more_than_host_memory_is_promised_in_part():
    a = keys("a", 5)
    manager = new_manager(3, [Store(a)])
    assert manager.lookup_prefix(a) == (3, False)
    assert len(manager.prepare_load(a).host_slots) == 3


def test_a_slot_that_a_late_read_may_write_is_not_given_out():
    a, b = keys("a", 1), keys("b", 1)
    manager = new_manager(1, [Store(a)])
    slots = manager.prepare_load(a).host_slots.tolist()
    manager.complete_load(a, success=False, settled=False)
    assert manager.prepare_store(b) is None
    manager.release_slots(slots)
    assert manager.prepare_store(b) is not None


def test_write_through_follows_a_store_and_pins_until_answered():
    manager = new_manager(2, [Store()], max_persisting_slots=2)
    a = keys("a", 2)
    put(manager, a)
    (transfer,) = manager.take_transfers()
    assert (transfer.tier.name, transfer.keys) == ("tier0", tuple(a))
    assert manager.prepare_store(keys("b", 1)) is None
    manager.complete(transfer, [True, False])
    stored = [e for e in manager.take_events() if e.medium == "TIER0"]
    assert [(e.keys, e.reason) for e in stored] == [((a[0],), Reason.STORED)]
    assert manager.figures.not_stored["tier0", "failed"] == 1
    assert manager.prepare_store(keys("b", 1)) is not None


def test_write_through_beyond_its_limit_waits_and_is_dropped_only_if_evicted():
    manager = new_manager(4, [Store()], max_persisting_slots=1)
    a = keys("a", 3)
    put(manager, a)
    (first,) = manager.take_transfers()
    assert first.keys == (a[0],)
    put(manager, keys("b", 2))  # needs a slot: a2, idle and oldest, is evicted
    manager.complete(first, [True])
    (second,) = manager.take_transfers()
    assert second.keys == (a[1],)
    manager.complete(second, [True])
    (third,) = manager.take_transfers()
    assert third.keys == (keys("b", 2)[0],)
    assert manager.figures.not_stored["tier0", "back_pressure"] == 1


def test_a_tier_that_hangs_does_not_hold_up_the_others():
    manager = new_manager(8, [Store(), Store()], max_persisting_slots=4)
    put(manager, keys("a", 4))
    hung, quick = manager.take_transfers()
    assert (hung.tier.name, quick.tier.name) == ("tier0", "tier1")
    manager.complete(quick, [True] * len(quick.keys))
    assert [t.tier.name for t in manager.take_transfers()] == ["tier1"]


def test_completions_nobody_waits_for_are_counted_and_harmless():
    manager = new_manager(2)
    manager.complete_load(keys("a", 1))
    manager.complete_store(keys("a", 1))
    manager.release_slots([0])
    assert manager.counters["unexpected_completion"] == 2
    assert manager.counters["unexpected_release"] == 1
    check(manager)


@pytest.mark.parametrize("success", [True, False])
def test_what_was_in_flight_at_a_reset_ends_as_removed(success):
    a, b = keys("a", 1), keys("b", 1)
    manager = new_manager(2)
    put(manager, a)
    manager.prepare_load(a)
    manager.prepare_store(b)
    manager.reset_cache()
    manager.complete_load(a, success=success)
    manager.complete_store(b, success=success)
    assert [manager.lookup(key) for key in (*a, *b)] == [False, False]
    assert manager.busy_slots == 0
    check(manager)


@pytest.mark.parametrize("success", [True, False])
def test_what_is_in_flight_at_a_reset_can_be_stored_anew_at_once(success):
    a, b, c = keys("a", 1), keys("b", 1), keys("c", 1)
    manager = new_manager(6, [Store(c)])
    put(manager, a)
    (written,) = manager.take_transfers()
    old = [manager.begin_load(a), manager.prepare_store(b).job, manager.begin_load(c)]
    manager.reset_cache()
    new = manager.prepare_store([*a, *b, *c]).job
    assert new.keys == (*a, *b, *c)
    assert {*new.spec.host_slots}.isdisjoint(slot for job in old for slot in job.spec.host_slots)
    manager.complete(new, [True] * 3)
    for job in (written, *old):
        manager.complete(job, [success], settled=False)
        manager.release_slots(job.unsettled_slots(), job)
        assert [manager.lookup(key) for key in new.keys] == [True] * 3
    write_through(manager)
    assert manager.busy_slots == 0
    check(manager)


class Counting(Store):
    """A store that looks up a prompt in one call."""

    def num_leading(self, wanted):
        return next((i for i, key in enumerate(wanted) if key not in self.held), len(wanted))

    def holds(self, key):
        self.asked = getattr(self, "asked", 0) + 1
        return super().holds(key)


@pytest.mark.parametrize(("slots", "found"), [(600, 500), (40, 40)])
def test_a_prompt_on_a_tier_with_a_whole_index_is_not_asked_for_chunk_by_chunk(slots, found):
    prompt = keys("a", 600)
    one_by_one, counting = Store(prompt[:500]), Counting(prompt[:500])
    for store in (one_by_one, counting):
        manager = new_manager(slots, [store])
        assert manager.lookup_prefix(prompt) == (found, False)
        told = figures(manager)["lookups"]
        if store is one_by_one:
            expected = told
    assert told == expected
    assert counting.asked <= 1
