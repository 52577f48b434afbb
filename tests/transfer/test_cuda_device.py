"""Every call of the CUDA device, on a stand-in for ``torch.cuda``."""

import contextlib
import threading
import types

import numpy as np
import pytest
import torch
from cuda_stand_in import FakeDriver, install

from benchmarks.harness import caches_of
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cuda import stream_copier
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.direction import STAGES, TABLES
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends, store_and_load

NUM_BLOCKS = 32
PORTION = 3 * 4096


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch.setattr, PORTION)


def make_caches(pages):
    return caches_of(
        [
            torch.randint(-128, 127, (NUM_BLOCKS, page + padding), dtype=torch.int8)[:, :page]
            for page, padding in pages
        ]
    )


@contextlib.contextmanager
def copying(*pages, per_chunk=1, num_slots=8, triton=True, **sizes):
    """Yield a copier of new caches, by default of one tensor, the caches and their layout."""
    caches = make_caches(pages or [(512, 0)])
    layout = ChunkLayout(caches, per_chunk)
    slab = Slab(num_slots, layout.slot_bytes)
    device = CudaDevice(caches, slab, triton=triton)
    with contextlib.closing(StreamCopier(caches, slab, layout, device, **sizes)) as copier:
        yield copier, caches, layout


@pytest.mark.parametrize("why", ["", "the driver is of CUDA 12.4"])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_chunks_go_and_come_back_every_way(cuda, why, direct_page_bytes, until):
    cuda.why_no_batches = why
    sizes = {"num_slots": 12, "stage_bytes": 20000, "direct_page_bytes": direct_page_bytes}
    pages = (512, 0), (24, 40), (4096, 0)
    with copying(*pages, per_chunk=3, **sizes) as (copier, caches, layout):
        slab_bytes = 12 * layout.slot_bytes
        blocks = np.random.default_rng(0).permutation(NUM_BLOCKS)[:25]
        moves = layout.moves(GPULoadStoreSpec(blocks, [25], [2]), list(range(9)))
        store_and_load(copier, caches, moves, blocks)
        until(lambda: copier.stats()["pinned_bytes"] == slab_bytes)
        stats = copier.stats()
        assert stats["copies"] == ("one by one" if why else "batched")
        assert stats["groups"] == ("direct" if direct_page_bytes == 1 else "staged")
        assert stats.get("why_not_copies", "") == why
        assert bool(cuda.batches) is not bool(why)
        assert sum(cuda.registered.values()) == slab_bytes
        assert len(cuda.streams) == 2 * 3
    assert not cuda.registered
    assert not cuda.streams


def test_without_triton_every_page_is_copied_directly(cuda):
    with copying((512, 0), (24, 40), per_chunk=2, triton=False) as (copier, caches, layout):
        stats = copier.stats()
        assert (stats["groups"], stats["kernels"], stats["stage_bytes"]) == ("direct", "none", 0)
        moves = layout.moves(GPULoadStoreSpec([5, 9, 2, 1]), [0, 4])
        store_and_load(copier, caches, moves, [5, 9, 2, 1])


def test_kernels_that_do_not_compile_are_not_used_and_told(cuda, monkeypatch):
    def refuse(device, parts):
        raise SyntaxError("no such instruction")

    monkeypatch.setattr(CudaDevice, "_compile", refuse)
    with copying() as (copier, caches, layout):
        assert copier.stats()["groups"] == "direct"
        assert copier.stats()["why_not_kernels"] == "SyntaxError: no such instruction"
        store_and_load(copier, caches, layout.moves(GPULoadStoreSpec([5, 9]), [0, 4]), [5, 9])


@pytest.mark.parametrize("why", ["", "not asked for"])
@pytest.mark.parametrize("to_host", [True, False])
def test_no_copy_crosses_two_registrations(cuda, to_host, why, until):
    cuda.why_no_batches = why
    slab = Slab(8, 4096)
    device = CudaDevice(make_caches([(512, 0)]), slab)
    device.enter_thread()
    here = torch.randint(-128, 127, (2 * PORTION,), dtype=torch.int8)
    ends = ((here.data_ptr() + 7, PORTION - 100, PORTION + 200), (here.data_ptr(), 50, 3))
    copies = Copies(*(np.array(row) for row in zip(*ends, strict=True)))
    there = torch.from_numpy(slab.flat)[PORTION - 100 :][: PORTION + 200]
    there.fill_(1)
    until(lambda: device.slab.is_settled(slab.num_bytes))
    try:
        device.copy(device.new_stream(), copies, to_host, device.slab)
        assert torch.equal(here[7:][: len(there)], there)
        assert to_host is bool((there != 1).any())
        assert cuda.batches == ([] if why else [[100, PORTION, 100, 3]])
    finally:
        device.close()


def test_a_long_copy_is_cut_so_that_the_engines_own_need_not_wait(cuda, monkeypatch):
    monkeypatch.setattr(stream_copier, "COPY_BYTES", 4096)
    with copying((20_000, 0), direct_page_bytes=1) as (copier, caches, layout):
        store_and_load(copier, caches, layout.moves(GPULoadStoreSpec([5, 9]), [0, 3]), [5, 9])
        assert max(max(batch) for batch in cuda.batches) == 4096


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_one_copy_and_a_table_of_blocks_are_batches_too(cuda, monkeypatch, direct_page_bytes):
    """The call for one copy takes a lock of the driver that the engine's calls wait for."""
    monkeypatch.setattr(FakeDriver, "copy", lambda *given: pytest.fail("a call for one copy"))
    sizes = {"stage_bytes": 512, "direct_page_bytes": direct_page_bytes}
    with copying(**sizes) as (copier, caches, layout):
        store_and_load(copier, caches, layout.moves(GPULoadStoreSpec([5]), [4]), [5])
        # A table names a block, its chunk and its place there, in 8 bytes each.
        table = [] if direct_page_bytes == 1 else [[24]]
        assert cuda.batches == [*table, [512], *table, [512]]


def test_batches_that_are_refused_are_copied_one_by_one(cuda):
    cuda.batch_error = RuntimeError("cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED (801)")
    with copying(triton=False) as (copier, caches, layout):
        store_and_load(copier, caches, layout.moves(GPULoadStoreSpec([5, 9, 2]), [0, 4, 6]), [5])
        assert copier.stats()["copies"] == "one by one"
        assert "801" in copier.stats()["why_not_copies"]
        assert len(cuda.batches) == 1


def test_memory_that_is_not_pinned_does_not_end_batches_of_what_is(cuda, until):
    cuda.refuse_after = PORTION
    with copying(triton=False) as (copier, caches, layout):
        until(lambda: "why_not_pinned" in copier.stats())
        for slots in ([0, 2, 7, 5], [2, 0, 4, 6]):
            moves = layout.moves(GPULoadStoreSpec([5, 9, 2, 1]), slots)
            store_and_load(copier, caches, moves, [5, 9, 2, 1])
        assert copier.stats()["copies"] == "batched"
        assert cuda.batches == [[512, 512]] * 4


def test_a_copy_that_waits_for_pinning_goes_on_without_when_the_copier_is_closed(cuda, monkeypatch):
    """Left alone instead, the slab would stay registered for ever."""
    registers, goes_on = threading.Event(), threading.Event()
    register = cuda.register

    def slowly(address, *given):
        registers.set()
        assert goes_on.wait(60)
        return register(address, *given)

    monkeypatch.setattr(cuda, "register", slowly)
    caches = make_caches([(512, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    copier = StreamCopier(caches, slab, layout, CudaDevice(caches, slab))
    moves = layout.moves(GPULoadStoreSpec([5]), [7])
    fence = copier.launch(moves, True, copier.record_fence())
    assert registers.wait(10)
    assert not ends(fence, 0.05)
    closes = threading.Thread(target=copier.close)
    closes.start()
    assert ends(fence)
    assert np.array_equal(slab.rows[7][:512], caches.tensors[0].tensor[5].numpy())
    goes_on.set()
    closes.join(10)
    assert not cuda.registered


def test_memory_is_unpinned_on_the_thread_that_pinned_it(cuda, monkeypatch, caplog):
    threads = []

    def refuse(address):
        threads.append(threading.current_thread())
        raise RuntimeError("cuMemHostUnregister: CUDA_ERROR_UNKNOWN (999)")

    monkeypatch.setattr(cuda, "unregister", refuse)
    slab = Slab(8, 4096)
    device = CudaDevice(make_caches([(512, 0)]), slab, triton=False)
    device.close()
    assert {thread.name for thread in threads} <= {"kvoffload-pin"}
    assert len(threads) == len(cuda.registered) > 0
    assert "could not be unpinned" in caplog.text
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("missing", ["pci_domain_id", "pci_bus_id", "pci_device_id"])
def test_a_torch_that_does_not_tell_where_the_gpu_is_will_do(cuda, monkeypatch, missing):
    known = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    del known[missing]
    properties = types.SimpleNamespace(**known)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    CudaDevice(make_caches([(512, 0)]), Slab(8, 4096), triton=False).close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_told(cuda, monkeypatch, caplog):
    cuda.refuse_after = 5 * 4096
    with copying(triton=False) as (copier, _, layout):
        moves = layout.moves(GPULoadStoreSpec([5, 9, 2]), [0, 4, 7])
        assert ends(copier.launch(moves, True, copier.record_fence()))
        assert copier.stats()["pinned_bytes"] == 3 * 4096
    assert "only 12.0 KiB of 32.0 KiB could be pinned" in caplog.text
    assert "RLIMIT_MEMLOCK is" in caplog.text
    assert not cuda.registered


def test_the_engines_fence_is_on_its_current_stream_whichever_that_is(cuda, monkeypatch):
    with contextlib.closing(CudaDevice(make_caches([(512, 0)]), Slab(8, 4096))) as device:
        for stream in (cuda.Stream(), cuda.Stream()):
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device, now=stream: now)
            assert device.engine_event().torch.stream is stream


@pytest.mark.parametrize("stage_bytes", [10_000, 0])
def test_a_gpu_without_room_for_staging_memory_is_no_error(cuda, monkeypatch, stage_bytes):
    """An engine leaves as little as its settings say; it would not start without 195 MiB."""
    monkeypatch.setattr(stream_copier, "LEAST_STAGE_BYTES", 1000)
    tables = 2 * TABLES * 3 * 8 * (stage_bytes // 512)
    cuda.device_bytes = 2 * STAGES * stage_bytes + tables if stage_bytes else 1000
    with copying(num_slots=80, stage_bytes=40_000) as (copier, caches, layout):
        stats = copier.stats()
        assert stats["stage_bytes"] == stage_bytes
        assert stats["groups"] == ("staged" if stage_bytes else "direct")
        assert stats["why_not_stage_bytes"].startswith("the GPU has no memory left for ")
        store_and_load(copier, caches, layout.moves(GPULoadStoreSpec([5, 9]), [0, 4]), [5, 9])


def test_a_copier_that_cannot_be_made_leaves_no_memory_pinned(cuda, monkeypatch):
    """Memory that is freed while it is registered makes the next registration there fail."""

    def refuse(device):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(CudaDevice, "new_stream", refuse)
    caches = make_caches([(512, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    with pytest.raises(RuntimeError, match="illegal"):
        StreamCopier(caches, slab, layout, CudaDevice(caches, slab, triton=False))
    assert not cuda.registered
    assert not [t for t in threading.enumerate() if t.name == "kvoffload-pin"]


@pytest.mark.parametrize("made_under_inference", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_caches_made_under_inference_mode_are_loaded(cuda, direct_page_bytes, made_under_inference):
    """Torch refuses to write to such a tensor outside that mode, which is one of a thread."""
    with torch.inference_mode():
        caches = make_caches([(512, 0), (4096, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    with torch.inference_mode(made_under_inference):
        device = CudaDevice(caches, slab)
        copier = StreamCopier(caches, slab, layout, device, direct_page_bytes=direct_page_bytes)
    try:
        moves = layout.moves(GPULoadStoreSpec([5, 9, 2]), [0, 4, 6])
        store_and_load(copier, caches, moves, [5, 9, 2])
    finally:
        copier.close()
