"""Every call of the CUDA device, on a stand-in for ``torch.cuda``."""

import sys
import threading
import types

import numpy as np
import pytest
import torch
from cuda_stand_in import FakeCuda, OnCpu, fake_bindings, install

from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from kvoffload.transfer.cuda.device import Run
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice, CudaStream
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

NUM_BLOCKS = 32
PORTION = 3 * 4096


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch.setattr, PORTION)


def make_caches(pages):
    tensors, refs = [], []
    for page, padding in pages:
        raw = torch.randint(-128, 127, (NUM_BLOCKS, page + padding), dtype=torch.int8)
        refs.append(CanonicalKVCacheRef(len(tensors), page))
        tensors.append(CanonicalKVCacheTensor(raw[:, :page], page))
    return CanonicalKVCaches(tuple(tensors), (tuple(refs),))


@pytest.mark.parametrize("driver", [None, 12040, 12080, 13000])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_chunks_go_and_come_back_every_way(cuda, monkeypatch, driver, direct_page_bytes, until):
    if driver is None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    else:
        package = types.ModuleType("cuda.bindings")
        package.runtime = fake_bindings(cuda, driver)
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    caches = make_caches([(512, 0), (24, 40), (4096, 0)])
    layout = ChunkLayout(caches, 3)
    slab = Slab(12, layout.slot_bytes)
    device = CudaDevice(caches, slab, triton=False)
    copier = StreamCopier(
        caches,
        slab,
        layout,
        device,
        stage_bytes=20000,
        direct_page_bytes=direct_page_bytes,
    )
    try:
        before = [entry.tensor.clone() for entry in caches.tensors]
        blocks = np.random.default_rng(0).permutation(NUM_BLOCKS)[:25]
        moves = layout.moves(GPULoadStoreSpec(blocks, [25], [2]), list(range(9)))
        fence = copier.launch(moves, True, copier.record_fence())
        assert fence.wait(10)
        assert fence.error is None
        for entry in caches.tensors:
            entry.tensor[blocks] = 0
        fence = copier.launch(moves, False, copier.record_fence())
        assert fence.wait(10)
        assert fence.error is None
        assert all(torch.equal(e.tensor, b) for e, b in zip(caches.tensors, before, strict=True))
        until(lambda: copier.stats()["pinned_bytes"] == slab.num_bytes)
        stats = copier.stats()
        assert stats["copies"] == ("batched" if driver in (12080, 13000) else "one by one")
        assert stats["groups"] == ("direct" if direct_page_bytes == 1 else "staged")
        assert sum(cuda.registered.values()) == slab.num_bytes
        if driver == 12040:
            assert stats["why_not_copies"] == "the driver is of CUDA 12.4"
    finally:
        copier.close()
    assert not cuda.registered


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_one_by_one_does_not_cross_two_registrations_either(cuda, monkeypatch, to_host):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    slab = Slab(8, 4096)
    device = CudaDevice(make_caches([(512, 0)]), slab, triton=False)
    here = torch.randint(-128, 127, (2 * PORTION,), dtype=torch.int8)
    run = Run(here, 7, PORTION - 100, PORTION + 200)
    there = torch.from_numpy(slab.flat)[run.host_at :][: run.num_bytes]
    there.fill_(1)
    try:
        with OnCpu(cuda):
            device.copy(CudaStream(FakeCuda.Stream()), [run], to_host)
        assert torch.equal(here[7:][: run.num_bytes], there)
        assert to_host is bool((there != 1).any())
    finally:
        device.close()


def test_batches_that_are_refused_are_copied_one_by_one(cuda, monkeypatch):
    package = types.ModuleType("cuda.bindings")
    package.runtime = fake_bindings(cuda, 13000)
    package.runtime.cudaMemcpyBatchAsync = lambda *a: (801,)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    caches = make_caches([(512, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    copier = StreamCopier(caches, slab, layout, CudaDevice(caches, slab, triton=False))
    try:
        moves = layout.moves(GPULoadStoreSpec([5, 9, 2]), [0, 4, 6])
        assert copier.launch(moves, True, copier.record_fence()).wait(10)
        assert np.array_equal(slab.rows[4][:512], caches.tensors[0].tensor[9].numpy())
        assert copier.stats()["copies"] == "one by one"
        assert "801" in copier.stats()["why_not_copies"]
    finally:
        copier.close()


def use_bindings(monkeypatch, cuda, version=13000):
    """Put a stand-in for cuda-bindings in place; returns its ``runtime``."""
    package = types.ModuleType("cuda.bindings")
    package.runtime = fake_bindings(cuda, version)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return package.runtime


def test_batches_that_the_other_direction_gave_up_meanwhile_are_told_with_their_reason(
    cuda, monkeypatch
):
    """Both directions fail at once: one reads the attribute that the other has just set to None."""
    use_bindings(monkeypatch, cuda)
    caches = make_caches([(512, 0)])
    slab = Slab(8, 4096)
    device = CudaDevice(caches, slab, triton=False)
    reads = [device._batches]
    device._batches = None
    device._why_not["copies"] = "the reason"

    class Racing(CudaDevice):
        @property
        def _batches(self):
            return reads.pop() if reads else None

    device.__class__ = Racing
    here = torch.ones(512, dtype=torch.int8)
    try:
        runs = [Run(here, 0, 0, 256), Run(here, 256, 4096, 256)]
        device.copy(CudaStream(FakeCuda.Stream()), runs, True)
        assert device.stats()["why_not_copies"] == "the reason"
        assert slab.rows[1][:256].all()
    finally:
        device.close()


def test_memory_that_is_not_pinned_does_not_end_batches_of_what_is(cuda, monkeypatch, until):
    runtime = use_bindings(monkeypatch, cuda)
    cuda.refuse_after = PORTION
    caches = make_caches([(512, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    copier = StreamCopier(caches, slab, layout, CudaDevice(caches, slab, triton=False))
    try:
        until(lambda: "why_not_pinned" in copier.stats())
        for slots in ([0, 2, 7, 5], [2, 0, 4, 6]):
            moves = layout.moves(GPULoadStoreSpec([5, 9, 2, 1]), slots)
            fence = copier.launch(moves, True, copier.record_fence())
            assert fence.wait(10)
            assert fence.error is None
            for slot, block in zip(slots, [5, 9, 2, 1], strict=True):
                expected = caches.tensors[0].tensor[block].numpy()
                assert np.array_equal(slab.rows[slot][:512], expected)
        assert copier.stats()["copies"] == "batched"
        assert runtime.calls == 2
    finally:
        copier.close()


def test_memory_is_unpinned_on_the_thread_that_pinned_it(cuda, monkeypatch, caplog):
    """CUDA keeps each thread's last error: torch's next kernel on the engine's would raise it."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    threads = []
    monkeypatch.setattr(
        cuda, "cudaHostUnregister", lambda address: threads.append(threading.current_thread()) or 1
    )
    slab = Slab(8, 4096)
    device = CudaDevice(make_caches([(512, 0)]), slab, triton=False)
    device.close()
    assert {thread.name for thread in threads} <= {"kvoffload-pin"}
    assert len(threads) == len(cuda.registered) > 0
    assert "could not be unpinned" in caplog.text
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("missing", ["pci_domain_id", "pci_bus_id", "pci_device_id"])
def test_a_torch_that_does_not_tell_where_the_gpu_is_will_do(cuda, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    known = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    del known[missing]
    properties = types.SimpleNamespace(**known)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    CudaDevice(make_caches([(512, 0)]), Slab(8, 4096), triton=False).close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_told(cuda, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda.refuse_after = 5 * 4096
    caches = make_caches([(512, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    copier = StreamCopier(caches, slab, layout, CudaDevice(caches, slab, triton=False))
    try:
        moves = layout.moves(GPULoadStoreSpec([5, 9, 2]), [0, 4, 7])
        assert copier.launch(moves, True, copier.record_fence()).wait(10)
        assert copier.stats()["pinned_bytes"] == 3 * 4096
    finally:
        copier.close()
    assert "only 12.0 KiB of 32.0 KiB could be pinned" in caplog.text
    assert "RLIMIT_MEMLOCK is" in caplog.text
    assert not cuda.registered


def test_a_copier_that_cannot_be_made_leaves_no_memory_pinned(cuda, monkeypatch):
    """Memory that is freed while it is registered makes the next registration there fail."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)

    def refuse(device, num_bytes):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CudaDevice, "new_stage", refuse)
    caches = make_caches([(512, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        StreamCopier(caches, slab, layout, CudaDevice(caches, slab, triton=False))
    assert not cuda.registered
    assert not [t for t in threading.enumerate() if t.name == "kvoffload-pin"]


@pytest.mark.parametrize("made_under_inference", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_caches_made_under_inference_mode_are_loaded(
    cuda, monkeypatch, direct_page_bytes, made_under_inference
):
    """Torch refuses to write to such a tensor outside that mode, which is one of a thread."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with torch.inference_mode():
        caches = make_caches([(512, 0), (4096, 0)])
    layout = ChunkLayout(caches, 1)
    slab = Slab(8, layout.slot_bytes)
    with torch.inference_mode(made_under_inference):
        device = CudaDevice(caches, slab, triton=False)
        copier = StreamCopier(caches, slab, layout, device, direct_page_bytes=direct_page_bytes)
    try:
        before = [entry.tensor.clone() for entry in caches.tensors]
        moves = layout.moves(GPULoadStoreSpec([5, 9, 2]), [0, 4, 6])
        for to_host in (True, False):
            fence = copier.launch(moves, to_host, copier.record_fence())
            assert fence.wait(10)
            assert fence.error is None
            with torch.inference_mode():
                for entry in caches.tensors if to_host else ():
                    entry.tensor.zero_()
        for entry, expected in zip(caches.tensors, before, strict=True):
            assert torch.equal(entry.tensor[[5, 9, 2]], expected[[5, 9, 2]])
    finally:
        copier.close()
