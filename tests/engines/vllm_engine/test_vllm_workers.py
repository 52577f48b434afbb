"""Worker halves over KV caches that vLLM has planned and allocated, without an engine around them.

Their stores are those of a real configuration, with an I/O process for each rank.
"""

import copy
import os

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # 0.32
    from vllm.v1.core import kv_cache_utils as planning

from benchmarks.vllm_parts.engine import ours
from kvoffload.connectors.vllm.connector import KVOffloadConnector
from kvoffload.connectors.vllm.step_messages import StepMetadata
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    Fetch,
    make_offload_key,
)
from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(600)
CHUNKS = 6
"""Of each KV cache group."""


@pytest.fixture
def workers(models, tmp_path, monkeypatch):
    """Make the worker halves of all ranks for layers of these specs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made = []

    def make(kind, layers, num_ranks=1, layout="LBHNC", between=lambda: None):
        disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
        extra = {"cpu_bytes": 16 << 20, "blocks_per_chunk": 1, "backends": [disk]}
        config = EngineArgs(
            model=models(kind),
            load_format="dummy",
            enforce_eager=True,
            block_size=16,
            max_model_len=512,
            tensor_parallel_size=num_ranks,
            distributed_executor_backend="mp" if num_ranks > 1 else None,
            kv_transfer_config=ours(extra),
        ).create_engine_config()
        config.cache_config.kv_cache_layout = layout
        groups = planning.get_kv_cache_groups(config, layers)
        caches = planning.get_kv_cache_config_from_groups(config, groups, 8 << 20)
        caches.kv_tp_replicas = planning.kv_cache_groups_tp_replicas(groups, num_ranks)
        for rank in range(num_ranks):
            between()
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(config.parallel_config)
            mine.parallel_config.rank = rank
            connector = KVOffloadConnector(mine, KVConnectorRole.WORKER, caches)
            tensors = allocate_kv_cache(caches, torch.device("cpu"), KVCacheLayout[layout])
            for tensor in tensors.values():
                noise = torch.Generator().manual_seed(1)  # ranks have the same bytes
                tensor.view(torch.int8).random_(-128, 127, generator=noise)
            connector.register_kv_caches(tensors)
            made.append(connector.connector_worker)
        return made

    yield make
    for worker in made:
        worker.shutdown()


def step(worker, metadata):
    worker.handle_preemptions(metadata)
    worker.start_kv_transfers(metadata)


def drive(workers, until):
    """Store chunks of all groups, write them through, and load them into other blocks."""
    info, groups = workers[0]._info, workers[0].kv_cache_config.kv_cache_groups
    sizes, starts = [CHUNKS] * len(groups), [0] * len(groups)
    keys = [
        make_offload_key(os.urandom(32), group)
        for group in range(len(groups))
        for _ in range(CHUNKS)
    ]
    rows = [size // info.slot_bytes for size in info.payload_bytes] or [1] * len(groups)
    slots, free = [], 0
    for group in range(len(groups)):
        slots += [free + i * rows[group] for i in range(CHUNKS)]
        free += CHUNKS * rows[group]
    host, target = CPULoadStoreSpec(slots), BackendLoadStoreSpec("disk", tuple(keys))
    source = GPULoadStoreSpec(
        list(range(1, 1 + len(keys))), group_sizes=sizes, block_indices=starts
    )
    for worker in workers:
        store = TransferJob(req_id="r", src_spec=source, dst_spec=host)
        step(worker, StepMetadata({}, {1: store}, {1}))
        orders = StepMetadata({}, {}, set())
        orders.write_through[-7] = host, target
        step(worker, orders)
    for worker in workers:
        until(lambda each=worker: each.get_finished(set()) and len(each._report.ended) == 2)
        report = worker.build_connector_worker_meta()
        answers = {result.job_id: result.ok for result in report.ended}
        assert answers == {1: (True,) * len(keys), -7: (True,) * len(keys)}
    first = workers[0].kv_cache_config.num_blocks // 2
    blocks = list(range(first, first + len(keys)))
    for worker in workers:
        staged = CPULoadStoreSpec(slots, [Fetch("disk", tuple(range(len(keys))), tuple(keys))])
        end = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=starts)
        step(
            worker,
            StepMetadata({2: TransferJob(req_id="q", src_spec=staged, dst_spec=end)}, {}, set()),
        )
        until(lambda worker=worker: worker.get_finished(set())[1] == {"q"})
        assert not worker.take_failed_blocks() | worker.take_failed_requests()
        for i, group in enumerate(groups):
            mine = slice(i * CHUNKS, (i + 1) * CHUNKS)
            for layer in group.layer_names:
                tensor = worker._kv_caches[layer]
                bits = group_kernel_blocks(tensor, worker.kv_cache_config.num_blocks).view(
                    torch.int16
                )
                assert torch.equal(bits[blocks[mine]], bits[1 + mine.start : 1 + mine.stop])


def named(spec, number):
    return {f"model.layers.{i}.self_attn.attn": spec(i) for i in range(number)}


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_ranks_of_latent_attention_store_one_copy(workers, tmp_path, until, layout):
    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
    )
    mine = workers("mla", named(lambda i: spec, 2), num_ranks=2, layout=layout)
    assert len({worker._spec.stores.namespace for worker in mine}) == 1
    drive(mine, until)
    chunks = stored_in(tmp_path / "kv")
    assert len(chunks) == CHUNKS
    assert len({chunk.namespace for chunk in chunks}) == 1


@pytest.mark.parametrize(("layout", "pieces"), [("LBHNC", 3), ("BLHNC", 1)])
def test_a_block_in_one_piece_comes_back_as_one_in_pieces_does(workers, until, layout, pieces):
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    (mine,) = workers("llama", named(lambda i: FullAttentionSpec(**heads), 3), layout=layout)
    (regions,) = mine._transfers._layout.regions
    assert [region.page_bytes for region in regions] == [3 * 8192 // pieces] * pieces
    drive([mine], until)


def test_groups_of_windows_come_back_where_a_block_is_one_piece(workers, tmp_path, until):
    """A group with fewer layers stores the whole block all the same."""
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**heads), SlidingWindowSpec(**heads, sliding_window=128)
    mine = workers("sliding", named(lambda i: full if i % 2 else window, 5), layout="BLHNC")
    drive(mine, until)
    sizes = [chunk.allocated_bytes for chunk in stored_in(tmp_path / "kv")]
    assert sizes == [16384 + 4096] * 3 * CHUNKS


def test_groups_of_different_widths_take_the_rows_that_they_need(workers, tmp_path, until):
    """vLLM makes groups of two layers of windows, of one, and of two of full attention."""
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**heads), SlidingWindowSpec(**heads, sliding_window=128)
    mine = workers("sliding", named(lambda i: full if i % 2 else window, 5))
    info = mine[0]._info
    assert (info.slot_bytes, sorted(info.payload_bytes)) == (8192, [8192, 16384, 16384])
    drive(mine, until)
    sizes = [chunk.allocated_bytes for chunk in stored_in(tmp_path / "kv")]
    assert sorted(sizes) == [8192 + 4096] * CHUNKS + [16384 + 4096] * 2 * CHUNKS


def test_a_rank_begins_where_another_one_has_taken_its_part_already(workers, kernel_files):
    heads = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    layers, left = named(lambda i: FullAttentionSpec(**heads), 3), iter([40 << 20, 24 << 20])
    workers("llama", layers, num_ranks=2, between=lambda: kernel_files.available(next(left)))
