"""The worker half alone: its jobs go through real transfers over a small KV cache."""

import time
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvoffload.backends.memory import MemoryBackend
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.vllm.engine_weights import UPDATES
from kvoffload.connectors.vllm.start import read_settings
from kvoffload.connectors.vllm.step_messages import StepMetadata, WorkerInfo, WorkerReport
from kvoffload.connectors.vllm.worker import KVOffloadWorker
from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    Fetch,
    make_offload_key,
)
from kvoffload.testing.faults import FaultyBackend, Plan
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.layout import ChunkLayout

PAGE = 4096
KEY = make_offload_key(b"k" * 32, 0)


class Hanging:
    """A store whose reads hang."""

    Options = MemoryBackend.Options

    def __new__(cls, options, namespace):
        plan = Plan("hang", frozenset({"read"}))
        return FaultyBackend(MemoryBackend(options, namespace), plan)


@pytest.fixture
def half(monkeypatch, plug_in):
    """A worker half of two KV cache groups with chunks of two blocks, and its spec."""
    plug_in("hanging", Hanging)
    tensor = torch.arange(16, dtype=torch.int8).repeat_interleave(PAGE).view(16, PAGE)
    ref = (CanonicalKVCacheRef(0, PAGE),)
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(tensor, PAGE),), (ref, ref))
    settings = read_settings(
        {
            "cpu_bytes": 16 * 2 * PAGE,
            "io": "thread",
            "blocks_per_chunk": 2,
            "load_timeout_s": 5.0,
            "backends": [{"type": "hanging"}],
        }
    )
    nothing = types.SimpleNamespace()
    config = types.SimpleNamespace(kv_cache_groups=[nothing, nothing])
    device = types.SimpleNamespace(device_type="cpu")
    spec = types.SimpleNamespace(
        replicated_layout=False, config=types.SimpleNamespace(replicated_layout=False)
    )
    monkeypatch.setattr(
        "kvoffload.connectors.vllm.worker.get_offloading_group_ids", lambda config: (0, 1)
    )
    vllm_config = types.SimpleNamespace(
        device_config=device,
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
    )
    made = KVOffloadWorker(spec, settings, vllm_config, config)
    made._spec = TieredOffloadingSpec(settings, 2 * PAGE, {"test": "worker"})
    made._transfers = made._spec.open_engine(caches)
    made._layout = ChunkLayout(caches, 2)
    made._tiers = made._spec.tiers
    made._info = WorkerInfo(16, 2 * PAGE, {})
    yield made
    made._spec.close()


def step(half, **orders):
    """Give orders; return the step's report."""
    metadata = StepMetadata(
        orders.get("loads", {}), orders.get("stores", {}), orders.get("flush", set())
    )
    half.handle_preemptions(metadata)
    half.start_kv_transfers(metadata)
    for job_id, job in metadata.store_jobs.items():
        half._unsubmitted_store_jobs.append((job_id, job.src_spec, job.dst_spec))
    half.get_finished(set())
    return half.build_connector_worker_meta()


def test_a_part_of_a_chunk_keeps_no_other_chunk_from_being_stored(half, until):
    """A window has left the first block of a chunk; both groups have whole chunks in the job."""
    source = GPULoadStoreSpec([1, 2, 3, 6, 7], group_sizes=[2, 3], block_indices=[0, 3])
    job = TransferJob(req_id="r", src_spec=source, dst_spec=CPULoadStoreSpec([4, 5, 6]))
    step(half, stores={7: job})
    report = until(lambda: step(half))
    (answer,) = report.ended
    assert (answer.job_id, answer.ok) == (7, (True, False, True))
    assert half._transfers.failures["partial_chunk"] == 1
    rows = half._transfers._slab.rows
    assert rows[4].tolist() == [1] * PAGE + [2] * PAGE
    assert rows[6].tolist() == [6] * PAGE + [7] * PAGE
    assert not rows[5].any()


def test_whole_chunks_are_stored_as_they_are(half, until):
    source = GPULoadStoreSpec([1, 2, 6, 7], group_sizes=[2, 2], block_indices=[0, 2])
    job = TransferJob(req_id="r", src_spec=source, dst_spec=CPULoadStoreSpec([4, 5]))
    step(half, stores={7: job})
    report = until(lambda: step(half))
    (answer,) = report.ended
    assert (answer.job_id, answer.ok, answer.reason) == (7, (True, True), "")
    assert half._transfers._slab.rows[5].tolist() == [6] * PAGE + [7] * PAGE


def test_a_job_with_parts_of_chunks_alone_is_answered(half, until):
    source = GPULoadStoreSpec([1, 2], group_sizes=[1, 1], block_indices=[1, 4])
    job = TransferJob(req_id="r", src_spec=source, dst_spec=CPULoadStoreSpec([4, 5]))
    step(half, stores={7: job})
    (answer,) = until(lambda: step(half)).ended
    assert (answer.job_id, answer.ok) == (7, (False, False))


def test_a_reset_does_not_wait_for_a_load_from_a_store_that_hangs(half):
    target = GPULoadStoreSpec([1, 2], group_sizes=[2, 0], block_indices=[0, 0])
    source = CPULoadStoreSpec([0], [Fetch("hanging", (0,), (KEY,))])
    step(half, loads={8: TransferJob(req_id="r", src_spec=source, dst_spec=target)})
    began_s = time.monotonic()
    step(half, flush={8})
    assert time.monotonic() - began_s < 4.5
    assert half._loads, "the load still waits for its store"


def test_a_sleep_waits_for_copies_out_of_the_memory_that_it_unmaps(half, monkeypatch):
    copy = CpuCopier._copy

    def slowly(*given):
        time.sleep(0.3)
        copy(*given)

    monkeypatch.setattr(CpuCopier, "_copy", slowly)
    source = GPULoadStoreSpec([1, 2, 6, 7], group_sizes=[2, 2], block_indices=[0, 2])
    job = TransferJob(req_id="r", src_spec=source, dst_spec=CPULoadStoreSpec([4, 5]))
    step(half, stores={7: job})
    step(half)
    half.unregister_kv_caches()
    assert half._transfers._slab.rows[5].tolist() == [6] * PAGE + [7] * PAGE


def test_a_sleep_takes_the_stores_along_that_wait_for_the_next_step(half):
    """After it their blocks are unmapped, or have other bytes."""
    source = GPULoadStoreSpec([1, 2, 6, 7], group_sizes=[2, 2], block_indices=[0, 2])
    job = TransferJob(req_id="r", src_spec=source, dst_spec=CPULoadStoreSpec([4, 5]))
    step(half, stores={7: job})
    half.unregister_kv_caches()
    assert half._transfers._slab.rows[5].tolist() == [6] * PAGE + [7] * PAGE


def test_a_load_after_an_update_brings_nothing_until_the_order_for_a_generation(
    half, until, monkeypatch
):
    """A trainer in this process has loaded other weights, and the scheduler does not know it."""
    monkeypatch.setattr(UPDATES, "count", half._updates + 1)

    def load(job_id, generation=None):
        target = GPULoadStoreSpec([1, 2], group_sizes=[2, 0], block_indices=[0, 0])
        job = TransferJob(req_id="r", src_spec=CPULoadStoreSpec([4]), dst_spec=target)
        metadata = StepMetadata({job_id: job}, {}, set(), generation=generation)
        half.handle_preemptions(metadata)
        half.start_kv_transfers(metadata)
        reports = []

        def is_ended():
            half.get_finished(set())
            reports.append(half.build_connector_worker_meta())
            ended = (result for report in reports if report for result in report.ended)
            return any(result.job_id == job_id for result in ended)

        until(is_ended)
        told = any(report and report.has_new_weights for report in reports)
        return told, half.take_failed_requests()

    assert load(7) == (True, {"r"})
    assert load(8) == (False, {"r"})
    assert load(9, generation="new") == (False, set())
    assert load(10) == (False, set())
    one, other = WorkerReport(), WorkerReport(has_new_weights=True)
    assert one.is_empty
    assert not other.is_empty
    assert one.aggregate(other).has_new_weights
