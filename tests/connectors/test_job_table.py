"""Answers of several ranks: the manager is answered once, after the last rank."""

import pytest
from manager_parts import Store, keys, new_manager, put

from kvoffload.connectors.jobs import JobTable
from kvoffload.messages import TransferResult, make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy
from tests.support.manager_check import check

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(3)]
ID = 77
"""The id under which workers carry a job out need not be the manager's."""


@pytest.fixture
def manager():
    return TieredOffloadingManager(HostCache(3, LRUPolicy(3)))


def store(manager, ranks, keys=KEYS):
    jobs = JobTable(manager, ranks)
    jobs.begin(ID, manager.prepare_store(keys).job)
    return jobs


def answer(jobs, job_id, ok, reason="", settled=True):
    return jobs.answer(TransferResult(job_id, ok, settled, reason=reason))


def test_a_chunk_is_good_only_if_it_is_good_on_every_rank(manager):
    jobs = store(manager, 3)
    assert answer(jobs, ID, (True, True, False)) is None
    assert manager.lookup(KEYS[0]) is False
    assert answer(jobs, ID, (True, False, True), "deadline") is None
    ended = answer(jobs, ID, (True, True, True))
    assert ended.ok == (True, False, False)
    assert (ended.reason, ended.stale, len(jobs)) == ("deadline", False, 0)
    assert [manager.lookup(key) for key in KEYS] == [True, False, False]
    assert manager.busy_slots == 0


def test_slots_of_failed_chunks_stay_out_of_use_until_all_ranks_are_settled(manager):
    jobs = store(manager, 3)
    for ok in ((True, False, False), (False, True, True)):
        answer(jobs, ID, ok, settled=False)
    jobs.settle(ID)  # one rank, before the last one answers
    answer(jobs, ID, (False, False, True), settled=False)
    assert manager.busy_slots == 3
    jobs.settle(ID)
    assert manager.busy_slots == 3
    jobs.settle(ID)
    assert manager.busy_slots == 0
    assert manager.counters["unexpected_release"] == 0
    check(manager)


def test_all_slots_of_an_unsettled_write_through_stay_out_of_use():
    manager = new_manager(slots=2, stores=[Store()], max_persisting_slots=2)
    put(manager, keys("a", 2))
    (transfer,) = manager.take_transfers()
    jobs = JobTable(manager)
    jobs.begin(transfer.id, transfer)
    answer(jobs, transfer.id, (True, False), settled=False)
    assert manager.busy_slots == 2
    jobs.settle(transfer.id)
    assert manager.busy_slots == 0


def test_what_a_reset_overtook_ends_as_if_it_had_failed(manager):
    jobs = store(manager, 1)
    manager.reset_cache()
    jobs.mark_stale()
    ended = answer(jobs, ID, (True, True, True))
    assert (ended.ok, ended.stale) == ((False,) * 3, True)
    assert [manager.lookup(key) for key in KEYS] == [False] * 3
    assert manager.busy_slots == 0


def test_a_settled_job_that_is_unknown_is_harmless(manager):
    JobTable(manager).settle(ID)
    assert manager.counters["unexpected_release"] == 0


def test_an_answer_to_an_unknown_job_is_counted_and_changes_nothing(manager, caplog):
    jobs = store(manager, 1)
    assert answer(jobs, ID + 1, (True, True, True), settled=False) is None
    assert "77" not in caplog.text
    assert "78" in caplog.text
    assert manager.counters["unexpected_completion"] == 1
    answer(jobs, ID, (True, True, True))
    assert answer(jobs, ID, (False, False, False)) is None  # the second time
    assert manager.counters["unexpected_completion"] == 2
    assert [manager.lookup(key) for key in KEYS] == [True] * 3
    assert (len(jobs), manager.busy_slots) == (0, 0)
    check(manager)


def test_an_answer_of_the_wrong_length_fails_all_chunks(manager):
    jobs = store(manager, 2)
    answer(jobs, ID, (True, True))
    ended = answer(jobs, ID, (True, True, True))
    assert ended.ok == (False, False, False)
    assert manager.counters["unexpected_completion"] == 1
    assert [manager.lookup(key) for key in KEYS] == [False] * 3
    assert manager.busy_slots == 0


def test_a_load_that_found_no_room_is_answered_and_no_surprise(manager):
    """vLLM carries out a load of no chunk, too: its request waits for an answer."""
    manager.prepare_store(KEYS)  # all slots are being written
    jobs = JobTable(manager, 2)
    jobs.begin(ID, manager.begin_load([make_offload_key(b"4" * 32, 0)]))
    assert answer(jobs, ID, ()) is None
    assert answer(jobs, ID, ()).ok == ()
    assert (manager.counters["load_refused"], manager.counters["unexpected_completion"]) == (1, 0)


def test_a_block_is_in_use_until_the_last_job_that_uses_it_is_answered(manager):
    jobs = JobTable(manager)
    for job_id, key, blocks in ((1, KEYS[0], [4, 5, 5]), (2, KEYS[1], [5, 6]), (3, KEYS[2], [7])):
        job = manager.prepare_store([key]).job
        job.blocks = blocks
        jobs.begin(job_id, job)
    assert jobs.using([4]) == {1}
    assert jobs.using(range(9)) == {1, 2, 3}
    answer(jobs, 1, (True,))
    assert [jobs.using([block]) for block in (4, 5, 6)] == [set(), {2}, {2}]
    answer(jobs, 2, (True,))
    assert jobs.using(range(9)) == {3}
    answer(jobs, 3, (True,))
    assert jobs._using == {}
