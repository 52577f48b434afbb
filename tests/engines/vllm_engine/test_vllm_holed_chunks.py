"""Chunks of windows whose blocks are partly freed, and settings that vLLM reads too."""

import types

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from kvoffload.connectors.vllm.connector import with_settings
from kvoffload.connectors.vllm.holed_chunks import skip_holed_chunks
from kvoffload.connectors.vllm.kv_caches import GpuEnd
from kvoffload.connectors.vllm.settings import read_settings

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
    end, whole = GpuEnd(theirs, [0], 4).whole()
    assert end.block_ids.tolist() == [20, 21, 22, 23]
    assert whole == (True,)


def test_vllm_reads_what_the_environment_sets(monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_SETTING_BLOCKS_PER_CHUNK", "4")
    given = {"cpu_bytes": 1}
    config = some(kv_transfer_config=some(kv_connector_extra_config=given))
    told = with_settings(config, read_settings(given)).kv_transfer_config.kv_connector_extra_config
    assert told == {"cpu_bytes": 1, "blocks_per_chunk": 4, "self_describing_kv_events": False}
    assert config.kv_transfer_config.kv_connector_extra_config == given == {"cpu_bytes": 1}
