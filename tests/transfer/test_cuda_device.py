"""What can be seen of the CUDA device without one: every call on the way, on a stand-in for torch.

The stand-in does at once, on the CPU, what the calls ask for, and refuses what CUDA would refuse:
copies that cross the end of a registered range. Ordering is not seen here (test_streams.py), nor
that a GPU does the same (tests/gpu).
"""

import contextlib
import ctypes
import sys
import types

import numpy as np
import pytest
import torch

from kvoffload.core.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvoffload.core.transfers import GPULoadStoreSpec
from kvoffload.transfer import cuda_device, pinning
from kvoffload.transfer.cuda_device import CudaDevice
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from kvoffload.transfer.stream_copier import StreamCopier

NUM_BLOCKS = 32


class FakeCuda:
    """Stands in for ``torch.cuda``; registered ranges are those of ``cudaHostRegister``."""

    def __init__(self):
        self.registered = {}
        self.refuse_after = 1 << 60

    class Event:
        def __init__(self, blocking=False):
            assert blocking, "waiting for it would spin"

        def record(self, stream):
            pass

        def query(self):
            return True

        def synchronize(self):
            pass

    class Stream:
        cuda_stream = 4711

        def __init__(self, device, priority):
            pass

        def wait_event(self, event):
            assert isinstance(event, FakeCuda.Event)

    def cudart(self):
        return self

    def cudaHostRegister(self, address, length, flags):
        assert flags == 1
        assert address % 4096 == 0
        if sum(self.registered.values()) + length > self.refuse_after:
            return 2
        assert address not in self.registered
        self.registered[address] = length
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error):
        return "out of memory"

    def check_within_one(self, address, length):
        assert any(
            start <= address and address + length <= start + size
            for start, size in self.registered.items()
        ), "crosses the end of a registered range"


def fake_bindings(cuda, version):
    """``cuda.bindings.runtime`` as of a CUDA version, with the signature all of them have."""
    runtime = types.ModuleType("cuda.bindings.runtime")
    runtime.cudaDriverGetVersion = lambda: (0, version)
    runtime.cudaDeviceAttr = types.SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem=91)
    runtime.cudaDeviceGetAttribute = lambda attribute, device: (0, 1)
    runtime.cudaMemcpyAttributes = types.SimpleNamespace
    runtime.cudaMemcpySrcAccessOrder = types.SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
    runtime.calls = 0

    def batch(dsts, srcs, sizes, count, attrs, indices, num_attrs, stream):
        assert stream == FakeCuda.Stream.cuda_stream
        assert (len(dsts), len(srcs), len(sizes)) == (count, count, count)
        assert (attrs[0].srcAccessOrder, indices, num_attrs) == (1, [0], 1)
        runtime.calls += 1
        for target, source, size in zip(dsts, srcs, sizes, strict=True):
            host = (
                target if any(s <= target < s + n for s, n in cuda.registered.items()) else source
            )
            cuda.check_within_one(host, size)
            ctypes.memmove(target, source, size)
        return (0,) if version >= 13000 else (0, None)

    runtime.cudaMemcpyBatchAsync = batch
    return runtime


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(cuda_device, "_cuda", fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeCuda.Stream(0, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a stand-in")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0),
    )
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(pinning, "PORTION_BYTES", 3 * 4096)
    monkeypatch.setattr(pinning.Pinning.__init__, "__defaults__", (None, 3 * 4096), raising=True)
    return fake


def make_caches(pages):
    tensors, refs = [], []
    for page, padding in pages:
        raw = torch.randint(-128, 127, (NUM_BLOCKS, page + padding), dtype=torch.int8)
        refs.append(CanonicalKVCacheRef(len(tensors), page))
        tensors.append(CanonicalKVCacheTensor(raw[:, :page], page))
    return CanonicalKVCaches(tuple(tensors), (tuple(refs),))


@pytest.mark.parametrize("driver", [None, 12040, 12080, 13000])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
@pytest.mark.parametrize("layers", [(), ((2,), (1, 0))])
def test_chunks_go_and_come_back_every_way(
    cuda, monkeypatch, driver, direct_page_bytes, layers, until
):
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
        layers=layers,
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
        assert all(fence.wait_for_layer_load(layer) for layer in range(len(layers)))
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
