"""Copies through streams are fenced: a test removes each fence and finds other bytes."""

import random
import threading

import numpy as np
import pytest
import torch

from kvoffload.transfer.cuda import direction, stream_copier
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.direction import Direction
from kvoffload.transfer.cuda.stream_copier import Launcher, StreamCopier
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.interleavings import NUM_SLOTS, Interleaving, small_caches, small_parts, words
from tests.support.late_device import LateDevice
from tests.support.moves import move, moves_of

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS = 1000


class LateEngine:
    """Forward passes on the late device's engine stream."""

    def __init__(self, device, kv_caches):
        self.device, self.kv_caches = device, kv_caches

    def write(self, block, version):
        for page in words(self.kv_caches, block):
            self.device.engine.enqueue(lambda page=page: page.fill_(version))

    def read(self, block):
        found = []
        for page in words(self.kv_caches, block):
            self.device.engine.enqueue(lambda page=page: found.extend(page.tolist()))
        return lambda: sorted(set(found))

    def finish(self):
        self.device.run_all()


def run(seed, launcher=Launcher, **rules):
    """One interleaving on a new device; returns how much was compared."""
    draw = random.Random(seed)
    caches, layout, slab = small_parts()
    device = LateDevice(caches, slab, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream_copier, "Launcher", launcher)
        # From some batches in each transfer to one.
        patched.setattr(stream_copier, "BATCH_BYTES", draw.choice([300, 1 << 20]))
        copier = StreamCopier(
            caches,
            slab,
            layout,
            device,
            # From a chunk in three portions to all of it in one; sometimes nothing is staged.
            stage_bytes=draw.choice([16, 1000, 3000, 1 << 20]),
            direct_page_bytes=draw.choice([1, 1 << 20, 1 << 20]),
        )
        interleaving = Interleaving(
            copier, LateEngine(device, caches), slab, layout, seed=seed, **rules
        )
        try:
            interleaving.run()
        finally:
            copier.close()
    assert device.is_closed
    return interleaving.compared


@pytest.fixture
def parts():
    """Caches, device, and a copier of several portions a transfer."""
    caches, layout, slab = small_parts()
    device = LateDevice(caches, slab, seed=1)
    copier = StreamCopier(caches, slab, layout, device, stage_bytes=1000)
    yield caches, device, copier
    copier.close()


def launch(copier, slot, blocks, to_host=True):
    moves = moves_of(move(slot, blocks))
    return copier.launch(moves, to_host, copier.record_fence())


def test_a_copy_that_the_device_refuses_is_an_error_of_its_fence_alone(parts):
    caches, device, copier = parts
    device.failures.append(RuntimeError("out of something"))
    failed = launch(copier, 0, [1, 2])
    assert ends(failed)
    assert str(failed.error) == "out of something"
    for page in words(caches, 3):
        page.fill_(7)
    stored = launch(copier, 1, [3, 4])
    assert ends(stored)
    assert stored.error is None


def test_a_device_that_breaks_is_an_error_of_every_fence_and_nothing_hangs(parts):
    _, device, copier = parts

    def break_down():
        raise OSError("fell off the bus")

    before = launch(copier, 0, [1, 2])
    assert ends(before)
    device.engine.enqueue(break_down)
    fences = [launch(copier, slot, [slot, slot + 8]) for slot in range(1, 4)]
    for fence in fences:
        assert ends(fence)
        assert fence.done()
        assert "the device is broken" in str(fence.error)
    assert before.error is None


def test_copies_that_do_not_end_are_left_alone_when_the_copier_is_closed(monkeypatch, caplog):
    """All threads together get the time that one would; the device is not closed under them."""
    monkeypatch.setattr(stream_copier, "CLOSE_TIMEOUT_S", 0.2)
    ended = threading.Event()

    class Hanging(Launcher):
        def fence_close(self):
            assert ended.wait(60)
            super().fence_close()

    monkeypatch.setattr(stream_copier, "Launcher", Hanging)
    caches, layout, slab = small_parts()
    device = LateDevice(caches, slab, seed=1)
    copier = StreamCopier(caches, slab, layout, device)
    launch(copier, 0, [1, 2])
    launch(copier, 1, [3, 4], to_host=False)
    joined = []
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda t, s: joined.append(s) or join(t, s))
    copier.close()
    assert not device.is_closed
    assert "left alone" in caplog.text
    assert joined
    assert sum(s for s in joined if s > 0.1) < 0.5  # not the whole time for each
    monkeypatch.undo()
    ended.set()
    copier.close()
    assert device.is_closed


SHORT = 200
"""`make chaos` has the rest of the runs."""


@pytest.mark.parametrize(
    "first",
    [
        *range(0, SHORT, 200),
        *(pytest.param(n, marks=pytest.mark.chaos) for n in range(SHORT, RUNS, 200)),
    ],
)
def test_whatever_the_order_every_block_and_slot_holds_what_it_must(first):
    assert sum(run(seed) for seed in range(first, first + 200)) > 200 * 40


class WithoutEngineFence(Launcher):
    """Copies begin while compute still writes the blocks, or reads them."""

    def fence_engine(self, job, stream):
        pass


class WithoutEngineFenceOfLoads(Launcher):
    """Loads write blocks that compute still reads."""

    def fence_engine(self, job, stream):
        if job.to_host:
            super().fence_engine(job, stream)


class WithoutFenceOfGathers(Launcher):
    """A stage is copied to the host while pages are still gathered there."""

    def fence_gathered(self, gathered, stream):
        pass


class WithoutFenceOfCopies(Launcher):
    """Pages are scattered out of a stage that is still copied into."""

    def fence_copied(self, way):
        pass


class WithoutEndFence(Launcher):
    """A transfer counts as done when it is enqueued."""

    def fence_end(self, job):
        return []


class EndOfOneStreamOnly(Launcher):
    """A transfer counts as done when one of its streams is."""

    def fence_end(self, job):
        return super().fence_end(job)[:1]


class WithoutStageFence(Launcher):
    """A stage is written while copies or kernels use it."""

    def fence_stage(self, stage, stream):
        pass


class WithoutTableFence(Launcher):
    """A table is written while kernels read it."""

    def fence_table(self, table):
        return True


class OneStagingMemory(Launcher):
    """All stages are one memory."""

    def __init__(self, device, plan):
        new_stage, shared = device.new_stage, device.new_stage(plan.stage_bytes)
        device.new_stage = lambda num_bytes: shared
        super().__init__(device, plan)
        device.new_stage = new_stage


class BatchesBesideEachOther(Direction):
    """Each stream has its batches, and neither waits for the other."""

    def next_stream(self):
        self.last = None
        return super().next_stream()


@pytest.mark.parametrize(
    "broken",
    [
        WithoutEngineFence,
        WithoutEngineFenceOfLoads,
        WithoutFenceOfGathers,
        WithoutFenceOfCopies,
        WithoutEndFence,
        EndOfOneStreamOnly,
        WithoutStageFence,
        WithoutTableFence,
        OneStagingMemory,
    ],
)
def test_without_a_fence_other_bytes_are_found(broken, monkeypatch):
    monkeypatch.setattr(direction, "TABLES", 2)
    monkeypatch.setattr(direction, "STAGES", 2)
    assert _caught(launcher=broken)


def test_without_the_order_of_batches_other_bytes_are_found(monkeypatch):
    """The engine is waited for by the first batch alone."""
    monkeypatch.setattr(stream_copier, "Direction", BatchesBesideEachOther)
    assert _caught()


@pytest.mark.parametrize("rule", ["flushes", "keeps_slots", "keeps_blocks", "keeps_loans"])
def test_without_a_rule_that_engine_and_manager_keep_other_bytes_are_found(rule):
    """Stores of a preempted request's blocks are waited for. A slot that a load reads, and the
    blocks that it writes, are not reused. A server leaves chunks on loan alone.
    """
    assert _caught(**{rule: False})


def _caught(**how):
    """Whether some of the interleavings fail; other bytes are the only accepted failure."""
    caught = 0
    for seed in range(500):
        try:
            run(seed, **how)
        except AssertionError as error:
            caught += ", not " in str(error)
        if caught > 5:
            return True
    return False


def test_the_device_reads_the_slab_early_or_late():
    """Between a copy's submission and its end, as the driver may: its bytes must not change."""
    slab, target = Slab(NUM_SLOTS, 4096), torch.zeros(64, dtype=torch.uint8)
    device = LateDevice(small_caches(), slab, 1)
    slab.rows[:] = 1
    places = np.arange(64)
    copies = Copies(places + target.data_ptr(), places, np.ones(64, np.int64))
    device.copy(device.new_stream(), copies, False, device.slab)
    slab.rows[:] = 2
    device.run_all()
    assert set(target.tolist()) == {1, 2}
