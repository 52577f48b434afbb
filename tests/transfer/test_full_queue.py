"""What a copier does when the driver takes no further call, or does not return from one."""

import logging
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from benchmarks.harness import caches_of
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cuda import direction, fences, stream_copier
from kvoffload.transfer.cuda.direction import MOST_CALLS, Direction
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.late_device import LateDevice

PAGE, CHUNKS = 4096, 3000
QUEUE = 1000
"""Calls that a stream takes: as many were measured on an A100. A further one blocks."""


class FullDevice(LateDevice):
    """A device whose calls block while the queue of their stream is full."""

    def __init__(self, *given):
        super().__init__(*given)
        self.is_released = threading.Event()
        self.stored_bytes = 0

    def copy(self, stream, copies, to_host, memory):
        if not self.batches and len(stream.work) + len(copies.sizes) > QUEUE:
            self.is_released.wait()
        if to_host:
            self.stored_bytes += int(copies.sizes.sum())
        super().copy(stream, copies, to_host, memory)

    def stand_still(self):
        """Let the engine's stream do nothing more, until :meth:`go_on`."""
        self.engine.work.appendleft(self.stand_still)

    def go_on(self):
        with self.lock:
            self.engine.work.remove(self.stand_still)
        self.is_released.set()


class Parts:
    """A copier on pages that are scattered at both ends: no two are one copy."""

    def __init__(self, batches, direct_page_bytes):
        tensor = torch.randint(-128, 127, (CHUNKS + 1, PAGE), dtype=torch.int8)
        caches = caches_of([tensor])
        self.tensor, self.layout = tensor, ChunkLayout(caches, 1)
        self.slab = Slab(CHUNKS + 1, self.layout.slot_bytes)
        self.device = FullDevice(caches, self.slab, 1)
        self.device.batches = batches
        self.copier = StreamCopier(
            caches, self.slab, self.layout, self.device, direct_page_bytes=direct_page_bytes
        )
        self.order = np.random.default_rng(0).permutation(CHUNKS + 1)

    def launch(self, begin, count, to_host, after=None):
        some = self.order[begin:][:count]
        moves = self.layout.moves(GPULoadStoreSpec(some), some)
        return self.copier.launch(moves, to_host, after or self.copier.record_fence())


@pytest.fixture
def make():
    made = []

    def make(batches=True, direct_page_bytes=1):
        made.append(Parts(batches, direct_page_bytes))
        return made[-1]

    yield make
    for parts in made:
        parts.device.is_released.set()
        parts.copier.close()


@pytest.fixture
def refused(monkeypatch):
    """Count how often there was no room for further copies (True), and how often there was."""
    has_room, refused = Direction.has_room, Counter()

    def noted(way):
        room = has_room(way)
        refused[not room] += 1
        return room

    monkeypatch.setattr(Direction, "has_room", noted)
    return refused


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_single_copies_behind_the_forward_pass_do_not_fill_the_queue_of_their_stream(
    make, refused, until, direct_page_bytes
):
    """The launching thread would stand in the driver until the pass ends, and all loads with it."""
    parts = make(batches=False, direct_page_bytes=direct_page_bytes)
    early = parts.copier.record_fence()
    parts.slab.rows[parts.order[CHUNKS]][:] = 7
    parts.device.engine.enqueue(parts.device.stand_still)
    store = parts.launch(0, CHUNKS, True)
    until(lambda: refused[True] > 3)
    assert parts.device.stored_bytes >= MOST_CALLS * PAGE
    load = parts.launch(CHUNKS, 1, False, early)
    assert ends(load)
    assert (parts.tensor[parts.order[CHUNKS]] == 7).all()
    assert not store.done()
    parts.device.go_on()
    assert ends(store)
    assert store.error is None
    assert np.array_equal(
        parts.slab.rows[parts.order[:CHUNKS]], parts.tensor[parts.order[:CHUNKS]].numpy()
    )


def test_after_a_batch_that_the_driver_refuses_single_copies_do_not_fill_the_queue(
    make, refused, until
):
    """The transfer in which the driver refuses one goes on, copy by copy."""
    parts = make()
    copy = parts.device.copy

    def refuse(*given):
        copy(*given)
        parts.device.batches = False

    parts.device.copy = refuse
    early = parts.copier.record_fence()
    parts.device.engine.enqueue(parts.device.stand_still)
    store = parts.launch(0, CHUNKS, True)
    until(lambda: refused[True] > 3)
    assert ends(parts.launch(CHUNKS, 1, False, early))
    parts.device.go_on()
    assert ends(store)
    assert store.error is None


def test_batches_behind_the_forward_pass_are_bounded_by_their_bytes(
    make, refused, monkeypatch, until
):
    monkeypatch.setattr(direction, "MOST_BYTES", 300 * PAGE)
    parts = make()
    parts.device.engine.enqueue(parts.device.stand_still)
    store = parts.launch(0, CHUNKS, True)
    until(lambda: refused[True] > 3)
    assert parts.device.stored_bytes == (64 + 256) * PAGE
    parts.device.go_on()
    assert ends(store)
    assert store.error is None
    assert parts.device.stored_bytes == CHUNKS * PAGE


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_many_small_transfers_behind_the_forward_pass_do_not_fill_a_queue(
    make, refused, monkeypatch, until, direct_page_bytes
):
    """Each has some calls beside its copies, for events."""
    monkeypatch.setattr(direction, "TABLES", CHUNKS)
    parts = make(direct_page_bytes=direct_page_bytes)
    parts.device.engine.enqueue(parts.device.stand_still)
    stores = [parts.launch(i, 1, True) for i in range(MOST_CALLS)]
    until(lambda: refused[True] > 3 or stores[-1]._events is not None)
    assert max(len(stream.work) for stream in parts.device.streams) <= QUEUE
    parts.device.go_on()
    assert all(ends(store) and store.error is None for store in stores)


def test_a_transfer_that_finds_room_goes_on_at_once(make, monkeypatch):
    monkeypatch.setattr(stream_copier, "POLL_S", 3600.0)
    parts = make()
    assert ends(parts.launch(0, CHUNKS, True))


def test_a_transfer_that_finds_no_room_asks_again_after_a_while(make, refused, monkeypatch, until):
    """The launching thread would take a core for as long as the forward pass runs."""
    monkeypatch.setattr(stream_copier, "POLL_S", 3600.0)
    parts = make(batches=False)
    parts.device.engine.enqueue(parts.device.stand_still)
    store = parts.launch(0, CHUNKS, True)
    until(lambda: refused[True])
    assert not threading.Event().wait(0.1)
    assert refused[True] == 1
    parts.device.go_on()
    monkeypatch.setattr(stream_copier, "POLL_S", 0.001)
    assert ends(parts.launch(CHUNKS, 1, True))  # which wakes the thread
    assert store.error is None


@pytest.mark.parametrize("waits", [False, True], ids=["polled", "waited for"])
def test_a_call_that_does_not_return_is_told_once(make, monkeypatch, caplog, until, waits):
    caplog.set_level(logging.INFO)

    def told():
        return [each for each in caplog.messages if "has not returned" in each]

    parts = make()
    assert ends(parts.launch(0, 3, True))
    call, returns = parts.device.copy, parts.device.is_released

    def hang(*given):
        returns.wait()
        call(*given)

    monkeypatch.setattr(parts.device, "copy", hang)
    monkeypatch.setattr(stream_copier, "LATE_S", 0.05)
    monkeypatch.setattr(fences, "LATE_S", 0.05)
    late = parts.launch(0, 3, True)
    waiting = threading.Thread(target=late.wait, daemon=True)
    if waits:
        waiting.start()
    until(lambda: (not waits and late.done()) or told())
    assert "batched_copies" in told()[0]
    assert not ends(late, 0.2)
    monkeypatch.setattr(stream_copier, "LATE_S", 60.0)  # later calls may be slow on a busy machine
    returns.set()
    assert ends(late)
    assert late.error is None
    assert len(told()) == 1
    if waits:
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_copier_that_has_nothing_to_do_tells_of_no_call(make, monkeypatch, caplog):
    parts = make()
    assert ends(parts.launch(0, 3, True))
    monkeypatch.setattr(stream_copier, "LATE_S", 0.02)
    assert not threading.Event().wait(0.1)
    parts.copier._launcher.tell_late()
    assert "has not returned" not in caplog.text
