"""A call that the device refuses fails its own transfers, and each of them ends."""

import threading
import weakref

import numpy as np
import pytest
import torch

from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.cuda import direction, stream_copier
from kvoffload.transfer.cuda.direction import STAGES, TABLES
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from tests.support.fence_ends import ends
from tests.support.interleavings import NUM_SLOTS, small_parts, words
from tests.support.late_device import LateDevice, LateStream
from tests.support.moves import move, moves_of


class Refusal(RuntimeError):
    """The error of a device that refuses a call."""


class RefusingStream(LateStream):
    """A stream that records no event while its device refuses to."""

    def record_event(self, **how):
        device = self._device
        if device.refused_event is not None:
            device.refused_event -= 1
            if device.refused_event < 0:
                device.refused_event = None
                raise Refusal("no event")
        if device.refuses_events:
            raise Refusal("no event")
        return super().record_event(**how)


class RefusingDevice(LateDevice):
    """A device that records every call to ``prepare`` and ``new_tables``, and refuses events."""

    def __init__(self, *given):
        self.refuses_events = False
        self.refused_event = None
        """The number of one event that is refused, counted from now."""
        self.prepared = []
        self.tables = []
        super().__init__(*given)

    def new_stream(self):
        with self.lock:
            self.streams.append(RefusingStream(self))
            return self.streams[-1]

    def prepare(self, parts):
        self.prepared += parts
        return super().prepare(parts)

    def new_tables(self, count, num_blocks):
        made = super().new_tables(count, num_blocks)
        self.tables += made
        return made


class UnenteredDevice(RefusingDevice):
    """A device that some threads cannot make their current one, at first."""

    refusals = 1000

    def enter_thread(self):
        if threading.current_thread().name == "kvoffload-launch" and self.refusals:
            self.refusals -= 1
            raise Refusal("no context")


class Parts:
    """A copier on small caches, and the device that the copier uses."""

    def __init__(self, device_type=RefusingDevice, seed=1, **how):
        self.caches, self.layout, self.slab = small_parts()
        self.device = device_type(self.caches, self.slab, seed)
        self.copier = StreamCopier(self.caches, self.slab, self.layout, self.device, **how)

    def launch(self, slot, blocks, to_host=True, after=None):
        moves = moves_of(move(slot, blocks))
        return self.copier.launch(moves, to_host, after or self.copier.record_fence())

    def store(self, slot, blocks):
        """Store blocks and wait; returns the fence's error."""
        fence = self.launch(slot, blocks)
        assert ends(fence)
        return fence.error


@pytest.fixture
def make(closing):
    def make(*given, **how):
        parts = Parts(*given, **how)
        closing(parts.copier)
        return parts

    return make


@pytest.fixture
def parts(make):
    return make()


@pytest.fixture(params=["staged", "direct"])
def either(make, request):
    return make(direct_page_bytes=1 if request.param == "direct" else 1 << 20)


@pytest.mark.parametrize("copy_fails", [False, True])
def test_a_transfer_whose_end_cannot_be_marked_fails_when_its_copies_have_ended(either, copy_fails):
    """Such a transfer has no events: it would count as done at once, and as good."""
    parts = either
    device, slot = parts.device, parts.slab.rows[0]
    copy = device.copy

    def last_copy(*given, **named):
        copy(*given, **named)
        device.refuses_events = True
        if copy_fails:
            raise Refusal("no copy")

    device.copy = last_copy
    for page in words(parts.caches, 1):
        page.fill_(7)
    fence = parts.launch(0, [1, 2])
    assert ends(fence)
    assert str(fence.error) == ("no copy" if copy_fails else "no event")
    # The slot has another owner now: a copy that still ran would write there.
    slot[:] = 5
    device.run_all()
    assert (slot == 5).all()
    device.refuses_events, device.copy = False, copy
    assert parts.store(1, [3, 4]) is None


def test_a_stage_and_a_table_whose_end_is_unknown_are_used_when_all_has_run(parts):
    """Lost instead, each error of the device would make later transfers slower."""
    device, copy = parts.device, parts.device.copy

    def last_copy(*given, **named):
        copy(*given, **named)
        device.refuses_events = True

    device.copy = last_copy
    for _ in range(2 * TABLES):
        assert str(parts.store(0, [1, 2])) == "no event"
        assert not any(stream.work for stream in device.streams)
        device.refuses_events = False
    device.copy = copy
    for page in words(parts.caches, 3):
        page.fill_(7)
    assert parts.store(1, [3, 4]) is None
    assert (parts.slab.rows[1][:256].view(np.int64) == 7).all()


@pytest.mark.parametrize("nth", range(5))
def test_kernels_of_a_load_that_failed_do_not_read_the_table_of_a_later_one(monkeypatch, nth):
    """They would write its blocks while the engine's work before it still reads them."""
    monkeypatch.setattr(direction, "TABLES", 2)
    for seed in range(20):
        parts = Parts(seed=seed)
        device, early = parts.device, parts.copier.record_fence()
        found, page = [], words(parts.caches, 5)[0]
        for _ in range(20):
            device.engine.enqueue(lambda page=page, found=found: found.append(int(page.sum())))
        late = parts.copier.record_fence()
        parts.slab.rows[:] = 7
        with device.lock:  # nothing runs before all is queued
            device.refused_event = nth
            fences = [parts.launch(i, [2 * i, 2 * i + 1], False, early) for i in range(2)]
            fences.append(parts.launch(2, [4, 5], False, late))
        assert all(ends(fence) for fence in fences)
        assert [str(fence.error) for fence in fences] == ["no event", "None", "None"]
        device.run_all()
        assert found == [0] * 20
        assert (page.view(torch.int8) == 7).all()
        parts.copier.close()


def test_no_table_is_made_while_transfers_run(parts):
    fences = [parts.launch(i % NUM_SLOTS, [i % 20, 21], i % 2 == 0) for i in range(3 * TABLES)]
    assert all(ends(fence) and fence.error is None for fence in fences)
    assert len(parts.device.tables) == 2 * TABLES


def test_the_kernels_of_every_part_are_prepared_when_a_copier_is_made(parts):
    """Compiled at the first transfer instead, a kernel would delay that one for seconds."""
    staged = {region for part in parts.device.prepared for region in part.regions}
    assert staged == set(parts.layout.regions[0])


def test_a_thread_that_cannot_enter_the_device_fails_its_transfers_and_nothing_waits_for_ever(make):
    parts = make(UnenteredDevice)
    for to_host in (True, False):
        fence = parts.launch(0, [1, 2], to_host)
        assert ends(fence)
        assert str(fence.error) == "no context"
    # The device is asked again for each transfer: what kept the thread out may pass.
    parts.device.refusals = 0
    assert parts.store(1, [3, 4]) is None
    parts.copier.close()
    assert parts.device.is_closed


class StageRefused(RefusingDevice):
    """A device with too little memory for the n-th stage."""

    last_stage = 0

    def new_stage(self, num_bytes):
        if len(self._stages) == self.last_stage:
            raise Refusal("out of memory")
        return super().new_stage(num_bytes)


class SmallDevice(RefusingDevice):
    """A device with little memory."""

    num_bytes = 0

    def new_stage(self, num_bytes):
        if num_bytes > self.num_bytes:
            raise MemoryError("the device is full")
        self.num_bytes -= num_bytes
        stage = torch.empty(num_bytes, dtype=torch.int8)
        weakref.finalize(stage, self.free, num_bytes)
        return stage

    def free(self, num_bytes):
        self.num_bytes += num_bytes


@pytest.mark.parametrize(
    ("left", "stage_bytes"),
    [(0, 16_000), (-8, 8000), (-32_001, 4000), (-48_001, 0), (-64_000, 0)],
)
def test_with_little_device_memory_less_is_staged_and_told(
    make, monkeypatch, caplog, left, stage_bytes
):
    monkeypatch.setattr(stream_copier, "LEAST_STAGE_BYTES", 4000)
    monkeypatch.setattr(SmallDevice, "num_bytes", 2 * STAGES * 16_000 + left)
    parts = make(SmallDevice, stage_bytes=16_000)
    stats = parts.copier.stats()
    assert (stats["stage_bytes"], stats["groups"]) == (
        stage_bytes,
        "staged" if stage_bytes else "direct",
    )
    assert stats.get("why_not_stage_bytes") == ("the device is full" if left else None)
    assert ("the device is full" in caplog.text) == bool(left)
    assert ("without staging" in caplog.text) == (not stage_bytes)
    # Those of a try that found no room would take the engine's hardware queues.
    assert len(parts.device.streams) == 1 + 2 * 3
    for block in (1, 2):
        for page in words(parts.caches, block):
            page.fill_(block)
    assert parts.store(3, [1, 2]) is None
    loaded = parts.launch(3, [5, 6], to_host=False)
    assert ends(loaded)
    assert [page[0] for block in (5, 6) for page in words(parts.caches, block)] == [
        1,
        1,
        1,
        2,
        2,
        2,
    ]


def ours():
    return {thread.name for thread in threading.enumerate() if "kvoffload" in thread.name}


@pytest.mark.parametrize("stages", range(0, 2 * STAGES, 3))
def test_a_copier_that_cannot_be_made_closes_its_device_and_ends_its_threads(monkeypatch, stages):
    made = []

    class Refused(StageRefused):
        last_stage = stages

        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    before = ours()
    with pytest.raises(Refusal, match="out of memory"):
        Parts(Refused)
    assert made[0].is_closed
    assert ours() <= before  # those of an earlier test may end meanwhile


def test_a_copier_without_its_thread_is_not_made_and_its_device_is_closed(monkeypatch, until):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "kvoffload-launch":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = ours()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Parts()
    until(lambda: ours() <= before)


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_a_transfer_after_the_copier_was_closed_is_refused(on):
    """Accepted, it would be waited for without an end: no thread is there to carry it out."""
    parts = Parts()
    copier = parts.copier
    if on == "cpu":
        copier = CpuCopier(parts.caches, parts.slab, parts.layout)
    fence = parts.copier.record_fence()
    copier.close()
    parts.copier.close()
    with pytest.raises(RuntimeError, match="closed"):
        copier.launch(moves_of(move(0, [1, 2])), True, fence)
