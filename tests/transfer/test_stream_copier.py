"""What the copier enqueues, and when: seen on a device that stands still until it is told to go."""

import numpy as np
import pytest
import torch
from opcodes import count_opcodes

from benchmarks.harness import caches_of
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cuda import direction, stream_copier
from kvoffload.transfer.cuda.copy_plan import CopyPlan
from kvoffload.transfer.cuda.fences import EngineFence, StreamFence
from kvoffload.transfer.cuda.stream_copier import Launcher, StreamCopier, StreamJob
from kvoffload.transfer.cuda.torch_device import CudaDevice, CudaEvent, CudaStream
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.interleavings import NUM_SLOTS, PER_CHUNK, small_caches, words
from tests.support.late_device import LateDevice
from tests.support.moves import move, moves_of

GIB = 1 << 30


class Parts:
    """A copier on a simulated device that runs nothing before it is told to."""

    def __init__(
        self, device_type=LateDevice, caches=None, slots=NUM_SLOTS, per_chunk=PER_CHUNK, **how
    ):
        self.caches = caches or small_caches()
        self.layout = ChunkLayout(self.caches, per_chunk)
        self.slab = Slab(slots, self.layout.slot_bytes)
        self.device = device_type(self.caches, self.slab, 1)
        self.copier = StreamCopier(self.caches, self.slab, self.layout, self.device, **how)

    def launch(self, moves, to_host):
        return self.copier.launch(moves, to_host, self.copier.record_fence())

    def enqueued(self, until, fence):
        """Wait until the launching thread has done its part."""
        until(lambda: fence._events is not None)

    def run_lanes(self):
        """Run what the engine's work does not delay; the engine stands still."""
        with self.device.lock:
            while any(
                lane.step() for lane in self.device.streams if lane is not self.device.engine
            ):
                pass


@pytest.fixture
def make(monkeypatch, closing):
    # The simulated device computes what it copies: on busy cores that takes seconds.
    monkeypatch.setattr(stream_copier, "CLOSE_TIMEOUT_S", 120.0)

    def make(*given, **how):
        parts = Parts(*given, **how)
        closing(parts.copier)
        return parts

    return make


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_a_transfer_into_slots_that_are_not_pinned_yet_lets_others_pass(
    make, to_host, direct_page_bytes
):
    """Pinning takes a minute after the start; loads of pinned slots need not wait for it."""
    parts = make(direct_page_bytes=direct_page_bytes, stage_bytes=1000)
    slot_bytes = parts.slab.slot_bytes
    parts.device.slab.pinned_bytes = 3 * slot_bytes
    late = [parts.launch(moves_of(move(0, [1]), move(3 + i, [2, 3])), to_host) for i in range(3)]
    for way in (True, False):
        other = parts.launch(moves_of(move(2, [5, 6])), way)
        assert ends(other)
        assert other.error is None
    assert all(fence._events is None for fence in late)
    parts.device.slab.pinned_bytes = 4 * slot_bytes
    assert ends(late[0])
    assert late[1]._events is late[2]._events is None
    parts.copier.close()
    assert all(fence.done() and fence.error is None for fence in late)


def passes(blocks, found):
    """A forward pass that reads these blocks."""

    def run():
        found.extend(page.clone() for block in blocks for page in block)

    return run


def test_a_staged_load_uses_the_bus_during_the_forward_pass_but_writes_no_block(make, until):
    """The bus would stand idle for a whole pass; only the scatter must wait."""
    parts = make(stage_bytes=1000)
    parts.slab.rows[3][:] = 7
    found = []
    parts.device.engine.enqueue(passes([words(parts.caches, 5)], found))
    fence = parts.launch(moves_of(move(3, [5, 6])), to_host=False)
    parts.enqueued(until, fence)
    parts.run_lanes()
    assert not found
    staged = sum(int((stage == 7).sum()) for stage in parts.device._stages)
    assert staged >= 1000  # in the first lanes; the noise has sevens too
    assert not any(page.any() for page in words(parts.caches, 5))
    fence.wait()
    assert not any(page.any() for page in found)
    assert all((page.view(torch.int8) == 7).all() for page in words(parts.caches, 5))


def test_the_fence_is_on_the_stream_that_the_engine_uses_at_the_time(make, until):
    parts = make()
    default, side = parts.device.engine, parts.device.new_stream()
    parts.device.engine = side
    side.enqueue(lambda: words(parts.caches, 5)[0].fill_(9))
    fence = parts.launch(moves_of(move(3, [5, 6])), True)
    default.enqueue(lambda: pytest.fail("work of a stream that the engine does not use"))
    parts.device.streams.remove(default)
    fence.wait()
    assert (parts.slab.rows[3][:8].view(np.int64) == 9).all()


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_a_copier_closed_while_copies_run_lets_them_end_first(make, to_host, direct_page_bytes):
    """The slab is unpinned and freed next: a copy that still ran would write foreign memory."""
    parts = make(direct_page_bytes=direct_page_bytes, stage_bytes=1000)
    for slot in range(NUM_SLOTS):
        parts.slab.rows[slot][:] = slot
        for block in (2 * slot, 2 * slot + 1):
            for page in words(parts.caches, block):
                page.view(torch.int8).fill_(NUM_SLOTS + slot)
    fences = [
        parts.launch(moves_of(move(slot, [2 * slot, 2 * slot + 1])), to_host)
        for slot in range(NUM_SLOTS)
    ]
    parts.copier.close()
    assert parts.device.is_closed
    assert not any(stream.work for stream in parts.device.streams)
    assert all(fence.done() and fence.error is None for fence in fences)
    for slot in range(NUM_SLOTS):
        copied = NUM_SLOTS + slot if to_host else slot
        assert (parts.slab.rows[slot][: 2 * 1344] == copied).all()
        assert all(
            (page.view(torch.int8) == copied).all() for page in words(parts.caches, 2 * slot)
        )


def test_a_copier_is_closed_when_the_kernels_of_loads_have_ended(make):
    """They read staging memory, and write the engine's blocks."""
    for seed in range(20):
        parts = make(lambda *given, seed=seed: LateDevice(*given[:2], seed))
        parts.slab.rows[3][:] = 7
        parts.launch(moves_of(move(3, [5, 6])), to_host=False)
        parts.copier.close()
        assert all((page.view(torch.int8) == 7).all() for page in words(parts.caches, 5))


def mixed_caches():
    """Two groups: of small pages, which are staged, and of large ones, which are not."""
    return caches_of(*([torch.zeros((32, size), dtype=torch.int8)] for size in (64, 4096)))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("late", ["staged", "direct"])
@pytest.mark.parametrize("seed", range(5))
def test_staged_and_direct_pages_of_one_load_both_wait_for_the_engine(order, late, seed):
    """Whichever of the two comes first: the other must not take its wait for its own."""
    caches = mixed_caches()
    caches = type(caches)(caches.tensors, caches.group_data_refs[::order])
    layout = ChunkLayout(caches, 1)
    slab = Slab(16, layout.slot_bytes)
    device = LateDevice(caches, slab, seed)
    copier = StreamCopier(caches, slab, layout, device, direct_page_bytes=1024, stage_bytes=256)
    slab.rows[:] = 7
    tensor = caches.tensors[late == "direct"].tensor
    found = []
    for block in range(16):
        device.engine.enqueue(lambda block=block: found.append(int(tensor[block].sum())))
    moves = layout.moves(GPULoadStoreSpec(range(16), (8, 8), (0, 0)), list(range(16)))
    load = copier.launch(moves, False, copier.record_fence())
    assert ends(load)
    assert load.error is None
    copier.close()
    assert found == [0] * 16
    of_group = slice(0, 8) if (late == "staged") == (order == 1) else slice(8, 16)
    assert (tensor[of_group] == 7).all()


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_a_large_store_that_waits_for_the_forward_pass_does_not_hold_up_a_load(
    make, monkeypatch, direct_page_bytes
):
    """The load was submitted before that pass began; its chunks came from a tier only now."""
    monkeypatch.setattr(direction, "TABLES", 2)
    parts = make(direct_page_bytes=direct_page_bytes, stage_bytes=1000)
    device, early = parts.device, parts.copier.record_fence()
    parts.slab.rows[NUM_SLOTS - 1][:] = 7

    def stand_still():
        device.engine.work.appendleft(stand_still)

    device.engine.enqueue(stand_still)
    chunks = [move(slot, [2 * slot, 2 * slot + 1]) for slot in range(NUM_SLOTS - 1)]
    store = parts.launch(moves_of(*chunks), True)
    load = parts.copier.launch(moves_of(move(NUM_SLOTS - 1, [20, 21])), False, early)
    assert ends(load)
    assert load.error is None
    assert all((page.view(torch.int8) == 7).all() for page in words(parts.caches, 20))
    assert not store.done()
    with device.lock:
        device.engine.work.remove(stand_still)
    assert ends(store)


@pytest.mark.parametrize("asks", ["before", "after"])
def test_a_call_at_the_end_of_a_copy_is_made_though_no_thread_polls_the_fence(make, until, asks):
    """A load that takes turns in slots goes on by such a call: without it nothing would."""
    parts = make()
    called = []
    if asks == "before":
        parts.device.lock.acquire()
    fence = parts.launch(moves_of(move(3, [5, 6])), True)
    if asks == "before":
        fence.when_reached(lambda: called.append(1))
        parts.device.lock.release()
    else:
        parts.enqueued(until, fence)
        fence.when_reached(lambda: called.append(1))
    until(lambda: called)
    assert (called, fence.error) == ([1], None)


class Slow(LateDevice):
    """A device whose copies take an hour of its own time."""

    def copy(self, stream, copies, to_host, memory):
        super().copy(stream, copies, to_host, memory)

        def last():
            stream.clock_s += 3600

        stream.enqueue(last)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_the_time_of_a_transfer_is_without_that_of_the_transfers_before_it(
    make, to_host, direct_page_bytes
):
    parts = make(Slow, direct_page_bytes=direct_page_bytes)
    fences = [
        parts.launch(moves_of(move(slot, [2 * slot, 2 * slot + 1])), to_host) for slot in range(4)
    ]
    assert all(ends(fence) for fence in fences)
    assert all(3600 <= fence.copy_time_s < 7200 for fence in fences)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_the_time_of_loads_is_without_their_wait_for_one_forward_pass(
    make, slots, direct_page_bytes
):
    """The kernels of a load wait behind those of the load before it, which wait for the pass."""
    parts = make(Slow, direct_page_bytes=direct_page_bytes)
    engine = parts.device.engine

    def passes():
        engine.clock_s += 100 * 3600

    engine.enqueue(passes)
    fences = [
        parts.launch(moves_of(move(slot, [2 * slot, 2 * slot + 1])), False) for slot in range(slots)
    ]
    assert all(ends(fence) for fence in fences)
    assert all(3600 <= fence.copy_time_s < 7200 for fence in fences)


@pytest.mark.parametrize("pass_hours", [0, 1.5, 100])
def test_the_time_of_a_load_has_all_its_copies_also_those_during_the_forward_pass(make, pass_hours):
    """Some run while the first kernel waits for the pass."""
    parts = make(Slow, stage_bytes=2 * 1344)  # a chunk
    engine = parts.device.engine

    def passes():
        engine.clock_s += pass_hours * 3600

    engine.enqueue(passes)
    fence = parts.launch(
        moves_of(*(move(slot, [2 * slot, 2 * slot + 1]) for slot in range(6))), False
    )
    assert ends(fence)
    assert 6 * 3600 <= fence.copy_time_s < 7 * 3600


class Idle(LateDevice):
    """A device that notes whether copies were left when it was closed."""

    copies_left = None

    def close(self):
        self.copies_left = any(stream.work for stream in self.streams)
        super().close()


def test_without_the_last_fence_host_memory_is_given_up_under_copies(make, monkeypatch):
    assert_left = {}
    for fenced in (True, False):
        with monkeypatch.context() as patched:
            if not fenced:
                patched.setattr(Launcher, "fence_close", lambda launcher: None)
            parts = make(Idle)
            parts.launch(moves_of(move(3, [5, 6])), True)
            parts.copier.close()
            assert_left[fenced] = parts.device.copies_left
    assert assert_left == {True: False, False: True}


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 30])
def test_blocks_beyond_two_gib_of_a_tensor_come_back(make, direct_page_bytes):
    """Places in such tensors do not fit 32 bits. The pages between are never touched."""
    page, num_blocks = 1 << 20, 5 << 10
    tensor = torch.empty((num_blocks, page), dtype=torch.int8)
    assert tensor.nbytes == 5 * GIB
    how = {"slots": 4, "per_chunk": 1, "direct_page_bytes": direct_page_bytes}
    parts = make(caches=caches_of([tensor]), **how)
    blocks = [num_blocks - 1, 2 << 10, (2 << 10) - 1, 0]
    for block in blocks:
        tensor[block] = block % 100 + 1
    moves = parts.layout.moves(GPULoadStoreSpec(blocks), [2, 0, 3, 1])
    for to_host in (True, False):
        assert ends(parts.launch(moves, to_host))
        for block in blocks if to_host else ():
            tensor[block] = 0
    assert parts.slab.rows[:, ::4096].tolist() == [
        [block % 100 + 1] * 256 for block in (2 << 10, 0, num_blocks - 1, (2 << 10) - 1)
    ]
    assert all((tensor[block] == block % 100 + 1).all() for block in blocks)


class Still:
    """A device that does nothing: what is counted is the launching thread's own Python."""

    def __getattr__(self, name):
        kinds = CudaDevice, CudaStream, CudaEvent
        assert name == "slab" or any(hasattr(kind, name) for kind in kinds), name
        return lambda *given, **named: self

    def new_stage(self, num_bytes):
        return torch.empty(0)

    def new_tables(self, count, num_blocks):
        return LateDevice.new_tables(self, count, num_blocks)

    def move(self, *given, **named):
        self.portions += 1

    portions = 0


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_a_transfer_of_one_step_has_no_pause_before_its_end(
    make, monkeypatch, to_host, direct_page_bytes
):
    """Its end is marked with its copies: a pause between them would delay each single chunk."""
    monkeypatch.setattr(stream_copier, "PAUSE_S", 3600.0)
    parts = make(direct_page_bytes=direct_page_bytes)
    assert ends(parts.launch(moves_of(move(3, [5, 6])), to_host))


@pytest.mark.parametrize("to_host", [True, False])
def test_a_staged_portion_takes_the_same_steps_however_many_chunks_it_has(to_host):
    pages, chunks = [64] * 8, 8000
    caches = caches_of([torch.zeros((chunks, page), dtype=torch.int8) for page in pages])
    layout = ChunkLayout(caches, 1)
    device = Still()
    launcher = Launcher(device, CopyPlan(caches, layout, 24 << 20, 1 << 20))

    def steps(count):
        """Opcodes of a portion."""
        blocks = np.random.default_rng(0).permutation(chunks)[:count]
        moves = layout.moves(GPULoadStoreSpec(blocks), blocks)
        fences = EngineFence(device), StreamFence(launcher.watch, launcher.tell_late)
        job = StreamJob(moves, layout.slot_bytes, device.slab, to_host, *fences)
        device.portions = 0
        count = count_opcodes(lambda: list(launcher._launch(job)), "kvoffload/transfer")
        return count, device.portions

    try:
        (few, one), (many, portions) = steps(8), steps(chunks)
    finally:
        assert launcher.end(10)
    assert (one, portions) == (1, 2)
    assert many / portions <= few
