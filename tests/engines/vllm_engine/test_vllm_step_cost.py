"""What a step costs the hooks of both halves, in functions called; driven by vLLM's scheduler."""

import json
import random
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.v1.request import RequestStatus

from benchmarks.vllm_parts.halves import BLOCK
from kvoffload.connectors.vllm.worker import COUNTERS_PERIOD_S

IDLE_SCHEDULER, IDLE_WORKER = 14, 20
"""Functions a step without anything to do may call."""


def prompt(length, seed=0):
    return random.Random(seed).choices(range(3, 512), k=length)


def decoding(rig, count, length=BLOCK + 1):
    """Begin so many requests and step until their stores are over."""
    for seed in range(count):
        rig.add(prompt(length, seed), 600)
    for _ in range(BLOCK):
        rig.step()
        end_copies(rig)
        time.sleep(0.01)  # writes end, and tiers tell of them
    rig.reports = 0


def end_copies(rig):
    """Wait for the copies in flight: the next step takes in their answers."""
    half = rig.worker.connector_worker
    half._transfers.wait([*half._stores, *half._loads])


def counted(rig, steps):
    """Return for each of so many steps the functions called in the scheduler half and the other.

    No publication of metrics begins: one comes each second, and a busy machine's steps are slow.
    """
    rig.scheduler.connector.connector_scheduler.adapter.stats._clock = lambda: 0.0
    rig.meter.is_counting = True
    found = []
    for _ in range(steps):
        rig.meter.take()
        rig.step()
        calls = rig.meter.take()[1]
        end_copies(rig)
        found.append((calls["scheduler"], calls["worker"]))
    rig.meter.is_counting = False
    return found


@pytest.mark.parametrize(("count", "disk"), [(1, False), (200, False), (1, True)])
def test_a_step_with_nothing_to_do_calls_a_few_functions(halves, count, disk):
    rig = halves(disk=disk)
    decoding(rig, count)
    messages, begun_s = len(rig.messages), time.monotonic()
    found = counted(rig, 3 * BLOCK)
    took_s = time.monotonic() - begun_s
    scheduler, worker = (sorted(calls)[len(found) // 2] for calls in zip(*found, strict=True))
    assert scheduler <= IDLE_SCHEDULER
    assert worker <= IDLE_WORKER
    # Figures are told now and then.
    assert rig.reports <= 2 + took_s / COUNTERS_PERIOD_S
    assert max(rig.messages[messages:]) < 100, "bytes of a message without orders"


def test_an_engine_without_requests_is_idle_a_few_steps_after_its_last_transfer(halves):
    """Metrics are published in portions, a step each; no step may wait for a worker's report."""
    rig = halves(disk=True)
    publisher = rig.scheduler.connector.connector_scheduler.adapter.stats
    rig.add(prompt(2 * BLOCK), 2)
    while not publisher.is_midway:
        rig.step()
    time.sleep(2.0)  # copies and writes end
    rig.step()
    rig.step()
    left = 0
    while rig.scheduler.has_requests():
        rig.step()
        left += 1
        assert left < 30


def test_where_answers_are_stored_too_a_request_is_visited_when_a_chunk_is_full(halves):
    rig = halves(offload_prompt_only=False)
    decoding(rig, 200)
    found = [scheduler for scheduler, _ in counted(rig, 2 * BLOCK)]
    quiet = sorted(found)[len(found) // 2]
    assert quiet <= IDLE_SCHEDULER + 2
    # A publication that had begun goes on, and calls a hundred functions a step at most.
    assert 0 < sum(calls > 200 for calls in found) <= 2 * 4


@pytest.mark.parametrize("prompt_only", [True, False])
def test_all_that_is_to_be_stored_is_stored(halves, prompt_only):
    rig = halves(offload_prompt_only=prompt_only)
    requests = [rig.add(prompt(40 + i, i), 70 + i) for i in range(8)]
    rig.quiet()
    manager = rig.scheduler.connector.connector_scheduler.adapter.manager
    # The last token of an answer is never computed.
    tokens = [r.num_prompt_tokens if prompt_only else r.num_tokens - 1 for r in requests]
    assert manager.resident == sum(count // BLOCK for count in tokens)


def test_all_stores_of_a_step_are_one_transfer(halves):
    rig = halves()
    submitted = []
    engine = rig.worker.connector_worker._transfers
    submit = engine.submit

    def note(job_id, spec, num_chunks):
        submitted.append(num_chunks)
        submit(job_id, spec, num_chunks)

    engine.submit = note
    for seed in range(16):
        rig.add(prompt(2 * BLOCK + 1 + seed % 2 * BLOCK, seed), 4)
    rig.quiet()
    assert submitted == [16 * 2 + 8]
    assert rig.scheduler.connector.connector_scheduler.adapter.manager.resident == 40


def test_a_waiting_request_is_looked_up_once_until_something_changes(halves):
    rig = halves(num_blocks=64)
    half = rig.scheduler.connector.connector_scheduler
    first = rig.add(prompt(BLOCK * 40, 0), 200)  # leaves no room for the second
    rig.step()
    second = rig.add(prompt(BLOCK * 40, 1), 4)
    looked_up = []
    look_up = half.get_num_new_matched_tokens

    def note(request, *rest):
        looked_up.append(half.adapter.changes)
        return look_up(request, *rest)

    half.get_num_new_matched_tokens = note
    for _ in range(BLOCK):
        rig.step()
        time.sleep(0.005)
    before = len(looked_up)
    assert before == len(set(looked_up)), "twice without a change"
    for _ in range(50):
        rig.step()
    assert len(looked_up) == before, "the first request decodes: nothing changes"
    half.adapter.changes += 1
    rig.step()
    assert len(looked_up) == before + 1
    assert (first.num_computed_tokens, second.num_computed_tokens) > (BLOCK * 40, 0)
    rig.quiet()
    assert not rig.scheduler.requests


def test_a_store_costs_few_functions_a_chunk(halves):
    rig = halves(cpu_bytes="64MiB")
    decoding(rig, 1)
    rig.worker.connector_worker._told_s += 3600.0  # or figures come into one of the two counts
    took = []
    for chunks in (100, 400):
        rig.add(prompt(chunks * BLOCK + 1, chunks), 2)
        found = counted(rig, 3)
        took.append(sum(worker for _, worker in found))
        rig.quiet(0.2)
    assert (took[1] - took[0]) / 300 < 0.1, json.dumps(took)


def test_what_one_transfer_stored_comes_back_block_by_block(halves):
    rig = halves()
    for cache in rig.caches.values():
        cache.view(torch.int16).random_()
    prompts = [prompt((1 + seed) * BLOCK + 1, seed) for seed in range(6)]

    def blocks_of(requests):
        found = []
        for request in requests:
            (table,) = rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            whole = table[: request.num_prompt_tokens // BLOCK]
            found.append([cache[whole].view(torch.int16) for cache in rig.caches.values()])
        return found

    first = [rig.add(tokens, 8) for tokens in prompts]
    rig.step()
    stored = blocks_of(first)
    rig.quiet()
    assert rig.scheduler.reset_prefix_cache()
    for cache in rig.caches.values():
        cache.zero_()
    second = [rig.add(tokens, 400) for tokens in prompts]
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        rig.step()
        time.sleep(0.002)
        if all(request.num_computed_tokens > request.num_prompt_tokens for request in second):
            break
    loaded = blocks_of(second)
    for one, other in zip(stored, loaded, strict=True):
        assert all(map(torch.equal, one, other))
    rig.scheduler.finish_requests([r.request_id for r in second], RequestStatus.FINISHED_ABORTED)
    rig.quiet()
