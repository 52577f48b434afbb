"""Answers that come twice, or from somebody else: counted, and nothing changes."""

from collections import Counter

import pytest
from opcodes import count_opcodes

from kvoffload.errors import UsageError
from kvoffload.offload.base import CPULoadStoreSpec, LoadJob, ReqContext, make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.in_flight import JobsInFlight
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy

A, B = ReqContext("a"), ReqContext("b")
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(3)]


def new_manager(slots=1):
    return TieredOffloadingManager(HostCache(slots, LRUPolicy(slots)))


def put(manager, wanted, context):
    manager.prepare_store(wanted, context)
    manager.complete_store(wanted, context)


@pytest.mark.parametrize("reset", [False, True])
def test_a_load_that_is_answered_twice_does_not_unpin_what_another_request_loads(reset):
    manager = new_manager()
    put(manager, KEYS[:1], A)
    for context in (A, B):
        manager.prepare_load(KEYS[:1], context)
    if reset:
        manager.reset_cache()
    for _ in range(2):
        manager.complete_load(KEYS[:1], A)
    assert manager.prepare_store(KEYS[1:2], A) is None  # B still reads the only slot
    assert manager.counters["unexpected_completion"] == 1
    manager.complete_load(KEYS[:1], B)
    assert manager.busy_slots == 0


def test_a_failure_told_twice_does_not_forget_what_another_request_loads():
    manager = new_manager()
    put(manager, KEYS[:1], A)
    manager.prepare_load(KEYS[:1], A)
    manager.complete_load(KEYS[:1], A, success=False)
    put(manager, KEYS[:1], B)
    manager.complete_load(KEYS[:1], A, success=False)
    assert manager.lookup(KEYS[0]) is True


def test_a_store_that_is_answered_twice_does_not_publish_what_another_request_writes():
    manager = new_manager()
    put(manager, KEYS[:1], A)
    put(manager, KEYS[1:2], B)
    manager.prepare_store(KEYS[:1], B)
    manager.complete_store(KEYS[:1], A)
    assert manager.lookup(KEYS[0]) is False
    assert manager.counters["unexpected_completion"] == 1
    manager.complete_store(KEYS[:1], B)
    assert manager.lookup(KEYS[0]) is True


def test_a_request_may_answer_its_transfers_in_parts_and_in_any_order():
    manager = new_manager(3)
    manager.prepare_store(KEYS[:1], A)
    manager.prepare_store(KEYS[1:], A)
    manager.complete_store([KEYS[2], KEYS[0]], A)
    manager.complete_store([KEYS[1]], A, success=False)
    assert [manager.lookup(key) for key in KEYS] == [True, False, True]
    assert manager.counters["unexpected_completion"] == 0


def test_what_one_request_loads_twice_at_once_it_answers_twice():
    manager = new_manager()
    put(manager, KEYS[:1], A)
    for _ in range(2):
        manager.prepare_load(KEYS[:1], A)
    for busy in (1, 0, 0):
        manager.complete_load(KEYS[:1], A)
        assert manager.busy_slots == busy
    assert manager.counters["unexpected_completion"] == 1


@pytest.mark.parametrize("verb", ["store", "load"])
def test_an_answer_for_no_chunk_does_not_make_the_answer_for_all_dearer(verb):
    took = []
    for count in (100, 600):
        keys = [make_offload_key(i.to_bytes(32, "big"), 0) for i in range(count)]
        manager = new_manager(count)
        manager.prepare_store(keys, A)
        complete = manager.complete_store
        if verb == "load":
            complete(keys, A)
            manager.prepare_load(keys, A)
            complete = manager.complete_load
        complete([], A, success=False)
        took.append(count_opcodes(lambda c=complete, k=keys: c(k, A), "/kvoffload/offload/"))
        assert manager.busy_slots == 0
    assert (took[1] - took[0]) / 500 < 1


def test_nothing_is_kept_of_what_was_answered():
    counters = Counter()
    jobs = JobsInFlight(counters)

    def end(keys, context):
        return [part.keys for part in jobs.take_parts(LoadJob, keys, context)]

    for context in (A, B, None):
        number = len(jobs)
        jobs[number] = LoadJob(number, tuple(KEYS), CPULoadStoreSpec(()), context, 3, None)
    assert end((), A) == []
    assert end(KEYS, A) == [tuple(KEYS)]
    assert end(KEYS[::-1], B) == [tuple(KEYS[::-1])]
    assert counters["unexpected_completion"] == 0
    assert end(KEYS[:1] * 2, None) == [(KEYS[0],)]
    assert counters["unexpected_completion"] == 1
    assert end(KEYS[1:], None) == [tuple(KEYS[1:])]
    assert len(jobs) == 0


def test_a_job_is_answered_once_with_a_verdict_for_each_chunk():
    manager = new_manager(3)
    store = manager.prepare_store(KEYS, A).job
    for _ in range(2):
        manager.complete(store, (True, False, True))
    assert [manager.lookup(key) for key in KEYS] == [True, False, True]
    load = manager.begin_load([KEYS[0], KEYS[2]], B)
    assert (load.keys, load.num_asked) == ((KEYS[0], KEYS[2]), 2)
    for _ in range(2):
        manager.complete(load, (True, False))
    assert [manager.lookup(key) for key in KEYS] == [True, False, False]
    assert manager.busy_slots == 0
    assert manager.counters["unexpected_completion"] == 2


@pytest.mark.parametrize("ok", [(), (True,), (True, True, True, False)])
def test_an_answer_of_the_wrong_length_is_refused_and_changes_nothing(ok):
    manager = new_manager(3)
    job = manager.prepare_store(KEYS, A).job
    with pytest.raises(UsageError, match="3 chunks"):
        manager.complete(job, ok)
    assert [manager.lookup(key) for key in KEYS] == [False] * 3
    manager.complete(job, [True] * 3)
    assert [manager.lookup(key) for key in KEYS] == [True] * 3
    assert manager.counters["unexpected_completion"] == 0
