"""Loads from a server's memory into a GPU: pinned to be read, and let go before it is unmapped."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_stand_in import install

from benchmarks.harness import caches_of
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cuda import copy_plan, stream_copier, torch_device
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.lender import Lender

PORTION = 3 * 4096
PAGE, BLOCKS, CHUNKS = 1024, 32, 20


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch.setattr, PORTION)


class Parts:
    """A copier, and memory of a server as large as its own."""

    def __init__(self, used_chunks=CHUNKS, **how):
        self.caches = caches_of([torch.zeros((BLOCKS, PAGE), dtype=torch.int8) for _ in range(3)])
        self.layout = ChunkLayout(self.caches, 2)
        slab = Slab(CHUNKS, self.layout.slot_bytes)
        self.device = CudaDevice(self.caches, slab)
        self.copier = StreamCopier(self.caches, slab, self.layout, self.device, **how)
        self.lender = Lender(slab.num_bytes, used_chunks * self.layout.slot_bytes)

    def load(self, *chunks):
        self.lender.load(self.copier, self.layout, self.caches, chunks)

    def pin_all(self, cuda, until):
        self.load(CHUNKS - 1)
        until(lambda: self.lent_bytes(cuda) == len(self.lender.written))

    def lent_bytes(self, cuda):
        """Bytes of the server's memory that are registered."""
        address = np.frombuffer(self.lender.memory.bytes, np.int8).ctypes.data
        return cuda.registered_within(address, len(self.lender.written))


@pytest.fixture
def make(closing):
    def new(**how):
        parts = Parts(**how)
        closing(parts.lender)
        closing(parts.copier)
        return parts

    return new


@pytest.mark.parametrize("why", ["", "the driver is of CUDA 12.4"])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_every_byte_arrives_and_the_memory_is_pinned_once(
    cuda, make, until, why, direct_page_bytes
):
    cuda.why_no_batches = why
    parts = make(direct_page_bytes=direct_page_bytes, stage_bytes=20000)
    parts.load(3, 0, 7)  # perhaps before it is pinned
    parts.pin_all(cuda, until)
    parts.load(19, 4, 5, 6)
    assert bool(cuda.batches) is not bool(why)


def test_memory_that_the_server_has_not_used_yet_is_not_taken_from_the_system(cuda, make, until):
    """A read of it would take it too, and a container's limit would count it for this engine."""
    parts = make(used_chunks=4)
    parts.load(0)
    until(lambda: parts.lent_bytes(cuda) >= parts.layout.slot_bytes)
    parts.load(3)
    until(lambda: parts.lent_bytes(cuda) >= 4 * parts.layout.slot_bytes)
    assert parts.lent_bytes(cuda) < 4 * parts.layout.slot_bytes + PORTION
    used = os.fstat(parts.lender.fd).st_blocks * 512
    assert used < 4 * parts.layout.slot_bytes + PORTION


@pytest.mark.parametrize("why", ["pinning", "batches"])
def test_single_copies_of_lent_memory_are_enqueued_few_at_a_time(
    cuda, make, monkeypatch, until, why
):
    """A stream takes about a thousand calls. A further one blocks the launching thread."""
    monkeypatch.setattr(copy_plan, "FIRST_COPIES", 8)
    monkeypatch.setattr(stream_copier, "MOST_SINGLE_COPIES", 10)
    parts = make(direct_page_bytes=1)
    until(lambda: parts.device.slab.is_settled(CHUNKS * parts.layout.slot_bytes))
    if why == "pinning":
        cuda.refuse_after = sum(cuda.registered.values())
    else:
        parts.pin_all(cuda, until)
        cuda.batch_error = RuntimeError("cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE (1)")
        parts.load(3)
    copied, copy = [], CudaDevice.copy

    def noted(device, stream, copies, *given):
        copied.append(len(copies.sizes))
        copy(device, stream, copies, *given)

    monkeypatch.setattr(CudaDevice, "copy", noted)
    parts.load(*range(0, 16, 2))
    assert max(copied) <= 10


@pytest.mark.parametrize("left_first", [True, False])
def test_memory_that_is_left_is_unpinned_and_then_unmapped(cuda, make, until, left_first):
    """Unmapped first, the driver would keep pages of an address that has another use by then."""
    parts = make()
    parts.pin_all(cuda, until)
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


def test_memory_of_which_a_part_could_not_be_pinned_is_unmapped_all_the_same(cuda, make, until):
    """It is all that a server had, and that one may have ended."""
    parts = make()
    until(lambda: parts.device.slab.is_settled(CHUNKS * parts.layout.slot_bytes))
    cuda.refuse_after = sum(cuda.registered.values()) + PORTION
    address = np.frombuffer(parts.lender.memory.bytes, np.int8).ctypes.data
    parts.load(CHUNKS - 1)
    until(lambda: [each.error for each in parts.device._lent.values()] != [None])
    gc.disable()  # an engine's collector comes late
    try:
        parts.lender.memory.leave()
        parts.lender.memory = None
        until(lambda: f"{address:x}-" not in Path("/proc/self/maps").read_text())
    finally:
        gc.enable()


def test_memory_is_not_unpinned_while_a_loan_of_it_lasts(cuda, make, until):
    parts = make()
    parts.pin_all(cuda, until)
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
    until(lambda: not parts.copier.can_borrow())
    parts.lender.memory.leave()
    assert parts.copier.can_borrow()  # the next server's memory is tried


def test_batches_that_the_lent_memory_refuses_are_still_made_of_the_slab(cuda, make, until):
    parts = make(direct_page_bytes=1)
    until(lambda: parts.device.slab.is_settled(CHUNKS * parts.layout.slot_bytes))
    parts.pin_all(cuda, until)
    cuda.batch_error = RuntimeError("cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE (1)")
    parts.load(3, 0, 7)
    cuda.batch_error = None
    made = len(cuda.batches)
    parts.load(3, 0, 7)
    assert len(cuda.batches) == made
    moves = parts.layout.moves(GPULoadStoreSpec([5, 9]), [4])
    assert ends(parts.copier.launch(moves, True, parts.copier.record_fence()))
    assert len(cuda.batches) > made
    assert parts.copier.stats()["copies"] == "batched"


def test_chunks_that_are_not_within_the_memory_are_refused(cuda, make):
    parts = make()
    memory, layout = parts.lender.memory, parts.layout
    for start in (-4096, len(parts.lender.written) - 4096, (1 << 63) - 4096):
        moves = layout.moves(GPULoadStoreSpec([5, 9]), [start])
        with pytest.raises(ValueError, match=f"chunks at .{start}"):
            parts.copier.launch(moves, False, parts.copier.record_fence(), memory)


def test_memory_in_several_pieces_gets_the_time_of_one_to_be_unpinned(
    cuda, make, monkeypatch, until
):
    parts, goes_on, unregister = make(), threading.Event(), cuda.unregister
    parts.pin_all(cuda, until)
    monkeypatch.setattr(torch_device, "CLOSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(cuda, "unregister", lambda start: goes_on.wait(60) and unregister(start))
    waits, join = [], threading.Thread.join

    def noted(thread, timeout_s=None):
        if thread.name == "kvoffload-pin":
            waits.append(timeout_s)
        join(thread, timeout_s)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", noted)
        parts.copier.close()
    goes_on.set()
    assert len(waits) == 2
    assert sum(waits) < 0.4
    until(lambda: not cuda.registered)


@pytest.mark.parametrize("is_left", [True, False])
def test_memory_that_is_left_or_closed_while_it_is_being_pinned_is_unpinned(
    cuda, make, monkeypatch, until, is_left
):
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
    if is_left:
        parts.lender.memory.leave()
        until(lambda: goes_on.is_set() and not parts.device._lent and not parts.lent_bytes(cuda))
    parts.copier.close()
    assert not cuda.registered
