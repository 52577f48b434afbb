"""Loads from a server's memory into a GPU: pinned to be read, and let go before it is unmapped."""

import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_stand_in import install

from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from kvoffload.transfer.base import CopiesFromAnywhere
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.lender import Lender

PORTION = 3 * 4096
PAGE, BLOCKS, CHUNKS = 1024, 32, 20


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch.setattr, PORTION)


class Parts:
    """A copier, and memory of a server as large as its own."""

    def __init__(self, **how):
        tensors = [torch.zeros((BLOCKS, PAGE), dtype=torch.int8) for _ in range(3)]
        self.caches = CanonicalKVCaches(
            tuple(CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors),
            (tuple(CanonicalKVCacheRef(i, PAGE) for i in range(3)),),
        )
        self.layout = ChunkLayout(self.caches, 2)
        slab = Slab(CHUNKS, self.layout.slot_bytes)
        self.device = CudaDevice(self.caches, slab)
        self.copier = StreamCopier(self.caches, slab, self.layout, self.device, **how)
        self.lender = Lender(slab.num_bytes)

    def load(self, *chunks):
        self.lender.load(self.copier, self.layout, self.caches, chunks)

    def lent_bytes(self, cuda):
        """Bytes of the server's memory that are registered."""
        address = np.frombuffer(self.lender.memory.bytes, np.int8).ctypes.data
        return cuda.registered_within(address, len(self.lender.written))


@pytest.fixture
def make():
    made = []

    def new(**how):
        made.append(Parts(**how))
        return made[-1]

    yield new
    for parts in made:
        parts.copier.close()
        if parts.lender.memory is not None:
            parts.lender.memory.leave()
        parts.lender.theirs.close()


@pytest.mark.parametrize("why", ["", "the driver is of CUDA 12.4"])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_every_byte_arrives_and_the_memory_is_pinned_once(
    cuda, make, until, why, direct_page_bytes
):
    cuda.why_no_batches = why
    parts = make(direct_page_bytes=direct_page_bytes, stage_bytes=20000)
    assert isinstance(parts.copier, CopiesFromAnywhere)
    parts.load(3, 0, 7)  # perhaps before it is pinned
    until(lambda: parts.lent_bytes(cuda) == len(parts.lender.written))
    parts.load(19, 4, 5, 6)
    assert bool(cuda.batches) is not bool(why)


@pytest.mark.parametrize("left_first", [True, False])
def test_memory_that_is_left_is_unpinned_and_then_unmapped(cuda, make, until, left_first):
    """Unmapped first, the driver would keep pages of an address that has another use by then."""
    parts = make()
    parts.load(3, 0)
    until(lambda: parts.lent_bytes(cuda) == len(parts.lender.written))
    address = np.frombuffer(parts.lender.memory.bytes, np.int8).ctypes.data
    if left_first:
        parts.lender.memory.leave()
        assert parts.lender.theirs.recv(1) == b""  # the server is told
    else:
        parts.copier.close()
        parts.lender.memory.leave()
    until(lambda: not cuda.registered_within(address, len(parts.lender.written)))
    parts.lender.memory = None
    until(lambda: f"{address:x}-" not in Path("/proc/self/maps").read_text())


def test_memory_is_not_unpinned_while_a_loan_of_it_lasts(cuda, make, until):
    parts = make()
    parts.load(1)
    until(lambda: parts.lent_bytes(cuda) == len(parts.lender.written))
    loan = parts.lender.memory.borrow([0], [0], int)
    parts.lender.memory.leave()
    parts.load(2)
    assert parts.lent_bytes(cuda) == len(parts.lender.written)
    loan.end()
    until(lambda: not parts.lent_bytes(cuda))


def test_memory_that_cannot_be_pinned_is_read_all_the_same_and_told(cuda, make, caplog, until):
    parts = make()
    until(lambda: parts.device.slab.is_settled(CHUNKS * parts.layout.slot_bytes))
    cuda.refuse_after = sum(cuda.registered.values()) + PORTION
    parts.load(3, 0)
    until(lambda: "the server's memory: only 12.0 KiB of" in caplog.text)
    parts.load(0, 1, 2, 19)


def test_batches_that_the_lent_memory_refuses_are_still_made_of_the_slab(cuda, make, until):
    parts = make(direct_page_bytes=1)
    until(lambda: parts.device.slab.is_settled(CHUNKS * parts.layout.slot_bytes))
    parts.load(1)
    until(lambda: parts.lent_bytes(cuda) == len(parts.lender.written))
    cuda.batch_error = RuntimeError("cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE (1)")
    parts.load(3, 0, 7)
    cuda.batch_error = None
    made = len(cuda.batches)
    parts.load(3, 0, 7)
    assert len(cuda.batches) == made
    moves = parts.layout.moves(GPULoadStoreSpec([5, 9]), [4])
    assert parts.copier.launch(moves, True, parts.copier.record_fence()).wait(10)
    assert len(cuda.batches) > made
    assert parts.copier.stats()["copies"] == "batched"


def test_chunks_that_are_not_within_the_memory_are_refused(cuda, make):
    parts = make()
    memory, layout = parts.lender.memory, parts.layout
    for start in (-4096, len(parts.lender.written) - 4096):
        moves = layout.moves(GPULoadStoreSpec([5, 9]), [start])
        with pytest.raises(ValueError, match=f"chunks at .{start}"):
            parts.copier.launch_from(memory, moves, parts.copier.record_fence())


def test_a_copier_that_is_closed_while_memory_is_being_pinned_ends(cuda, make, monkeypatch):
    registers, goes_on, register = threading.Event(), threading.Event(), cuda.register
    parts = make()

    def slowly(address, *given):
        registers.set()
        assert goes_on.wait(60)
        return register(address, *given)

    monkeypatch.setattr(cuda, "register", slowly)
    parts.load(3)
    assert registers.wait(10)
    threading.Timer(0.1, goes_on.set).start()
    with closing(parts.copier):
        pass
    assert not cuda.registered
