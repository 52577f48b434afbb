"""What vLLM's half would store wrongly: holed chunks, and KV cache from before a reset."""

import random
import time
import types

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.v1.request import RequestStatus

from benchmarks.vllm_parts.halves import BLOCK
from kvoffload.connectors.vllm.connector import with_settings
from kvoffload.connectors.vllm.kv_caches import cut
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.connectors.vllm.withheld_stores import (
    bar_computing,
    skip_holed_chunks,
    without_barred,
)
from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, make_offload_key
from kvoffload.transfer.layout import ChunkLayout

some = types.SimpleNamespace


def skipped(blocks, size=4, stored=0, finished=()):
    """Return the blocks of a window's group after a step of its request, and another group's."""
    window = some(block_ids=list(blocks), next_stored_chunk_idx=stored)
    full = some(block_ids=list(blocks), next_stored_chunk_idx=stored)
    half = some(
        config=some(blocks_per_chunk=size),
        _sliding_window_groups=(1,),
        _req_status={"r": some(group_states=[full, window])},
    )
    output = some(num_scheduled_tokens={"r": 1, "unknown": 1}, finished_req_ids=finished)
    skip_holed_chunks(half, output)
    assert full.block_ids == list(blocks)
    return window.block_ids


def test_a_chunk_with_a_freed_block_is_passed_over_by_its_last_block():
    assert skipped([10, 0, 12, 13, 20, 21, 22, 23]) == [10, 0, 12, 0, 20, 21, 22, 23]
    assert skipped([0, 11, 12, 13, 20, 21]) == [0, 11, 12, 0, 20, 21]
    assert skipped([10, 0, 12, 13, 0, 21, 22, 23], stored=1) == [10, 0, 12, 13, 0, 21, 22, 0]
    ended = skipped([10, 0, 12, 13, 20, 21, 22, 23], stored=1, finished={"r"})
    assert ended == [10, 0, 12, 0, 20, 21, 22, 23]
    assert skipped([10, 0, 12], size=1) == [10, 0, 12]


def test_what_is_left_is_cut_into_whole_chunks():
    """As vLLM lists it: by each chunk's last block, without freed ones."""
    blocks = skipped([10, 0, 12, 13, 20, 21, 22, 23])
    chunks = [blocks[i : i + 4] for i in (0, 4)]
    listed = [(4 * i, chunk) for i, chunk in enumerate(chunks) if chunk[-1]]
    (first, chunk), *others = listed
    assert not others
    theirs = some(block_ids=np.array(chunk), group_sizes=[4], block_indices=[first])
    caches = CanonicalKVCaches((), ((CanonicalKVCacheRef(0, 64),),))
    (move,) = cut(theirs, [0], ChunkLayout(caches, 4))
    assert move.block_ids.tolist() == [20, 21, 22, 23]


def test_vllm_reads_what_the_environment_sets(monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_SETTING_BLOCKS_PER_CHUNK", "4")
    given = {"cpu_bytes": 1}
    config = some(kv_transfer_config=some(kv_connector_extra_config=given))
    told = with_settings(config, read_settings(given)).kv_transfer_config.kv_connector_extra_config
    assert told == {"cpu_bytes": 1, "blocks_per_chunk": 4, "self_describing_kv_events": False}
    assert config.kv_transfer_config.kv_connector_extra_config == given == {"cpu_bytes": 1}


def test_a_request_that_computes_at_a_reset_stores_nothing_after_it(halves):
    rig = halves(disk=True, offload_prompt_only=False)
    half = rig.scheduler.connector.connector_scheduler
    running = rig.add(random.Random(1).choices(range(3, 512), k=10 * BLOCK), 3 * BLOCK)
    rig.step()
    rig.step()
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    waiting = rig.add(random.Random(2).choices(range(3, 512), k=10 * BLOCK), 2)
    rig.quiet()
    assert running.is_finished()
    assert held(half, waiting) == 10
    assert held(half, running) == 0


def test_a_second_reset_before_the_next_step_leaves_what_the_first_one_flushes(halves):
    rig = halves()
    half = rig.scheduler.connector.connector_scheduler
    request = rig.add(random.Random(1).choices(range(3, 512), k=10 * BLOCK), 3)
    rig.step()
    (store,) = half._jobs
    rig.scheduler.connector.weights_may_have_changed("update_weights")
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert rig.step().kv_connector_metadata.jobs_to_flush == {store}
    rig.quiet()
    assert request.is_finished()


def test_a_request_preempted_by_a_reset_is_computed_and_stored_again(halves):
    rig = halves(offload_prompt_only=False)
    half = rig.scheduler.connector.connector_scheduler
    request = rig.add(random.Random(1).choices(range(3, 512), k=10 * BLOCK), 3 * BLOCK)
    rig.step()
    while half._jobs:  # chunks whose stores go on are not stored again at once
        time.sleep(0.01)
        rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    rig.quiet()
    assert request.is_finished()
    assert held(half, request) >= 12


def test_a_request_that_an_error_ends_within_its_prompt_stores_what_it_computed(halves):
    rig = halves()
    half = rig.scheduler.connector.connector_scheduler
    rig.add(random.Random(1).choices(range(3, 512), k=8192 - 12 * BLOCK - 3), 2)
    request = rig.add(random.Random(2).choices(range(3, 512), k=20 * BLOCK), 2)
    rig.step()
    assert request.num_computed_tokens == 12 * BLOCK + 3
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    rig.quiet()
    assert held(half, request) == 12


def held(half, request):
    """Return how many chunks of a request host memory or a tier has."""
    time.sleep(0.2)  # stores end, and tiers tell of them
    keys = [make_offload_key(each, 0) for each in request.block_hashes]
    return sum(bool(half.adapter.manager.lookup(key)) for key in keys)


def test_states_that_a_barred_request_hands_over_are_left_out():
    """Where vLLM takes a limit of 0 tokens for none."""
    statuses = {
        name: some(req=some(num_computed_tokens=computed), max_offload_tokens=None)
        for name, computed in (("computing", 7), ("waiting", 0))
    }
    half = some(_req_status=statuses)
    bar_computing(half)
    handed = {name: [(0, 1, 4)] for name in ("computing", "waiting", "unknown")}
    output = some(kv_connector_block_state=some(boundary_state_offloads=handed))
    left = without_barred(half, output).kv_connector_block_state.boundary_state_offloads
    assert sorted(left) == ["unknown", "waiting"]
    assert sorted(handed) == ["computing", "unknown", "waiting"]
    without = some(kv_connector_block_state=None)
    assert without_barred(half, without) is without
