"""The scheduler half when it has met its workers, without an engine."""

import os
import random
import threading
import time
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from bare_half import bare_half
from manager_parts import figures
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.vllm_parts.halves import BLOCK
from kvoffload import registry
from kvoffload.backends.base import Removal
from kvoffload.connectors.vllm import withheld_stores
from kvoffload.connectors.vllm.connector import KVOffloadConnector
from kvoffload.connectors.vllm.scheduler import (
    IDLE_S,
    KVOffloadScheduler,
    OffloadingConnectorScheduler,
)
from kvoffload.connectors.vllm.step_messages import StepMetadata, WorkerInfo, WorkerReport
from kvoffload.connectors.vllm.worker_presence import IndexPart, PresenceReply
from kvoffload.errors import ConfigError
from kvoffload.messages import TransferResult, make_offload_key
from kvoffload.metrics.names import STORES_DROPPED
from kvoffload.offload.base import ReqContext as OurContext
from kvoffload.offload.figures import NO_ROOM

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]


@pytest.fixture
def met():
    """Make a scheduler half that has met one worker, from settings; return it and its manager."""

    def meet(**settings):
        half = bare_half(**settings)
        half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
        return half, half.adapter.manager

    return meet


def test_it_begins_when_as_many_workers_told_of_themselves_as_vllm_runs():
    half = bare_half(cpu_bytes=16384)
    half._workers, half.waits_for_workers = {}, True
    # Context parallel: four workers of one (pp, tp).
    half.config = types.SimpleNamespace(num_workers=4, blocks_per_chunk=1)
    context = ReqContext("r")

    def tell(*ranks):
        workers = {rank: WorkerInfo(4, 4096, {"rank": rank}, rank=rank) for rank in ranks}
        one = WorkerReport(workers=workers)
        half._take_in(one.aggregate(WorkerReport()))

    tell(0, 1)
    assert half.has_pending_push_work(), "the engine is to step until the others have told"
    assert half.adapter.lookup(KEYS[0], context) is LookupResult.RETRY
    assert half.adapter.lookup_prefix(KEYS, context) == (0, True)
    tell(3, 2)
    assert half.adapter.lookup(KEYS[0], context) is LookupResult.MISS
    manager = half.adapter.manager
    job = manager.prepare_store(KEYS[:1], OurContext("r")).job
    half._table.begin(7, job)
    tell(0, 1, 2, 3)  # asked once more, before their answers came
    assert half.adapter.manager is manager
    for done in (False, False, False, True):
        report = WorkerReport()
        report.ended.append(TransferResult(7, (True,)))
        half._take_in(report)
        assert manager.lookup(KEYS[0]) is done
    half._take_in(report)  # of a job that has ended


@pytest.mark.parametrize(
    ("is_runner_v2", "written", "kept"),
    [
        (True, {"new_block_ids_to_zero": [3]}, False),
        (True, {"kv_cache_block_copies": ["3 to 4"]}, False),
        (True, {}, True),
        (False, {"new_block_ids_to_zero": [3]}, True),  # it flushes first
    ],
)
def test_a_store_whose_blocks_are_written_before_the_flush_fails(
    met, monkeypatch, is_runner_v2, written, kept
):
    half, manager = met(cpu_bytes=16384)
    half._is_runner_v2, half._current_batch_jobs_to_flush = is_runner_v2, {7, 9, 11}
    stored = manager.prepare_store(KEYS[2:3], OurContext("stored before")).job
    manager.complete(stored, (True,))
    for i in range(2):
        store = manager.prepare_store(KEYS[i : i + 1], OurContext(f"r{i}"))
        half._table.begin(7 + i, store.job)
    half._table.begin(9, manager.begin_load(KEYS[2:3], OurContext("r2")))
    theirs = OffloadingConnectorMetadata({}, {}, jobs_to_flush={7, 9, 11})
    monkeypatch.setattr(
        OffloadingConnectorScheduler, "build_connector_meta", lambda half, output: theirs
    )
    output = SchedulerOutput.make_empty()
    for name, value in written.items():
        setattr(output, name, value)
    half.build_connector_meta(output)
    for job_id in (7, 8, 9):
        report = WorkerReport()
        report.ended.append(TransferResult(job_id, (True,)))
        half._take_in(report)
    # The second is not flushed; the third is a load, which reads no blocks.
    assert [manager.lookup(key) for key in KEYS[:3]] == [kept, True, True]
    assert half.adapter.manager.counters["stores_overwritten"] == (not kept)
    assert manager.figures.hit_tokens == {"cpu": 16}  # the load's


TWO_TIERS = [{"type": "memory"}, {"type": "memory"}]


@pytest.mark.parametrize(("promote", "nearer"), [(True, ["memory"]), (False, [])])
def test_the_setting_to_promote_reaches_the_manager(met, promote, nearer):
    half, manager = met(cpu_bytes=16384, backends=TWO_TIERS, promote=promote)
    half.tiers.presences["memory1"].written(KEYS[:1])
    manager.prepare_load(KEYS[:1])
    manager.complete_load(KEYS[:1])
    assert [transfer.tier.name for transfer in manager.take_transfers()] == nearer


def test_a_slot_that_a_tier_may_still_touch_on_one_rank_is_given_to_no_chunk(met):
    half, _ = met(cpu_bytes=16384)
    ranks = [WorkerInfo(4, 4096, {"rank": rank}, rank, first_slot=rank) for rank in range(2)]
    half.meet_workers(ranks)
    manager = half.adapter.manager
    keys = KEYS[:3]
    slots = manager.prepare_store(keys, OurContext("a")).store_spec.host_slots.tolist()
    assert sorted(slots) == [1, 2, 3]
    assert figures(manager)["capacity_bytes"]["cpu"] == 3 * 4096


def test_chunks_of_several_sizes_take_the_rows_that_they_need(met):
    half, _ = met(cpu_bytes=1 << 20)
    sizes = (4096, 16384)
    ranks = [
        WorkerInfo(64, 4096, {"rank": rank}, rank, first_slot=4 * rank, payload_bytes=sizes)
        for rank in range(2)
    ]
    half.meet_workers(ranks)
    manager = half.adapter.manager
    keys = [make_offload_key(bytes([i]) * 32, i % 2) for i in range(8)]
    job = manager.prepare_store(keys, OurContext("a")).job
    rows = [
        row
        for key, slot in zip(job.keys, job.spec.host_slots.tolist(), strict=True)
        for row in range(slot, slot + 1 + 3 * (key[-1] == 1))
    ]
    assert len(job.keys) == 8
    assert len(set(rows)) == len(rows) == 4 * 1 + 4 * 4
    assert 4 <= min(rows) <= max(rows) < 64
    ranks[1].payload_bytes = (4096, 32768)
    with pytest.raises(ConfigError, match="must be equal on all ranks"):
        half.meet_workers(ranks)


def test_chunks_that_found_no_room_are_offered_again_while_their_request_runs(met):
    half, manager = met(cpu_bytes=0, staging_bytes=16384, backends=[{"type": "memory"}])
    state = types.SimpleNamespace(offload_keys=KEYS[:4], next_stored_chunk_idx=0)
    request = types.SimpleNamespace(request_id="r", is_finished=lambda: request.over, over=False)
    half._req_status = {"r": types.SimpleNamespace(req=request, group_states=[state])}

    def offer():
        output = half.adapter.prepare_store(KEYS[:4], ReqContext("r"))
        state.next_stored_chunk_idx = 4  # as vLLM does, however much was taken
        withheld_stores.offer_refused(half)
        return output.keys_to_store

    assert offer() == KEYS[:2]  # half of four slots; the others are for loads
    assert state.next_stored_chunk_idx == 2
    assert offer() == []
    assert state.next_stored_chunk_idx == 2
    assert manager.figures.not_stored[NO_ROOM] == 0
    request.over = True
    assert offer() == []
    assert state.next_stored_chunk_idx == 4
    assert manager.figures.not_stored[NO_ROOM] == 2


DISK = {"type": "disk", "root": "/nowhere/kv"}
LISTED = frozenset({"disk"})


def half_of(ranks, monkeypatch, **settings):
    """Make a scheduler half that has met these ranks, with none of vLLM's decisions."""
    vllms = KVOffloadScheduler.__mro__[1]
    monkeypatch.setattr(vllms, "update_connector_output", lambda half, output: None)
    monkeypatch.setattr(vllms, "has_pending_push_work", lambda half: False)
    monkeypatch.setattr(vllms, "reset_cache", lambda half: half.adapter.reset_cache())
    half = bare_half(**settings)
    half.meet_workers(ranks)
    return half


def report(half, *parts, **more):
    made = WorkerReport()
    made.presence = list(parts)
    vars(made).update(more)
    half.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=made))


def worker(rank, listed=LISTED):
    return WorkerInfo(4, 4096, {"rank": rank}, rank, listed)


def test_no_store_is_opened_whatever_the_number_of_ranks(monkeypatch):
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(registry, "open_backend", None)
    half = half_of([worker(i) for i in range(8)], monkeypatch, cpu_bytes=16384, backends=[DISK])
    half.reset_cache()
    assert [tier.name for tier in half.adapter.manager.tiers] == ["disk"]
    assert set(threading.enumerate()) <= threads  # those of an earlier test may end meanwhile
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_an_engine_steps_until_every_rank_has_listed_what_it_has(monkeypatch):
    half = half_of([worker(0), worker(1)], monkeypatch, cpu_bytes=16384, backends=[DISK])
    manager, last = half.adapter.manager, {"is_first": True, "is_complete": True}
    assert half.has_pending_push_work()
    report(half, IndexPart(0, "disk", "", KEYS[:2], **last))
    assert half.has_pending_push_work()
    assert manager.lookup_prefix(KEYS[:2]) == (0, True)
    report(half, IndexPart(1, "disk", "", KEYS[:1], **last))
    assert not half.has_pending_push_work()
    assert manager.lookup_prefix(KEYS[:2]) == (1, False)
    # The stores of a new generation list anew; a late report of the old one does not count.
    half.reset_cache()
    generation = half.generations.take_order(stores=False)
    assert half.has_pending_push_work()
    report(half, IndexPart(0, "disk", "", KEYS[:2]), IndexPart(1, "disk", "", KEYS[:2]))
    report(half, *(IndexPart(rank, "disk", generation, KEYS[1:2], **last) for rank in (0, 1)))
    assert not half.has_pending_push_work()
    assert [manager.lookup(key) for key in KEYS[:2]] == [False, True]


def test_a_tier_that_one_rank_cannot_list_is_asked(monkeypatch):
    half = half_of(
        [worker(0), worker(1, frozenset())], monkeypatch, cpu_bytes=16384, backends=[DISK]
    )
    assert not half.has_pending_push_work()
    assert half.adapter.manager.lookup_prefix(KEYS[:2]) == (0, True)
    assert half.has_pending_push_work()
    question = half.tiers.take_questions()["disk"]
    assert question.keys == KEYS[:2]
    answers = [PresenceReply("disk", "", question.number, [True, rank == 0]) for rank in (0, 1)]
    both = WorkerReport()
    both.answers = answers[:1]
    other = WorkerReport()
    other.answers = answers[1:]
    assert not both.is_empty
    report(half, answers=both.aggregate(other).answers)
    assert not half.has_pending_push_work()
    assert half.adapter.manager.lookup_prefix(KEYS[:2]) == (1, False)


def test_a_chunk_that_left_in_the_step_of_its_write_is_absent(monkeypatch):
    half = half_of([worker(0)], monkeypatch, cpu_bytes=16384, backends=[DISK])
    half._transfer_ids = iter(range(-2, -9, -1))
    manager, last = half.adapter.manager, {"is_first": True, "is_complete": True}
    manager.prepare_store(KEYS[:2], OurContext("r"))
    manager.complete_store(KEYS[:2], OurContext("r"))
    orders = StepMetadata({}, {}, set())
    half._order_tier_jobs(orders)
    (job_id,) = orders.write_through
    made = WorkerReport()
    made.ended.append(TransferResult(job_id, (True, True)))
    made.removals.append(("disk", [Removal(KEYS[0], "evicted")]))
    made.presence = [IndexPart(0, "disk", "", KEYS[1:2], KEYS[:1], **last)]
    half.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=made))
    assert [half.tiers.presences["disk"].holds(key) for key in KEYS[:2]] == [False, True]
    events = [event for event in manager.take_events() if event.medium == "DISK"]
    assert [(type(event).__name__, set(event.keys)) for event in events] == [
        ("ChunksStored", set(KEYS[:2])),
        ("ChunksRemoved", set(KEYS[:1])),
    ]


@pytest.mark.parametrize(
    ("idle_s", "others", "backends", "waits"),
    [
        (2 * IDLE_S, {}, [DISK], True),
        (-60.0, {}, [DISK], False),
        (2 * IDLE_S, {"r": None}, [DISK], False),  # a step that takes long is no idle time
        (2 * IDLE_S, {}, [], False),
    ],
)
def test_after_an_idle_time_the_first_lookup_waits_one_step_for_the_reports(
    monkeypatch, idle_s, others, backends, waits
):
    vllms = KVOffloadScheduler.__mro__[1]
    request = types.SimpleNamespace(
        request_id="n", lora_request=None, mm_features=[], kv_transfer_params=None, cache_salt=None
    )
    request.skip_reading_prefix_cache, request.kv_hints = True, None
    status = types.SimpleNamespace(req=request, req_context=ReqContext("n"))
    new = {"n": status}.items()
    monkeypatch.setattr(vllms, "on_new_request", lambda half, _: half._req_status.update(new))
    monkeypatch.setattr(
        vllms, "build_connector_meta", lambda half, output: StepMetadata({}, {}, set())
    )
    half = half_of([worker(0)], monkeypatch, cpu_bytes=16384, backends=backends)
    half._req_status, half._table = dict(others), None
    half._stepped_s = time.monotonic() - idle_s
    half.on_new_request(request)
    assert half._awaits_reports is waits
    if waits:
        assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    half.build_connector_meta(SchedulerOutput.make_empty())
    assert not half._awaits_reports


def test_a_request_waits_for_a_load_of_its_chunks_as_long_as_that_load_takes(met):
    half, manager = met(cpu_bytes=16384, backends=[{"type": "memory"}])
    half.tiers.presences["memory"].written(KEYS[:2])
    half._maybe_observe_lookup_async_delay = lambda status: None
    other = manager.begin_load(KEYS[:1], OurContext("other"))
    state = types.SimpleNamespace(offload_keys=KEYS[:2])
    waiting = types.SimpleNamespace(
        deferred_lookup_start_time=0.0,
        transfer_jobs=set(),
        group_states=[state],
        req_context=ReqContext("r"),
    )
    request, half._req_status = types.SimpleNamespace(request_id="r"), {"r": waiting}
    assert manager.lookup_prefix(KEYS[:2]) == (0, True)
    assert not half._waited_long(request)
    # At its deadline the load ends, and its slot stays out of use: nothing is to be waited for, but
    # for what is asked from then on.
    manager.complete(other, (False,), settled=False)
    assert not half._waited_long(request)
    # One from host memory ends with a step, and an engine's first step may take longer than a tier.
    half._chunks_being_loaded.add(KEYS[1])
    waiting.deferred_lookup_start_time = 0.0
    assert not half._waited_long(request)
    half._chunks_being_loaded.clear()
    waiting.deferred_lookup_start_time = 0.0
    assert half._waited_long(request)
    assert half.adapter.manager.counters["lookup_timeout"] == 1


@pytest.mark.parametrize(
    ("computed", "wished", "most"),
    [(0, 40, 32), (24, 40, 40), (24, 30, 24), (24, 7, 0), (24, 8, 8)],
)
def test_a_load_that_a_client_bounds_ends_where_a_chunk_does(
    met, monkeypatch, computed, wished, most
):
    """What the GPU has may end inside a chunk, of 16 tokens here."""
    half, _ = met(cpu_bytes=16384)
    asked = []

    def look_up(half, request, start, bound):
        asked.append(bound)
        return 0, False

    monkeypatch.setattr(OffloadingConnectorScheduler, "get_num_new_matched_tokens", look_up)
    context = ReqContext("r", {"kvoffload": {"max_load_tokens": wished}})
    half._req_status = {"r": types.SimpleNamespace(req_context=context, group_states=[])}
    monkeypatch.setattr(KVOffloadScheduler, "_note_first_look", lambda *_: None)
    half.get_num_new_matched_tokens(types.SimpleNamespace(request_id="r"), computed)
    assert asked == [most]


@pytest.mark.parametrize(("finished", "matter"), [((), False), ({"ended"}, True)])
def test_blocks_given_out_as_a_request_ends_matter(met, monkeypatch, finished, matter):
    """Its last store is made in this very step, and reads them in the next one."""
    half, _ = met(cpu_bytes=16384)
    asked = []

    def of_step(output, is_wanted):
        asked.append((half._current_batch_allocated_block_ids, is_wanted))

    monkeypatch.setattr(half._due, "of_step", of_step)
    running = types.SimpleNamespace(new_block_ids=[None, ([7, 8],), ([9],)])
    output = types.SimpleNamespace(
        total_num_scheduled_tokens=0,
        num_scheduled_tokens={},
        scheduled_cached_reqs=running,
        finished_req_ids=finished,
        preempted_req_ids=None,
    )
    half.build_connector_meta(output)
    assert asked == [({7, 8, 9} if matter else set(), matter)]


def test_requests_that_came_before_the_workers_are_queued_once_there_is_a_manager():
    half = bare_half(cpu_bytes=16384)
    for name in ("a", "b", "ended", "running"):
        request = types.SimpleNamespace(
            is_finished=lambda name=name: name == "ended",
            num_computed_tokens=16 * (name == "running"),
            skip_reading_prefix_cache=False,
        )
        half._req_status[name] = types.SimpleNamespace(
            req=request, req_context=ReqContext(name), max_load_tokens=None
        )
    half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
    waiting = half.adapter.manager.waiting
    assert [request.context.req_id for request in waiting.requests.values()] == ["a", "b"]


WISHES = {"priority": 1, "tiers": ["disk"], "session": "s", "returns": "soon"}


def test_what_requests_wish_before_the_workers_are_known_is_not_called_wrong(caplog):
    half = bare_half(cpu_bytes=16384, backends=[DISK], client_hints=[*WISHES])
    context = ReqContext("early", {"kvoffload": WISHES})
    half.adapter.hints(context)
    half.adapter.prepare_store(KEYS[:2], context)
    half.adapter.on_request_finished(context)
    half.meet_workers([worker(0)])
    assert not +half.adapter.manager.counters
    assert "hint" not in caplog.text


def test_chunks_offered_before_the_workers_are_known_are_offered_again_and_not_lost():
    half = bare_half(cpu_bytes=16384)
    state = types.SimpleNamespace(offload_keys=KEYS[:2], next_stored_chunk_idx=2)
    request = types.SimpleNamespace(
        request_id="r", is_finished=lambda: False, num_computed_tokens=32
    )
    half._req_status = {"r": types.SimpleNamespace(req=request, group_states=[state])}
    context = ReqContext("r")
    for _ in range(2):
        assert half.adapter.prepare_store(KEYS[:2], context).keys_to_store == []
        withheld_stores.offer_refused(half)
        assert state.next_stored_chunk_idx == 0
        state.next_stored_chunk_idx = 2
    dropped = {labels: n for name, labels, n in half.adapter._samples() if name == STORES_DROPPED}
    assert not any(dropped.values())
    half.meet_workers([worker(0)])
    assert half.adapter.prepare_store(KEYS[:2], context).keys_to_store == KEYS[:2]


def test_an_answer_is_valid_until_something_changes(met, monkeypatch):
    half, _ = met(cpu_bytes=16384, lookup_timeout_s=0.25)
    answers, now_s = [(32, True), (16, True), (None, False), (0, False), (0, True)], [0.0]
    monkeypatch.setattr(half, "get_num_new_matched_tokens", lambda *asked: answers.pop(0))
    monkeypatch.setattr(KVOffloadConnector, "_max_loadable_tokens", lambda *asked: None)
    clock = types.SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("kvoffload.connectors.vllm.connector.time", clock)
    connector = object.__new__(KVOffloadConnector)
    connector.connector_scheduler = half
    half._req_status["r"] = types.SimpleNamespace(req_context=ReqContext("r"))
    request = types.SimpleNamespace(request_id="r", num_tokens=64)

    def ask(computed=0):
        return connector.get_num_new_matched_tokens(request, computed)

    assert ask() == (32, True)
    now_s[0] = half.patience_s - 0.1
    assert ask() == (32, True)
    now_s[0] += 0.2
    assert ask() == (16, True), "vLLM may never find room for the load"
    half.adapter.changes += 1
    assert ask() == (None, False)
    now_s[0] += 0.2
    assert ask() == (None, False)
    now_s[0] += 0.1
    assert ask() == (0, False), "lookups end at a deadline"
    now_s[0] = 1e6
    assert ask() == (0, False)
    assert ask(16) == (0, True)
    assert not answers


def test_a_token_that_a_streaming_session_drops_is_in_none_of_its_keys(halves, monkeypatch):
    """The queue lists a preempted session late: when its last token has filled a chunk."""
    monkeypatch.setattr("kvoffload.offload.waiting.LISTED_REQUESTS", 1)
    rig = halves()
    engine, half = rig.scheduler, rig.scheduler.connector.connector_scheduler
    rng = random.Random(1)

    def send(num_tokens):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        tokens = rng.choices(range(3, 512), k=num_tokens)
        session = Request("s", tokens, params, None, block_hasher=rig._hasher, resumable=True)
        engine.add_request(session)
        return session

    session = send(10 * BLOCK - 3)
    rig.step()
    rig.step()
    last = engine.schedule()
    engine.running.remove(session)
    engine._preempt_request(session, time.monotonic())  # as vLLM does without blocks
    for _ in range(3):  # so many that one waits before the session
        rig.add(rng.choices(range(3, 512), k=7000), 1)
    beside = engine.schedule()
    made = ModelRunnerOutput(["s"], {"s": 0}, sampled_token_ids=[[7]])
    engine.update_from_output(last, made)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert session.num_tokens == 10 * BLOCK
    monkeypatch.setattr(engine, "schedule", lambda: beside)
    rig.step()
    monkeypatch.undo()
    rig.step()
    send(100)
    if session.num_tokens < 10 * BLOCK:
        pytest.skip("vLLM 0.32 drops all tokens of such a session")
    rig.quiet()
    keys = half._req_status["s"].group_states[0].offload_keys
    assert len(keys) > 10
    hashes = session.block_hashes[: len(keys)]
    assert keys == [make_offload_key(each, 0) for each in hashes]
