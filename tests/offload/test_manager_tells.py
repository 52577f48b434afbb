"""What the manager tells: why a chunk is missing, and events."""

import pytest
from manager_parts import Store, figures, keys, new_manager, put, write_through

from kvoffload.backends.base import Removal
from kvoffload.offload.base import ChunksRemoved, Reason

# ---- why a chunk is missing ----


def test_why_a_chunk_is_missing():
    store = Store()
    manager = new_manager(slots=2, stores=[store], max_persisting_slots=1)
    a, b = keys("a", 2), keys("b", 2)
    put(manager, a)  # one is written through, the other waits
    (transfer,) = manager.take_transfers()
    manager.complete(transfer, [False])
    for late in manager.take_transfers():
        manager.complete(late, [True])
        store.held.update(late.keys)
    put(manager, b)
    assert manager.explain([*a, *b, *keys("c", 1)]) == [
        "evicted",
        "TIER0",
        "CPU",
        "CPU",
        "never_stored",
    ]
    store.held.clear()
    for reason in ("expired", "corrupt"):
        store.removals = [Removal(a[1], reason)]
        manager.take_events()
        assert manager.explain(a[1:]) == [reason]


def test_a_chunk_without_a_record_is_unknown_while_a_tier_is_down():
    stores = [Store(), Store()]
    manager = new_manager(slots=1, stores=stores)
    put(manager, keys("a", 1))
    asked = [*keys("a", 1), *keys("b", 1)]
    stores[1].is_up = False
    assert manager.explain(asked) == ["CPU", "tier_down"]
    stores[1].is_up = True
    assert manager.explain(asked) == ["CPU", "never_stored"]


def test_a_chunk_that_host_memory_evicted_is_unknown_while_a_tier_is_down():
    store = Store()
    manager = new_manager(slots=1, stores=[store])
    put(manager, keys("a", 1))
    (transfer,) = manager.take_transfers()
    manager.complete(transfer, [True])
    store.held.update(transfer.keys)
    put(manager, keys("b", 1))
    assert manager.explain(keys("a", 1)) == ["TIER0"]
    store.held.clear()  # a tier that is down tells of nothing
    store.is_up = False
    assert manager.explain(keys("a", 1)) == ["tier_down"]
    store.is_up = True
    assert manager.explain(keys("a", 1)) == ["evicted"]


def test_what_waits_for_a_tier_that_hangs_is_bounded():
    manager = new_manager(slots=4, stores=[Store()], max_persisting_slots=1)
    stored = 0
    for i in range(10):
        manager.touch(keys("prompt 0", 2)[1:])  # first in the queue, never evicted
        stored += len(put(manager, keys(f"prompt {i}", 2), name=f"r{i}").keys_to_store)
        waiting = figures(manager)["waiting_chunks"]["tier0"]
        assert waiting <= 4
    (transfer,) = manager.take_transfers()  # it never ends
    dropped = manager.figures.not_stored["tier0", "back_pressure"]
    assert dropped > 10
    assert stored == dropped + waiting + len(transfer.keys)


def test_hits_are_counted_by_where_they_are():
    store = Store(keys("a", 3))
    manager = new_manager(stores=[store])
    a = keys("a", 4)

    def counted():
        told = figures(manager)["lookups"]
        return told["cpu"]["hit"], told["tier0"]["hit"], told[""]["miss"], told[""]["pending"]

    assert manager.lookup_prefix(a) == (3, False)
    assert counted() == (0, 3, 1, 0)
    put(manager, a)
    assert manager.lookup_prefix(a) == (4, False)  # all in host memory
    assert manager.lookup_prefix([*a[:2], *keys("b", 1)]) == (2, False)
    assert counted() == (6, 3, 2, 0)
    manager.reset_cache()
    write_through(manager)
    manager.prepare_load(a[:1])  # from the tier: about to be in host memory
    assert manager.lookup_prefix(a) == (0, True)
    assert counted() == (6, 3, 2, 1)


def test_a_chunk_that_host_memory_has_no_room_for_is_a_hit_of_no_tier():
    manager = new_manager(slots=4, stores=[Store(keys("a", 10))])
    assert manager.lookup_prefix(keys("a", 10)) == (4, False)
    told = figures(manager)["lookups"]
    assert (told["cpu"]["hit"], told["tier0"]["hit"]) == (0, 4)


def test_after_a_change_of_namespace_what_was_known_belongs_to_the_other_one():
    manager = new_manager(slots=2)
    put(manager, keys("a", 1))
    manager.reset_cache()
    assert manager.explain(keys("a", 1)) == ["reset"]
    manager.replace_tiers([])
    assert manager.explain([*keys("a", 1), *keys("b", 1)]) == ["other_namespace", "never_stored"]


def test_a_failed_load_is_explained_by_what_the_transfer_said():
    store = Store(keys("a", 1))
    manager = new_manager(stores=[store])
    manager.prepare_load(keys("a", 1))
    manager.complete_load(keys("a", 1), success=False, reason="deadline")
    assert manager.explain(keys("a", 1)) == ["deadline"]


def test_a_chunk_dropped_once_and_written_later_was_evicted():
    store = Store()
    manager = new_manager(slots=2, stores=[store], max_persisting_slots=1)
    a, b = keys("a", 1), keys("b", 1)
    put(manager, a)
    (busy,) = manager.take_transfers()
    put(manager, b)
    put(manager, keys("c", 1))  # evicts b, which waits
    manager.complete(busy, [True])
    assert manager.explain(b) == ["dropped"]
    put(manager, b)
    write_through(manager)
    put(manager, keys("d", 2))
    assert manager.explain(b) == ["evicted"]


# ---- events ----


def resident_by(events):
    resident = {}
    for event in events:
        here = resident.setdefault(event.medium, set())
        removed = isinstance(event, ChunksRemoved)
        if removed and not event.keys:
            here.clear()
        (here.difference_update if removed else here.update)(event.keys)
    return resident


def test_whoever_misses_events_is_told_so_and_believes_nothing_that_is_not_so(monkeypatch):
    monkeypatch.setattr("kvoffload.offload.events.MAX_EVENTS", 10)
    manager = new_manager(slots=3)
    put(manager, keys("early", 1))
    heard = list(manager.take_events())
    for i in range(10):
        put(manager, keys(f"prompt {i}", 1))
    assert manager.counters["events_lost"] == 8  # ten chunks came, eight left
    heard += manager.take_events()
    (lost,) = [event for event in heard if event.reason == "lost"]
    assert lost == ChunksRemoved((), "CPU", Reason.LOST)
    assert resident_by(heard)["CPU"] == {key for key, _ in manager._host.ready()}
    put(manager, keys("late", 1))
    assert {event.reason for event in manager.take_events()} == {"stored", "evicted"}


def test_events_that_no_consumer_takes_are_bounded_in_keys(monkeypatch):
    monkeypatch.setattr("kvoffload.offload.events.MAX_EVENT_KEYS", 10)
    manager = new_manager(slots=40)
    for name in "abc":
        put(manager, keys(name, 4))
    assert manager.counters["events_lost"] == 1
    heard = manager.take_events()
    assert heard[0] == ChunksRemoved((), "CPU", Reason.LOST)
    assert resident_by(heard)["CPU"] == {*keys("b", 4), *keys("c", 4)}
    put(manager, keys("d", 10))
    assert resident_by(manager.take_events()) == {"CPU": set(keys("d", 10))}
    put(manager, keys("e", 11))  # one event beyond the bound is lost as well
    assert manager.take_events() == [ChunksRemoved((), "CPU", Reason.LOST)]


def test_what_stays_resident_is_not_named_again_after_a_gap(monkeypatch):
    monkeypatch.setattr("kvoffload.offload.events.MAX_EVENTS", 2)
    manager = new_manager(slots=9)
    for name in "abc":
        put(manager, keys(name, 1))
    assert resident_by(manager.take_events()) == {"CPU": {*keys("b", 1), *keys("c", 1)}}


@pytest.mark.parametrize("still_there", [True, False])
def test_a_tier_that_gave_a_chunk_up_and_got_it_again_or_the_other_way_round(still_there):
    store = Store()
    manager = new_manager(stores=[store])
    a = keys("a", 1)
    put(manager, a)
    (transfer,) = manager.take_transfers()
    # Before anyone heard of either: it was given up, and written; only the store knows the order.
    store.removals = [Removal(a[0], "evicted")]
    store.held = set(a if still_there else ())
    manager.complete(transfer, [True])
    resident = set()
    for event in manager.take_events():
        if event.medium == "TIER0":
            removed = isinstance(event, ChunksRemoved)
            (resident.difference_update if removed else resident.update)(event.keys)
    assert resident == store.held
