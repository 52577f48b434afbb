"""The life of a block, as a story: read this before anything else in the tests.

An engine computes KV cache blocks, they travel GPU → host memory → disk, the process ends, another
one starts, and a request with the same prefix gets its bytes back from disk. The GPU here is plain
CPU memory; every other part is real.
"""

import time

import pytest
import torch

from kvoffload.connectors.local import LocalConnector
from kvoffload.offload.base import Reason
from tests.support.disk_chunks import stored_in
from tests.support.manager_check import check

BLOCK_SIZE = 4  # tokens in a GPU block
BLOCKS_PER_CHUNK = 2


@pytest.fixture
def settings(tmp_path):
    return {
        "cpu_bytes": "64KiB",  # 16 slots: a chunk of this tiny cache fills a slot of 4 KiB
        "blocks_per_chunk": BLOCKS_PER_CHUNK,
        "backends": [{"type": "disk", "root": str(tmp_path), "capacity": "1MiB"}],
    }


def open_connector(settings, kv_caches):
    return LocalConnector(
        settings, kv_caches, block_size=BLOCK_SIZE, facts={"model": "a model", "dtype": "int8"}
    )


def pages(kv_caches, block_ids):
    return [tensor.tensor[block_ids].clone() for tensor in kv_caches.tensors]


def promised(connector, request):
    # None while the folder is being listed: the next step asks again.
    while (tokens := connector.get_num_new_matched_tokens(request, 0)) is None:
        time.sleep(0.001)
    return tokens


def wait_for_load(connector):
    while not (outcomes := connector.poll()):
        time.sleep(0.001)
    return outcomes


def test_the_life_of_a_block(settings, kv_caches, new_kv_caches, new_request, until):
    # --- Store. The engine has computed 40 tokens of a request, in GPU blocks 5..14.
    connector = open_connector(settings, kv_caches)
    request = new_request("a long prompt", num_tokens=43)
    assert promised(connector, request) == 0  # nobody has seen this prompt
    gpu_blocks = list(range(5, 15))
    connector.after_forward(request, [gpu_blocks], num_computed_tokens=40)
    computed = pages(kv_caches, gpu_blocks)

    # The copy to host memory and the write-through to disk go on by themselves. The request may
    # end meanwhile; whoever gets its blocks waits for the copy before overwriting them.
    assert connector.request_finished(request) is False
    connector.before_forward(gpu_blocks)
    for tensor in kv_caches.tensors:
        tensor.tensor[gpu_blocks] = 0

    # Events say where the five chunks live, each once it is true.
    assert connector.flush()
    in_host, on_disk = connector.take_events()
    assert (in_host.medium, in_host.reason, len(in_host.keys)) == ("CPU", Reason.STORED, 5)
    assert (on_disk.medium, on_disk.reason, len(on_disk.keys)) == ("DISK", Reason.STORED, 5)

    # --- Load from host memory. The same prompt again: GPU memory has its first block only.
    request = new_request("a long prompt", num_tokens=43)
    assert connector.get_num_new_matched_tokens(request, BLOCK_SIZE) == 36
    gpu_blocks = list(range(30, 41))
    connector.update_state_after_alloc(request, [gpu_blocks], num_external_tokens=36)
    (outcome,) = wait_for_load(connector)
    assert (outcome.num_loaded_tokens, outcome.ok) == (36, True)
    assert outcome.tokens_by_medium == {"CPU": 36}
    # Block 0 was the engine's own hit, in the middle of the first chunk; blocks 1..9 came back.
    for restored, original in zip(pages(kv_caches, gpu_blocks[1:10]), computed, strict=True):
        assert torch.equal(restored, original[1:])
    connector.request_finished(request)
    connector.close()

    # --- Load from disk. A new process has new memory; the folder is all that is left.
    kv_caches = new_kv_caches(seed=1)
    connector = open_connector(settings, kv_caches)
    request = new_request("a long prompt", num_tokens=43)
    until(lambda: connector.get_num_new_matched_tokens(request, 0) == 40)  # the index is read
    connector.update_state_after_alloc(request, [gpu_blocks], num_external_tokens=40)
    (outcome,) = wait_for_load(connector)
    assert (outcome.ok, outcome.tokens_by_medium) == (True, {"DISK": 40})
    for restored, original in zip(pages(kv_caches, gpu_blocks[:10]), computed, strict=True):
        assert torch.equal(restored, original)
    connector.request_finished(request)

    # What came from disk is in host memory now, and no transfer holds a slot any more.
    (promoted,) = connector.take_events()
    assert (promoted.medium, len(promoted.keys)) == ("CPU", 5)
    assert connector.stats()["host_chunks_busy"] == 0
    check(connector)
    connector.close()


def test_a_damaged_chunk_is_a_miss_and_the_good_prefix_is_kept(
    settings, tmp_path, kv_caches, new_kv_caches, new_request, until
):
    connector = open_connector(settings, kv_caches)
    request = new_request("a long prompt", num_tokens=43)
    connector.after_forward(request, [list(range(5, 15))], num_computed_tokens=40)
    connector.close()
    third = request.block_hashes[5]
    (stored,) = [chunk for chunk in stored_in(tmp_path) if chunk.key.startswith(third)]
    stored.flip(5000)  # one bit of the payload

    connector = open_connector(settings, new_kv_caches(seed=1))
    until(lambda: connector.get_num_new_matched_tokens(request, 0) == 40)
    connector.update_state_after_alloc(request, [list(range(11))], num_external_tokens=40)
    (outcome,) = wait_for_load(connector)
    # Two good chunks of 8 tokens; the engine recomputes from the third on.
    assert (outcome.num_loaded_tokens, outcome.ok) == (16, False)
    # The chunk is forgotten before the outcome is told: asking again promises 16, not 40.
    assert promised(connector, request) == 16
    check(connector)
    connector.close()
