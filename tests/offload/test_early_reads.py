"""Early reads: in which order, how much at once, for whom not, and how they end."""

import pytest
from manager_parts import Store, figures, keys, new_manager, put

from kvoffload.offload import early_reads
from kvoffload.offload.base import EarlyRead, ReqContext
from kvoffload.offload.host_cache import HostCache
from tests.support.manager_check import check


def waiting_manager(store, slots=64, **settings):
    settings = {"waiting_share": 0.9, "max_persisting_slots": 0, **settings}
    return new_manager(slots, [store], **settings)


def queue(manager, name, chunks, **context):
    manager.request_queued(lambda: chunks, ReqContext(name, **context))


def step(manager):
    """Serve the queue for a step; return the reads that it began."""
    manager.serve_queue()
    jobs = manager.take_transfers()
    check(manager)
    assert all(isinstance(job, EarlyRead) for job in jobs)
    return jobs


def early_in_flight(manager, chunks, name="waits", **context):
    queue(manager, name, chunks, **context)
    step(manager)
    return step(manager)


def end(manager, job, ok=True, settled=True):
    manager.complete(job, [ok] * len(job.keys), settled, "" if ok else "missing")
    check(manager)


def end_all(manager, jobs):
    for job in jobs:
        end(manager, job)


def results(manager):
    return figures(manager)["queue_chunks"]


def test_the_first_of_the_queue_is_read_first_and_within_the_budget():
    first, second = keys("first", 12), keys("second", 12)
    manager = waiting_manager(Store([*first, *second]))
    queue(manager, "first", first)
    queue(manager, "second", second)
    assert step(manager) == []  # a request that does not wait loads by itself
    read = []
    while jobs := step(manager):
        assert sum(len(job.keys) for job in jobs) == 64 // 8
        assert max(len(job.keys) for job in jobs) <= 64 // 16
        assert step(manager) == []  # the budget is used up
        for job in jobs:
            assert manager.lookup(job.keys[0]) is None
            end(manager, job)
            read += job.keys
    assert read == [*first, *second]
    assert manager.lookup_prefix(second, ReqContext("second")) == (12, False)
    assert results(manager)["read_early"] == 24
    assert len(manager._host.claims) == 24


def test_what_host_memory_has_is_not_read_and_a_gap_is():
    a = keys("a", 10)
    manager = waiting_manager(Store(a))
    for part in (a[:3], a[5:8]):
        put(manager, part)
    queue(manager, "r", a)
    read = []
    for _ in range(5):
        for job in step(manager):
            read += job.keys
            end(manager, job)
    assert read == [*a[3:5], *a[8:]]
    manager.request_admitted(ReqContext("r"))
    assert results(manager)["read_in_vain"] == 4


def test_a_load_of_what_was_read_is_not_in_vain():
    a, context = keys("a", 6), ReqContext("r")
    manager = waiting_manager(Store(a))
    end_all(manager, early_in_flight(manager, a, "r"))
    load = manager.begin_load(a, context)
    assert not load.sources
    manager.request_admitted(context)
    manager.complete(load, [True] * 6)
    assert results(manager)["read_in_vain"] == 0
    assert not manager._host.claims


def test_loads_of_running_requests_go_first():
    a, b = keys("a", 6), keys("b", 6)
    manager = waiting_manager(Store([*a, *b]))
    queue(manager, "r", b)
    step(manager)
    load = manager.begin_load(a, ReqContext("running"))
    assert step(manager) == []
    manager.complete(load, [True] * 6)
    assert [key for job in step(manager) for key in job.keys] == b


@pytest.mark.parametrize("end_first", [True, False])
@pytest.mark.parametrize("how", ["aborted", "about to load", "replaced"])
def test_reads_end_with_the_wait(how, end_first):
    a, store = keys("a", 20), Store(keys("a", 20))
    manager = waiting_manager(store)
    jobs = early_in_flight(manager, a, "r")
    if end_first:
        end_all(manager, jobs)
    if how == "aborted":
        manager.retire(a, ReqContext("r"))
    elif how == "replaced":
        manager.replace_tiers([])
    if not end_first:
        end_all(manager, jobs)
    for _ in range(3):
        if how == "about to load":  # the engine asks in each step
            manager.request_answered(ReqContext("r"), is_pending=True)
        assert step(manager) == []
    assert manager.resident == 8
    if how == "aborted":
        assert results(manager)["read_in_vain"] == 8
    assert manager.busy_slots == 0


@pytest.mark.parametrize("end_first", [True, False])
def test_after_a_reset_that_keeps_the_tiers_reads_begin_again(end_first):
    chunks = keys("a", 6)
    manager = waiting_manager(Store(chunks))
    jobs = early_in_flight(manager, chunks)
    if end_first:
        end_all(manager, jobs)
    manager.reset_cache()
    assert manager.resident == 0
    assert not manager._host.claims
    again = step(manager)
    if not end_first:
        end_all(manager, jobs)
        again += step(manager)
    end_all(manager, again)
    assert [key for job in again for key in job.keys] == chunks
    assert manager.lookup_prefix(chunks, ReqContext("waits")) == (6, False)
    assert len(manager._host.claims) == 6


def test_nothing_is_read_from_tiers_that_a_request_must_not_use():
    a = keys("a", 6)
    manager = waiting_manager(Store(a))
    queue(manager, "r", a, kv_transfer_params={"kvoffload": {"tiers": []}})
    assert [step(manager) for _ in range(3)] == [[]] * 3


def test_early_reads_evict_nothing_that_is_kept():
    a, b, c = keys("a", 10), keys("b", 10), keys("c", 10)
    manager = waiting_manager(Store([*b, *c]), slots=16, waiting_share=1.0)
    put(manager, [*a, *keys("idle", 6)])
    queue(manager, "kept", a)
    queue(manager, "reads", b)
    queue(manager, "also", c)
    for _ in range(20):
        for job in step(manager):
            end(manager, job)
        assert all(manager._host.is_ready(key) for key in a)
    assert manager.lookup_prefix(b, None)[0] == 10  # six in host memory, the rest on the tier
    assert sum(map(manager._host.is_ready, b)) == 6
    assert manager.resident == 16


@pytest.mark.parametrize(("tenants", "gives_way"), [("   ", 1), ("aba", 1), ("aab", 0)])
def test_the_first_of_the_queue_is_read_though_later_requests_keep_the_whole_share(
    tenants, gives_way
):
    """The last one of the queue gives way, or of its tenant, if that one has all it may."""
    first, *later = (keys(name, 20) for name in ("first", "second", "third"))
    manager = waiting_manager(Store(first), slots=40, waiting_share=1.0)
    put(manager, [*later[0], *later[1]])
    for name, tenant in zip(("second", "third"), tenants[1:], strict=True):
        queue(manager, name, keys(name, 20), tenant=tenant.encode())
    step(manager)
    manager.request_queued(lambda: first, ReqContext("first", tenant=tenants[0].encode()), True)
    read = []
    for _ in range(20):
        for job in step(manager):
            read += job.keys
            end(manager, job)
    assert read == first
    for i, chunks in enumerate((*later, first)):
        assert sum(map(manager._host.claims.__contains__, chunks)) == (i != gives_way) * 20
        assert i == gives_way or all(map(manager._host.is_ready, chunks))


def test_a_tier_that_hangs_keeps_its_budget_and_no_more():
    a = keys("a", 40)
    store = Store(a)
    manager = waiting_manager(store)
    jobs = early_in_flight(manager, a, "r")
    for job in jobs:
        end(manager, job, ok=False, settled=False)
        assert not store.held & {*job.keys}  # a load of it would be as late
    queue(manager, "s", a[8:])
    assert [step(manager) for _ in range(5)] == [[]] * 5
    assert manager.busy_slots == 8
    for job in jobs:
        manager.release_slots(job.unsettled_slots(), job)
    assert manager.busy_slots == 0
    assert len(step(manager)) == 2


@pytest.mark.parametrize("late", ["early reads", "loads"])
def test_what_a_tier_that_hangs_has_is_read_from_the_next_tier(late):
    a, loaded = keys("a", 20), keys("loaded", 16)
    near, far = Store([*a, *loaded]), Store(a)
    manager = new_manager(64, [near, far], waiting_share=0.9, max_persisting_slots=0)
    if late == "loads":
        hung = [manager.begin_load(loaded, ReqContext("running"))]
    else:
        hung = early_in_flight(manager, a)
    assert {*near.held} == {*a, *loaded}
    for job in hung:
        manager.complete(job, [False] * len(job.keys), False, "deadline")
    queue(manager, "waits", a)
    read = []
    for _ in range(12):
        for job in step(manager):
            assert job.tier.name == "tier1"
            end(manager, job)
            read += job.keys
    assert read == a
    for job in hung:
        manager.release_slots(job.unsettled_slots(), job)
    more = keys("more", 4)
    near.held.update(more)
    far.held.update(more)
    queue(manager, "then", more)
    step(manager)
    assert [job.tier.name for job in step(manager)] == ["tier0"]


def test_a_tier_whose_late_loads_keep_all_that_it_may_reads_nothing_early():
    loaded, waits = keys("loaded", 40), keys("waits", 20)
    manager = waiting_manager(Store([*loaded, *waits]))
    late = manager.begin_load(loaded[:32], ReqContext("running"))
    manager.complete(late, [False] * 32, settled=False, reason="deadline")
    assert early_in_flight(manager, waits) == []
    manager.release_slots(late.unsettled_slots(), late)
    assert step(manager)


def test_loads_and_early_reads_in_flight_share_what_a_tier_may_keep():
    """Half of host memory: it may be that none of them ends."""
    loads, waits = [keys(name, 8) for name in "abcdef"], keys("waits", 20)
    manager = waiting_manager(Store([*waits, *(key for chunks in loads for key in chunks)]))
    reads = early_in_flight(manager, waits)
    assert sum(len(job.keys) for job in reads) == 8
    begun = []
    for i, chunks in enumerate(loads):
        if manager.lookup_prefix(chunks, ReqContext(f"r{i}")) == (8, False):
            begun.append(manager.begin_load(chunks, ReqContext(f"r{i}")))
    assert len(begun) == 3  # with the early reads they are half of host memory
    assert manager.is_fetching(loads[-1])
    end_all(manager, reads)
    assert manager.lookup_prefix(loads[-1], ReqContext("r5")) == (8, False)


def test_a_chunk_that_fails_ends_the_prefix_and_another_tier_may_have_it():
    a = keys("a", 6)
    near, far = Store(a), Store(a)
    manager = new_manager(64, [near, far], waiting_share=0.9, promote=False)
    for job in early_in_flight(manager, a, "r"):
        manager.complete(job, [key != a[2] for key in job.keys], True, "corrupt")
        check(manager)
    (again,) = step(manager)
    assert (again.tier.name, again.keys) == ("tier1", (a[2],))
    end(manager, again)
    for _ in range(3):
        step(manager)
    assert manager.lookup_prefix(a, ReqContext("r")) == (6, False)
    assert manager.waiting.requests.get("r").num_kept == 6


def test_a_tier_without_an_answer_is_asked_again():
    class Slow(Store):
        answer = None

        def holds(self, key):
            return self.answer if key in self.held else False

    a, store = keys("a", 4), Slow(keys("a", 4))
    manager = waiting_manager(store)
    queue(manager, "r", a)
    assert [step(manager) for _ in range(4)] == [[]] * 4
    store.answer = True
    assert [key for job in step(manager) for key in job.keys] == a


def test_requests_in_an_engine_without_a_queue_read_nothing_early():
    """Each is asked about before the second step."""
    a = keys("a", 6)
    manager = waiting_manager(Store(a))
    for i in range(5):
        queue(manager, f"{i}", a)
        assert step(manager) == []
        assert manager.lookup_prefix(a, ReqContext(f"{i}")) == (6, False)
        manager.request_answered(ReqContext(f"{i}"), is_pending=False)
        manager.request_admitted(ReqContext(f"{i}"))
        assert step(manager) == []


def test_a_request_whose_load_waits_for_an_answer_reads_nothing_early():
    a, context = keys("a", 6), ReqContext("r")
    manager = waiting_manager(Store(a))
    queue(manager, "r", a)
    step(manager)
    for _ in range(3):  # the engine asks in each step
        manager.request_answered(context, is_pending=True)
        assert step(manager) == []
    manager.request_answered(context, is_pending=False)
    assert [key for job in step(manager) for key in job.keys] == a


def test_a_request_is_read_early_once_the_engine_asks_no_more():
    """An engine that is full asks none, also not for an answer that it has to wait for."""
    a, context = keys("a", 6), ReqContext("r")
    manager = waiting_manager(Store(a))
    queue(manager, "r", a)
    step(manager)
    manager.request_answered(context, is_pending=True)
    assert step(manager) == []
    assert [key for job in step(manager) for key in job.keys] == a


def test_a_request_that_the_engine_has_no_room_for_is_read_first():
    """An engine asks what the first in its queue can load before it looks for room."""
    a, b = keys("a", 6), keys("b", 6)
    manager = waiting_manager(Store([*a, *b]))
    for name, chunks in (("first", a), ("second", b)):
        queue(manager, name, chunks)
    step(manager)
    assert manager.lookup_prefix(a, ReqContext("first")) == (6, False)
    manager.request_answered(ReqContext("first"), is_pending=False)
    assert [key for job in step(manager) for key in job.keys] == [*a, *b[:2]]


def test_an_answer_after_an_abort_leaves_no_hint_for_the_next_request_of_that_name():
    chunks = keys("a", 6)
    manager = waiting_manager(Store(chunks))
    told = {"kvoffload": {"offload": False}}
    jobs = early_in_flight(manager, chunks, "r", kv_transfer_params=told)
    assert jobs
    manager.retire((), ReqContext("r", told))
    end_all(manager, jobs)
    assert manager.prepare_store(keys("new", 3), ReqContext("r")).keys_to_store


@pytest.mark.parametrize("begin", ["early read", "load"])
def test_a_read_that_a_reset_made_stale_says_nothing_of_its_tier(begin):
    chunks, store = keys("a", 4), Store(keys("a", 4))
    manager = waiting_manager(store)
    if begin == "load":
        jobs = [manager.begin_load(chunks, ReqContext("r"))]
    else:
        jobs = early_in_flight(manager, chunks, "r")
    for job in jobs:
        job.stale = True
    manager.reset_cache()
    for job in jobs:
        end(manager, job, ok=False)
    assert manager.lookup_prefix(chunks, ReqContext("s")) == (4, False)
    assert manager.busy_slots == 0


def test_what_a_cleared_tier_no_longer_brings_is_kept_for_no_request():
    chunks = keys("a", 4)
    manager = waiting_manager(Store(chunks))
    load = manager.begin_load(chunks, ReqContext("r"))
    queue(manager, "s", chunks)
    step(manager)
    step(manager)
    load.stale = True  # as after an operator's clear of a tier, which leaves host memory
    end(manager, load, ok=False)
    check(manager)
    manager.retire((), ReqContext("s"))
    check(manager)
    assert manager.busy_slots == 0


def test_what_one_tier_fails_to_read_is_read_from_the_next():
    chunks = keys("a", 3)
    manager = new_manager(
        64,
        [Store(chunks), Store(chunks)],
        waiting_share=0.9,
        max_persisting_slots=0,
        promote=False,
    )
    queue(manager, "r", chunks)
    queue(manager, "same", chunks)
    asked = []
    for _ in range(12):
        manager.serve_queue()
        for job in manager.take_transfers():
            asked.append(job.tier.name)
            end(manager, job, ok=job.tier is manager.tiers[1])
    assert asked[0] != asked[-1]
    assert manager.lookup_prefix(chunks, ReqContext("r")) == (3, False)


@pytest.mark.parametrize("size", [60, 70])
def test_a_load_of_nearly_all_of_host_memory_waits_for_early_reads_and_is_no_shorter(size):
    wanted, waits, context = keys("wanted", size), keys("waits", 40), ReqContext("running")
    manager = waiting_manager(Store([*wanted, *waits]))
    jobs = early_in_flight(manager, waits)
    assert manager.lookup_prefix(wanted, context) == (64 - 8, True)
    assert manager.has_room(wanted) is None
    assert manager.is_fetching(wanted)
    end(manager, jobs[0])
    assert step(manager) == []  # no read takes the room that is waited for
    end_all(manager, jobs[1:])
    most = min(size, 64)
    assert manager.lookup_prefix(wanted, context) == (most, False)
    assert manager.has_room(wanted) is (size == most)
    assert not manager.is_fetching(wanted)
    load = manager.begin_load(wanted[:most], context)
    assert len(load.keys) == most
    manager.complete(load, [True] * most)


def test_early_reads_go_on_after_a_load_that_lacked_room(monkeypatch):
    now_s, wanted, waits = [5.0], keys("wanted", 60), keys("waits", 40)
    monkeypatch.setattr(HostCache, "now_s", staticmethod(lambda: now_s[0]))
    manager = waiting_manager(Store([*wanted, *waits]))
    jobs = early_in_flight(manager, waits)
    manager.lookup_prefix(wanted, ReqContext("running"))
    end_all(manager, jobs)
    assert step(manager) == []
    now_s[0] += 1.0
    assert step(manager)


def test_a_store_of_nearly_all_of_host_memory_is_offered_again_and_no_shorter():
    new, waits, context = keys("new", 60), keys("waits", 40), ReqContext("running")
    manager = waiting_manager(Store(waits))
    jobs = early_in_flight(manager, waits)
    output = manager.prepare_store(new, context)
    assert (len(output.job.keys), output.refused_keys) == (56, tuple(new[56:]))
    end_all(manager, jobs)
    again = manager.prepare_store(output.refused_keys, context)
    assert again.job.keys == tuple(new[56:])
    assert not any(manager.figures.not_stored.values())
    for job in (output.job, again.job):
        manager.complete(job, [True] * len(job.keys))
    check(manager)


@pytest.mark.parametrize("num_tiers", [1, 4, 5])
def test_early_reads_of_a_tier_without_a_load_yet_do_not_fill_it(num_tiers):
    wanted, waits = keys("wanted", 10), keys("waits", 40)
    stores = [Store([*wanted, *waits]), *(Store() for _ in range(num_tiers - 1))]
    manager = new_manager(80, stores, waiting_share=0.9, max_persisting_slots=0, load_timeout_s=5.0)
    assert early_in_flight(manager, waits)
    assert manager.lookup_prefix(wanted, ReqContext("running")) == (10, False)
    assert not manager.is_fetching(wanted)


def test_a_fast_tier_reads_more_at_once(monkeypatch):
    """As much as it reads in 0.2 s: the engine's step may take as long."""
    monkeypatch.setattr(early_reads, "MOST_BYTES", 4)
    a = keys("a", 100)
    manager = waiting_manager(Store(a), slots=128)
    jobs = early_in_flight(manager, a)
    assert [len(job.keys) for job in jobs] == [2, 2]
    end_all(manager, jobs)
    speed = manager.promises._loads["tier0"].speed
    for _ in range(4):
        speed.add(4, 0.08)
    assert [len(job.keys) for job in step(manager)] == [5, 5]
