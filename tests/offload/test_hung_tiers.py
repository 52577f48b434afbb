"""A tier whose calls hang keeps a share of host memory, however long; the other tiers go on."""

from itertools import chain

import pytest
from manager_parts import Store, figures, keys, new_manager, put, write_through

from kvoffload.offload.base import ReqContext
from kvoffload.offload.manager import Tier
from kvoffload.offload.promises import PROBE_DECLINES, PROBE_S
from tests.support.manager_check import check


def hang(manager, job):
    """Answer a job at its deadline; what it uses stays in use."""
    manager.complete(job, [False] * len(job.keys), settled=False, reason="deadline")


def release(manager, job):
    manager.release_slots(job.unsettled_slots(), job)


def lane(manager):
    """Return the bytes in flight to the first tier, and the chunks that wait for it."""
    told = figures(manager)
    return told["inflight_bytes"]["tier0"], told["waiting_chunks"]["tier0"]


def written(manager):
    """Answer what other tiers are to write; return what the first tier is to write."""
    hung = []
    while transfers := manager.take_transfers():
        for each in transfers:
            if each.tier.name == "tier0":
                hung.append(each)
            else:
                manager.complete(each, [True] * len(each.keys))
    return hung


def replace_tiers(manager):
    manager.reset_cache()
    manager.replace_tiers([Tier(f"tier{i}", Store()) for i in range(2)])


def test_writes_that_hang_keep_the_share_of_their_tier_through_deadlines_and_a_reset():
    manager = new_manager(16, [Store(), Store()], max_persisting_slots=8)
    put(manager, keys("a", 6))
    (hung,) = written(manager)
    assert len(hung.keys) == 4  # a share of the tier's own
    hang(manager, hung)
    assert (written(manager), manager.busy_slots) == ([], 4)
    assert lane(manager) == (4, 2)
    replace_tiers(manager)
    put(manager, keys("b", 8))
    assert (written(manager), manager.busy_slots) == ([], 4)
    assert manager.figures.not_stored["tier1", "failed"] == 0
    release(manager, hung)  # the device answers
    (goes_on,) = written(manager)
    assert len(goes_on.keys) == 4
    manager.complete(goes_on, [True] * 4)
    (rest,) = written(manager)
    manager.complete(rest, [True] * 4)
    assert manager.busy_slots == 0
    check(manager)


def test_writes_that_hang_keep_one_share_through_resets_that_come_before_their_deadline():
    manager = new_manager(16, [Store(), Store()], max_persisting_slots=8)
    hung = []
    for i in range(4):  # as under vLLM, whose reset waits for nothing
        put(manager, keys(f"generation {i}", 6))
        hung += written(manager)
        assert manager.busy_slots == 4
        replace_tiers(manager)
        assert lane(manager) == (4, 0)
    hang(manager, *hung)
    assert lane(manager) == (4, 0)
    replace_tiers(manager)
    assert lane(manager) == (4, 0)
    assert manager.figures.not_stored["tier1", "failed"] == 0
    release(manager, *hung)
    put(manager, keys("last", 4))
    (goes_on,) = written(manager)
    manager.replace_tiers(())
    manager.complete(goes_on, [True] * 4)  # of a tier that is no more
    manager.replace_tiers([Tier(f"tier{i}", Store()) for i in range(2)])
    assert lane(manager) == (0, 0)
    assert manager.busy_slots == 0
    check(manager)


def promised(manager, wanted, name):
    context = ReqContext(name)
    hits, _ = manager.lookup_prefix(wanted, context)
    if not hits or not manager.promises.is_worth_loading(wanted[:hits], hits, context):
        hits, _ = manager.lookup_prefix(wanted, context)
    return hits, context


def test_loads_that_hang_keep_half_of_host_memory_and_then_their_tier_is_declined():
    prompts = [keys(f"{i}", 3) for i in range(10)]
    manager = new_manager(16, [Store(chain(*prompts))], load_timeout_s=5.0)
    now_s = 100.0
    manager._host.now_s = lambda: now_s
    hung = []
    for i, prompt in enumerate(prompts):
        hits, context = promised(manager, prompt, f"r{i}")
        if hits:
            hung.append(manager.begin_load(prompt, context))
            hang(manager, hung[-1])
    assert (len(hung), manager.busy_slots) == (3, 9)  # the third is the first above a half
    assert manager.figures.lookups["tier0", "not_in_time"] == 7
    put(manager, keys("new", 7))
    assert manager.resident == 7  # the other half serves
    for i in range(PROBE_DECLINES):
        promised(manager, prompts[9], f"later {i}")
    now_s += PROBE_S + 1
    assert promised(manager, prompts[9], "no probe")[0] == 0
    release(manager, hung[0])
    hits, context = promised(manager, prompts[9], "again")
    assert hits == 3
    manager.complete(manager.begin_load(prompts[9], context), [True] * 3)
    for each in hung[1:]:
        release(manager, each)
    write_through(manager)
    assert manager.busy_slots == 0
    check(manager)


def test_what_has_arrived_stays_in_its_slots_until_a_load_that_hangs_lets_go():
    """A server of the host may still read them: it stores nearer what a far store has brought."""
    wanted = keys("a", 4)
    manager = new_manager(8, [Store(wanted)])
    manager.lookup_prefix(wanted)
    job = manager.begin_load(wanted)
    manager.complete(job, [True] * 4, settled=False, reason="deadline")
    assert [manager.lookup(key) for key in wanted] == [True] * 4
    other = manager.prepare_store(keys("b", 8)).job
    assert {*other.spec.host_slots}.isdisjoint(job.spec.host_slots)
    manager.complete(other, [False] * 4)
    release(manager, job)
    other = manager.prepare_store(keys("b", 8)).job
    assert len(other.keys) == 8
    manager.complete(other, [False] * 8)
    check(manager)


def begin(manager, prompts, names="r"):
    """Look up prompts and begin their loads in one step, as an engine's waiting queue does."""
    jobs, waiting = [], []
    for i, prompt in enumerate(prompts):
        context = ReqContext(f"{names}{i}")
        hits, pending = manager.lookup_prefix(prompt, context)
        if pending:
            waiting.append(prompt)
        elif hits and manager.promises.is_worth_loading(prompt[:hits], hits, context):
            jobs.append(manager.begin_load(prompt[:hits], context))
    return jobs, waiting


@pytest.mark.parametrize(("num_tiers", "most"), [(1, 9), (2, 6)])
def test_loads_of_one_step_keep_no_more_of_host_memory_than_loads_one_by_one(num_tiers, most):
    prompts = [keys(f"{i}", 3) for i in range(10)]
    stores = [Store(chain(*prompts)), Store()][:num_tiers]
    manager = new_manager(16, stores, load_timeout_s=5.0)
    hung, waiting = begin(manager, prompts)
    assert (len(hung), len(waiting), manager.busy_slots) == (most // 3, 10 - most // 3, most)
    assert manager.is_fetching(waiting[-1])  # what they wait for
    assert manager.explain(waiting[0]) == ["pending"] * 3
    refused = manager.begin_load(waiting[0])  # an engine that looked up all of them first
    assert not refused.keys
    for job in hung:
        hang(manager, job)
    assert not manager.is_fetching(waiting[-1])
    assert begin(manager, waiting) == ([], [])
    assert manager.figures.lookups["tier0", "not_in_time"] == len(waiting)
    put(manager, keys("new", 7))
    assert manager.resident == 7
    for job in hung:
        release(manager, job)
    manager.take_transfers()
    again, _ = begin(manager, waiting, "later ")
    assert len(again) == most // 3
    check(manager)


def test_a_tier_that_answered_and_then_hangs_keeps_half_and_the_load_that_goes_beyond():
    prompts = [keys(f"{i}", 3) for i in range(10)]
    manager = new_manager(16, [Store(chain(*prompts)), Store()], promote=False, load_timeout_s=5.0)
    now_s = 100.0
    manager._host.now_s = lambda: now_s
    (first,), _ = begin(manager, prompts[:1])
    first.ok, first.seconds = (True,) * 3, 0.1
    manager.complete(first, [True] * 3)
    now_s += 5.0
    hung, waiting = begin(manager, prompts[1:])
    assert (len(hung), len(waiting), manager.busy_slots) == (3, 6, 9)
    now_s += 0.1
    assert begin(manager, waiting) == ([], waiting)


def test_a_full_tier_leaves_its_loads_to_the_next_tier_that_has_the_chunks():
    prompts = [keys(f"{i}", 3) for i in range(4)]
    manager = new_manager(16, [Store(chain(*prompts)), Store(chain(*prompts))])
    jobs, waiting = begin(manager, prompts)
    assert [job.media()[0] for job in jobs] == ["TIER0", "TIER0", "TIER1", "TIER1"]
    assert waiting == []


def test_loads_of_a_tier_that_was_reset_count_until_they_end():
    prompts = [keys(f"{i}", 3) for i in range(4)]
    manager = new_manager(16, [Store(chain(*prompts)), Store()])
    hung, _ = begin(manager, prompts)
    manager.reset_cache()
    manager.replace_tiers([Tier("tier0", Store(chain(*prompts))), Tier("tier1", Store())])
    assert begin(manager, prompts[2:]) == ([], prompts[2:])
    for job in hung:
        manager.complete(job, [False] * 3)
    assert len(begin(manager, prompts[2:])[0]) == 2


def test_loads_that_pass_through_count_by_the_slots_that_they_keep():
    prompts = [keys(f"{i}", 8) for i in range(4)]
    manager = new_manager(8, [Store(chain(*prompts))], caching=False, max_persisting_slots=2)
    jobs, waiting = begin(manager, prompts)
    assert (len(jobs), waiting, manager.busy_slots) == (1, prompts[1:], 4)
    manager.complete(jobs[0], [True] * 8)
    jobs, _ = begin(manager, waiting)
    assert (len(jobs), manager.busy_slots) == (1, 4)


def test_a_load_whose_chunks_take_turns_in_one_slot_keeps_that_slot_alone():
    a = keys("a", 8)
    manager = new_manager(4, [Store(a)], caching=False, max_persisting_slots=2)
    job = manager.begin_load(a, ReqContext("r"))
    assert len(set(job.spec.host_slots.tolist())) == 2
    hang(manager, job)
    assert manager.promises._loads["tier0"].late_bytes == 2
    release(manager, job)
    assert manager.promises._loads["tier0"].late_bytes == 0
    assert manager.busy_slots == 0


def test_figures_can_be_read_by_another_thread_in_the_middle_of_a_reset(monkeypatch):
    manager = new_manager(4, [Store()])
    tiers, told = manager.tiers, []
    real = manager._write_through.use

    def use(tiers):
        told.append(figures(manager).get("waiting_chunks"))
        real(tiers)

    monkeypatch.setattr(manager._write_through, "use", use)
    manager.replace_tiers(())
    manager.replace_tiers(tiers)
    assert told == [{"tier0": 0}, None]
