"""The queue under vLLM's own scheduler with both halves, without a model: one request runs."""

import os
import random
import signal
import time

import pytest

from tests.support.manager_check import check

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.v1.request import RequestStatus

from benchmarks.vllm_parts.halves import BLOCK
from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.offload import waiting
from kvoffload.offload.base import ReqContext
from tests.engines.vllm_engine.faulty_tier import OnlyVerbs

CHUNKS, SLOT = 16, 32 << 10
LENGTH = CHUNKS * BLOCK + 1
"""A prompt of 16 whole blocks, each a chunk."""


@pytest.fixture
def alone(halves):
    """Make halves of an engine that runs one request, and whose GPU memory keeps one prompt."""

    def begin(num_slots, *, num_blocks=CHUNKS + 4, max_num_seqs=1, **settings):
        settings |= {"cpu_bytes": num_slots * SLOT, "canary": False, "num_blocks": num_blocks}
        rig = halves(max_num_seqs=max_num_seqs, **settings)
        # These halves compute a prompt at once: on a busy machine no load would be worth its time.
        manager_of(rig).promises.prefilled = lambda num_tokens, seconds: None
        return rig

    return begin


def prompt(seed):
    return random.Random(seed).choices(range(3, 512), k=LENGTH)


def manager_of(rig):
    return rig.scheduler.connector.connector_scheduler.adapter.manager


def results(rig):
    return manager_of(rig).figures.counter("queue_chunks")


def run(rig, requests, limit_s=60.0):
    """Step until these have ended; return how many tokens of each were not computed."""
    until_s, found = time.monotonic() + limit_s, {}
    while not all(request.is_finished() for request in requests):
        for new in rig.step().scheduled_new_reqs:
            found[new.req_id] = new.num_computed_tokens
        check(manager_of(rig))
        time.sleep(0.002)
        assert time.monotonic() < until_s, "a request hangs"
    return [found.get(request.request_id) for request in requests]


def at_rest(rig):
    rig.quiet()
    manager = manager_of(rig)
    check(manager)
    assert not manager.waiting.requests
    assert not manager._host.claims
    assert manager.busy_slots == 0


@pytest.mark.parametrize(("share", "least", "most"), [(0, 0.0, 0.0), (0.9, 0.6, 0.8)])
def test_five_sessions_in_memory_for_four(alone, share, least, most):
    rig = alone(4 * CHUNKS, waiting_share=share)
    requests = [rig.add(prompt(i), 2) for _ in range(6) for i in range(5)]
    later = run(rig, requests)[10:]
    print(f"hits {sum(later) / len(later) / (LENGTH - 1):.2f}")
    assert least <= sum(later) / len(later) / (LENGTH - 1) <= most
    at_rest(rig)


def filled(alone, num_slots, **settings):
    rig = alone(num_slots, disk=True, **settings)
    for i in range(10):
        run(rig, [rig.add(prompt(i), 2)])
        rig.quiet()  # no chunk stays out of the tier for lack of room
    return rig


def test_ten_queued_prompts_come_early_from_disk(alone):
    rig = filled(alone, 7 * CHUNKS)
    manager_of(rig).reset_cache()  # what is kept of later requests would leave no room for reads
    cached = run(rig, [rig.add(prompt(i), 20) for i in range(10)])
    assert cached == [LENGTH - 1] * 10
    assert results(rig)["read_early"] > 0
    assert results(rig)["read_in_vain"] == 0
    at_rest(rig)


@pytest.fixture
def asked_tier(plug_in, tmp_path):
    """Return the settings of a disk tier that says of no chunk at once whether it has it."""

    class Factory:
        Options = DiskBackend.Options

        def __new__(cls, options, namespace):
            return OnlyVerbs(DiskBackend(options, namespace))

    plug_in("asked", Factory)
    tier = {"type": "asked", "root": str(tmp_path / "kv"), "min_free": 0}
    return {"backends": [tier], "io": "thread"}


def test_an_engine_that_becomes_full_before_a_tier_answers_reads_early(alone, asked_tier):
    """It asks of all requests at once, no answer is there yet, and then one runs."""
    filling = alone(7 * CHUNKS, **asked_tier)
    run(filling, [filling.add(prompt(1), 2)])
    filling.quiet()
    rig = alone(7 * CHUNKS, num_blocks=2 * CHUNKS, **asked_tier)
    running, waiting = rig.add(prompt(0), 8 * BLOCK), rig.add(prompt(1), 2)
    run(rig, [running])
    assert results(rig)["read_early"] > 0
    run(rig, [waiting])
    at_rest(rig)


@pytest.mark.parametrize("when", range(0, 12, 3))
def test_aborts_in_the_queue_leave_nothing(alone, when):
    rig = filled(alone, 7 * CHUNKS)
    requests = [rig.add(prompt(i), 8) for i in range(10)]
    for _ in range(when):
        rig.step()
        time.sleep(0.002)
    aborted = [request for request in requests[1:] if not request.is_finished()]
    ids = [request.request_id for request in aborted]
    rig.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
    run(rig, requests)
    at_rest(rig)


def test_a_preempted_request_keeps_its_chunks_before_those_that_wait(alone):
    """GPU memory takes two prompts, and not what both decode."""
    rig = alone(4 * CHUNKS, num_blocks=2 * (CHUNKS + 1) + 2, max_num_seqs=2)
    requests = [rig.add(prompt(i), 3 * BLOCK) for i in range(4)]
    queue, until_s = manager_of(rig).waiting, time.monotonic() + 60
    while not (preempted := [r for r in requests if r.status == RequestStatus.PREEMPTED]):
        rig.step()
        assert time.monotonic() < until_s, "no request is preempted"
    (first,) = preempted
    assert min(queue.requests.values()) is queue.requests.get(first.request_id)
    for _ in range(3):
        rig.step()
    assert queue.requests.get(first.request_id).num_kept >= CHUNKS
    run(rig, requests)
    at_rest(rig)


def test_what_a_long_prompt_kept_ends_while_it_runs_though_none_waits(alone, monkeypatch):
    monkeypatch.setattr(waiting, "PORTION", 4)
    rig = alone(4 * CHUNKS)
    for i in range(2):
        run(rig, [rig.add(prompt(i), 2)])
        rig.quiet()
    first, last = rig.add(prompt(0), 12), rig.add(prompt(1), 12)
    waits, kept = manager_of(rig).waiting, []
    while not last.is_finished():
        rig.step()
        time.sleep(0.002)
        if first.is_finished() and not waits.requests:
            kept.append(len(manager_of(rig)._host.claims))
    assert kept[:4] == [CHUNKS - 8, CHUNKS - 12, 0, 0], "a portion at once, and one in each step"
    at_rest(rig)


@pytest.mark.parametrize("status", ["WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED"])
def test_an_abort_in_each_state_leaves_nothing(alone, status):
    """GPU memory takes two prompts, and not what both decode."""
    rig = filled(alone, 7 * CHUNKS, num_blocks=2 * (CHUNKS + 1) + 2, max_num_seqs=2)
    manager_of(rig).reset_cache()  # what is loaded takes some steps
    requests, until_s = [], time.monotonic() + 60
    while not (in_it := [each for each in requests if each.status.name == status]):
        if all(each.is_finished() for each in requests):
            # A load may take longer than a decode: two surely meet once none is stored.
            requests += [rig.add(prompt(len(requests) + i), 3 * BLOCK) for i in range(5)]
        rig.step()
        assert time.monotonic() < until_s, "no request has this state"
    rig.scheduler.finish_requests([in_it[-1].request_id], RequestStatus.FINISHED_ABORTED)
    assert manager_of(rig).waiting.requests.get(in_it[-1].request_id) is None
    run(rig, requests)
    at_rest(rig)


def test_requests_that_wait_through_a_reset_keep_what_is_stored_after_it(alone):
    rig = filled(alone, 7 * CHUNKS)
    requests = [rig.add(prompt(i % 5), 4) for i in range(11)]
    for _ in range(4):
        rig.step()
    rig.scheduler.connector.reset_cache()
    assert not manager_of(rig)._host.claims
    kept = results(rig)["kept"]
    cached = run(rig, requests)
    assert results(rig)["kept"] > kept
    assert cached[6:] == [LENGTH - 1] * 5
    at_rest(rig)


def test_a_sleep_that_keeps_its_requests_leaves_nothing(alone):
    """vLLM preempts what runs, resets all caches, and admits it again in the next step."""
    rig = alone(4 * CHUNKS, disk=True)
    requests = [rig.add(prompt(i % 3), 8) for i in range(6)]
    for _ in range(4):
        rig.step()
    queue = manager_of(rig).waiting
    assert rig.scheduler.reset_prefix_cache(True, True)
    assert not manager_of(rig)._host.claims
    run(rig, requests)
    assert not queue.requests
    at_rest(rig)


def test_a_death_of_the_io_process_in_the_queue_leaves_nothing(alone):
    rig = filled(alone, 7 * CHUNKS, io="process")
    manager_of(rig).reset_cache()
    requests, until_s = [rig.add(prompt(i), 8) for i in range(10)], time.monotonic() + 60
    while not results(rig)["read_early"]:
        rig.step()
        assert time.monotonic() < until_s, "nothing is read early"
    io = rig.worker.connector_worker._spec.io
    os.kill(io._peer.pid, signal.SIGKILL)
    run(rig, requests)
    assert io.died
    at_rest(rig)


def test_a_load_that_failed_takes_no_room_from_its_next_try(alone):
    """vLLM keeps the blocks of the first try for the request, and refused the second for ever."""
    rig = filled(alone, 7 * CHUNKS, io="process", load_timeout_s=0.5)
    manager_of(rig).reset_cache()
    io, request = rig.worker.connector_worker._spec.io, None
    os.kill(died := io._peer.pid, signal.SIGSTOP)
    request, until_s = rig.add(prompt(0), 8), time.monotonic() + 60
    while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        rig.step()
        assert time.monotonic() < until_s, "no load begins"
    os.kill(died, signal.SIGKILL)
    while io._peer is None or io._peer.pid == died or not io.tiers["disk"].is_open:
        time.sleep(0.01)  # its chunks are there again before vLLM learns of the failure
        assert time.monotonic() < until_s, "no I/O process is started"
    run(rig, [request])
    at_rest(rig)


def has_an_image(request):
    """Without a salt it stays out of all tiers."""
    request.mm_features = [object()]


def reads_no_cache(request):
    """Prompts whose logprobs are asked for are computed whole, as those of some pooling models."""
    request.skip_reading_prefix_cache = True


@pytest.mark.parametrize("become", [has_an_image, reads_no_cache])
def test_a_request_that_loads_nothing_keeps_nothing(alone, become):
    rig = filled(alone, 7 * CHUNKS)
    rig.add(prompt(0), 8)
    request = rig.add(prompt(1), 8)
    half = rig.scheduler.connector.connector_scheduler
    half.adapter.manager.request_admitted(ReqContext(request.request_id))
    become(request)
    half.on_new_request(request)
    assert manager_of(rig).waiting.requests.get(request.request_id) is None


def test_stores_are_told_when_sessions_return(alone):
    hints = ["session", "returns_in_s"]
    rig = alone(7 * CHUNKS, disk=True, client_hints=hints)
    told = []
    rig.worker.connector_worker._spec.io.expects = told.extend
    for number, hint in enumerate(({"session": "a", "returns_in_s": 60}, {"session": "a"})):
        request = rig.add(prompt(0), 2)
        request.kv_transfer_params = {"kvoffload": hint}
        rig.scheduler.connector.connector_scheduler.on_new_request(request)
        run(rig, [request])
        rig.quiet()
        assert len(told) == number + 1
    assert [(len(each.keys), each.in_s) for each in told] == [(CHUNKS, 60.0), (CHUNKS, None)]
    assert told[0].claim == told[1].claim
