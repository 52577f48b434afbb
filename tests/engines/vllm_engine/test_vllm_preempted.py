"""Requests that are preempted: by a reset of the prefix cache, or while their last token comes."""

import random
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from benchmarks.vllm_parts.halves import BLOCK


def settle(rig, half):
    """Step until no transfer is in flight."""
    while half._jobs:
        rig.step()
        time.sleep(0.005)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_request_that_a_reset_preempts_loads_its_chunks_at_once(halves, blocks_per_chunk):
    """Its chunks are in host memory: the step after the reset begins a load of them."""
    rig = halves(blocks_per_chunk=blocks_per_chunk)
    half = rig.scheduler.connector.connector_scheduler
    request = rig.add(random.Random(1).choices(range(3, 512), k=10 * BLOCK + 5), 20)
    rig.step()
    settle(rig, half)
    assert not request.is_finished()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    output = rig.step()
    (load,) = output.kv_connector_metadata.load_jobs.values()
    assert load.req_id == request.request_id
    assert len(load.dst_spec.block_ids) == 10
    rig.quiet()
    assert request.is_finished()
    assert request.num_output_tokens == 20
    assert not half._jobs


def test_a_preempted_request_does_not_wait_for_stores_of_a_stage_that_ends_no_step(
    halves, monkeypatch
):
    """With drafts, runner V1 ends steps on the last stage of a pipeline alone."""
    begin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output

    def without_end(output):
        return begin(output, defer_finalize=output.total_num_scheduled_tokens > 0)

    runner = "maybe_get_kv_connector_output"
    monkeypatch.setattr(KVConnectorModelRunnerMixin, runner, staticmethod(without_end))
    rig = halves()
    request = rig.add(random.Random(1).choices(range(3, 512), k=10 * BLOCK + 5), 20)
    rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    rig.quiet()
    assert request.is_finished()
    assert not rig.scheduler.connector.connector_scheduler._jobs


@pytest.mark.parametrize("runs_at_once", [False, True])
def test_a_store_fails_whose_request_a_reset_preempts_before_its_load_is_known_to_fail(
    halves, runs_at_once
):
    """In the next step it is looked up, and vLLM's half forgets its block table."""
    rig = halves()
    rig.scheduler.use_v2_model_runner = runs_at_once  # which is told of it as of a new request
    half = rig.scheduler.connector.connector_scheduler
    request = rig.add(random.Random(1).choices(range(3, 512), k=10 * BLOCK + 5), 20)
    request.skip_reading_prefix_cache = runs_at_once  # or it waits for its own stores
    (new,) = rig.scheduler.schedule().scheduled_new_reqs
    (store,) = half._jobs
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    assert len(rig.scheduler.schedule().scheduled_new_reqs) == runs_at_once
    # Another connector tells of the first step while the second one is in flight.
    lost = KVConnectorOutput(invalid_block_ids=set(new.block_ids[0][:2]))
    rig.scheduler.connector.update_connector_output(lost)
    assert half._table[store].stale


@pytest.mark.parametrize("blocks_per_chunk", [1, 16], ids=["a store", "no store"])
def test_the_blocks_of_a_request_that_ends_before_its_load_is_known_to_fail_are_not_found(
    halves, blocks_per_chunk
):
    rig = halves(blocks_per_chunk=blocks_per_chunk)
    half = rig.scheduler.connector.connector_scheduler
    prompt = random.Random(1).choices(range(3, 512), k=10 * BLOCK + 5)
    request = rig.add(prompt, 20)
    (new,) = rig.scheduler.schedule().scheduled_new_reqs
    stores = [*half._jobs]
    assert len(stores) == (blocks_per_chunk == 1)
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    rig.scheduler.schedule()
    lost = KVConnectorOutput(invalid_block_ids=set(new.block_ids[0][:2]))
    rig.scheduler.connector.update_connector_output(lost)
    assert all(half._table[store].stale for store in stores)
    again = rig.add(prompt, 2)
    _, found, *_ = rig.scheduler.kv_cache_manager.get_computed_blocks(again)
    assert found == 0


def test_a_later_failure_costs_no_block_of_a_request_that_ended_before_the_step(halves):
    rig = halves(blocks_per_chunk=16)
    prompt = random.Random(1).choices(range(3, 512), k=10 * BLOCK + 5)
    request = rig.add(prompt, 20)
    (new,) = rig.step().scheduled_new_reqs
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    rig.step()
    # Another request has one of its blocks by now.
    lost = KVConnectorOutput(invalid_block_ids={new.block_ids[0][-1]})
    rig.scheduler.connector.update_connector_output(lost)
    again = rig.add(prompt, 2)
    _, found, *_ = rig.scheduler.kv_cache_manager.get_computed_blocks(again)
    assert found == 10 * BLOCK
