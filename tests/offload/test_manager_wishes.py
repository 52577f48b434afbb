"""Admission, hints, rates, back-pressure and promotion: one by one."""

from manager_parts import Store, figures, keys, new_manager, put

from kvoffload.offload.base import ReqContext
from kvoffload.offload.manager import Tier


def take_written(manager):
    return {(transfer.tier.name, *transfer.keys) for transfer in manager.take_transfers()}


def fetch(manager, wanted):
    hits, _ = manager.lookup_prefix(wanted)
    spec = manager.prepare_load(wanted[:hits])
    manager.complete_load(wanted[:hits])
    return spec


# ---- admission ----


def test_with_a_threshold_a_chunk_is_stored_when_enough_requests_have_used_it():
    manager = new_manager(store_threshold=2)
    a = keys("a", 3)
    assert put(manager, a, name="first").keys_to_store == ()
    assert put(manager, a, name="first").keys_to_store == ()  # the same request once more
    assert put(manager, [*a[:2], *keys("b", 1)], name="second").keys_to_store == tuple(a[:2])
    assert manager.figures.not_stored["cpu", "not_admitted"] == 3 + 3 + 1
    assert manager.explain([a[2]]) == ["not_admitted"]


def test_requests_in_turn_count_once_each():
    manager = new_manager(store_threshold=3)
    a = keys("a", 1)
    for name in ("first", "second", "first", "second"):
        manager.touch(a, ReqContext(name))
        assert put(manager, a, name=name).keys_to_store == ()
    assert put(manager, a, name="third").keys_to_store == tuple(a)


def test_without_names_each_call_counts_as_another_request():
    manager = new_manager(store_threshold=2)
    assert manager.prepare_store(keys("a", 1)).keys_to_store == ()
    assert manager.prepare_store(keys("a", 1)).keys_to_store == tuple(keys("a", 1))


# ---- hints ----


def test_a_request_may_ask_not_to_be_offloaded():
    manager = new_manager()
    a = keys("a", 2)
    assert put(manager, a, {"offload": False}).keys_to_store == ()
    assert manager.explain(a) == ["not_wanted"] * 2
    assert manager.figures.not_stored["cpu", "not_wanted"] == 2


def test_a_request_may_ask_for_some_tiers_only():
    near, far = Store(), Store()
    manager = new_manager(stores=[near, far])
    (a,), (b,), (c,) = keys("a", 1), keys("b", 1), keys("c", 1)
    put(manager, [a], {"tiers": ["tier1"]}, "r1")
    put(manager, [b], {"tiers": []}, "r2")
    put(manager, [c])
    assert take_written(manager) == {("tier1", a), ("tier0", c), ("tier1", c)}
    near.held.add(keys("d", 1)[0])
    only_far = ReqContext("r3", {"kvoffload": {"tiers": ["tier1"]}})
    assert manager.lookup_prefix(keys("d", 1), only_far) == (0, False)
    assert manager.lookup_prefix(keys("d", 1)) == (1, False)


class Asked(Store):
    """Does not know yet; remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def holds(self, key):
        self.asked.append(key)
        return None


def test_questions_to_a_tier_that_needs_time_travel_together():
    tier = Asked()
    manager = new_manager(slots=20, stores=[tier])
    a = keys("a", 8)
    put(manager, a[2:3])
    tier.asked.clear()
    assert manager.lookup_prefix(a) == (0, True)
    assert tier.asked == [*a[:2], *a[3:]]  # and not what is in host memory


def test_no_more_questions_are_asked_ahead_than_a_limit(monkeypatch):
    monkeypatch.setattr("kvoffload.offload.lookup.ASKED_AHEAD", 3)
    tier = Asked()
    new_manager(stores=[tier]).lookup_prefix(keys("a", 8))
    assert tier.asked == keys("a", 4)


# ---- write-through ----


def test_the_high_water_mark_of_write_through_is_in_bytes():
    manager = new_manager(stores=[Store()], max_persisting_slots=3, slot_bytes=1 << 20)
    put(manager, keys("a", 5))
    (first,) = manager.take_transfers()
    assert len(first.keys) == 3
    told = figures(manager)
    assert (told["inflight_bytes"], told["waiting_chunks"]) == (
        {"cpu": 0, "tier0": 3 << 20},
        {"tier0": 2},
    )
    manager.complete(first, [True] * 3)
    (second,) = manager.take_transfers()
    assert len(second.keys) == 2


def test_while_something_is_loaded_from_a_tier_less_is_written():
    a = keys("a", 1)
    manager = new_manager(slots=20, stores=[Store(a)], max_persisting_slots=8)
    manager.prepare_load(a)
    put(manager, keys("b", 8))
    (some,) = manager.take_transfers()
    assert len(some.keys) == 2
    manager.complete_load(a)  # the rest may go
    (rest,) = manager.take_transfers()
    assert len(rest.keys) == 6


def test_what_comes_from_a_far_tier_goes_to_the_nearer_ones():
    near, far = Store(), Store(keys("a", 3))
    near.held.add(keys("a", 1)[0])
    manager = new_manager(stores=[near, far])
    spec = fetch(manager, keys("a", 3))
    assert spec.fetches
    assert take_written(manager) == {("tier0", *keys("a", 3)[1:])}


def test_answers_that_name_a_request_alone_keep_to_the_tiers_it_asked_for():
    a = keys("a", 1)
    manager = new_manager(stores=[Store(), Store(a)])
    manager.prepare_load(a, ReqContext("r", {"kvoffload": {"tiers": ["tier1"]}}))
    manager.complete_load(a, ReqContext("r"))
    assert manager.take_transfers() == []


def test_without_promotion_what_is_loaded_is_written_nowhere():
    manager = new_manager(stores=[Store(), Store(keys("a", 3))], promote=False)
    fetch(manager, keys("a", 3))
    assert take_written(manager) == set()


def test_what_comes_from_the_nearest_tier_is_written_nowhere():
    manager = new_manager(stores=[Store(keys("a", 3)), Store()])
    fetch(manager, keys("a", 3))
    assert take_written(manager) == set()


def test_what_was_written_to_a_replaced_store_is_not_announced():
    manager = new_manager(stores=[Store()])
    put(manager, keys("a", 1))
    (transfer,) = manager.take_transfers()
    manager.take_events()
    manager.replace_tiers([Tier("tier0", Store())])
    manager.complete(transfer, [True])
    (replaced,) = manager.take_events()
    assert (replaced.keys, replaced.medium, replaced.reason) == ((), "TIER0", "replaced")
    assert figures(manager)["inflight_bytes"]["tier0"] == 0
