"""Loads that bring layer after layer: what was waited for is there, the rest may still come.

Ordering on a device with streams is in test_streams.py, which also takes the fence away.
"""

import threading

import pytest
import torch

from kvoffload.demo import Engine, SamplingParams
from kvoffload.demo.request import Work
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cpu.gather import Scatter
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.interleavings import (
    LAYERS,
    NUM_SLOTS,
    PAGES,
    PER_CHUNK,
    small_caches,
    words,
)
from tests.support.late_device import LateDevice


class Gate:
    """Lets scatters of a part of the slot through when it is opened."""

    def __init__(self, monkeypatch):
        self._open = {}
        scatter = Scatter.copy

        def copy(part, *given):
            assert self._of(part._offset).wait(30)
            scatter(part, *given)

        monkeypatch.setattr(Scatter, "copy", copy)

    def _of(self, offset):
        return self._open.setdefault(offset, threading.Event())

    def open(self, layout, tensors):
        for region in layout.regions[0]:
            if region.tensor_idx in tensors:
                self._of(region.offset).set()


def launch(copier, layout, to_host, blocks=range(4), slots=range(2)):
    moves = layout.moves(GPULoadStoreSpec(blocks), list(slots))
    return copier.launch(moves, to_host, copier.record_fence())


def stored(caches, copier, layout):
    """Blocks 0 to 3 with their numbers, stored; then zeroed."""
    for block in range(4):
        for page in words(caches, block):
            page.fill_(block + 1)
    assert launch(copier, layout, True).wait(10)
    for entry in caches.tensors:
        entry.tensor.zero_()


def found(caches, tensors):
    """Numbers found in blocks 0 to 3 of some tensors."""
    return [sorted({n for i in tensors for n in words(caches, b)[i].tolist()}) for b in range(4)]


LOADED, EMPTY = [[1], [2], [3], [4]], [[0]] * 4


@pytest.fixture
def on_cpu():
    caches = small_caches()
    layout = ChunkLayout(caches, PER_CHUNK)
    copier = make_copier(caches, Slab(NUM_SLOTS, layout.slot_bytes), layout, LAYERS)
    stored(caches, copier, layout)
    yield caches, layout, copier
    copier.close()


def test_a_layer_is_used_while_later_ones_are_still_copied(on_cpu, monkeypatch):
    caches, layout, copier = on_cpu
    gate = Gate(monkeypatch)
    fence = launch(copier, layout, False)
    assert found(caches, LAYERS[0]) == EMPTY  # without a wait: what was there before
    gate.open(layout, LAYERS[0])
    assert fence.wait_for_layer_load(0)
    assert found(caches, LAYERS[0]) == LOADED
    assert found(caches, LAYERS[1]) == EMPTY
    assert not fence.done()
    gate.open(layout, LAYERS[1])
    assert fence.wait_for_layer_load(1)
    assert found(caches, LAYERS[1]) == LOADED
    assert fence.wait(10)
    assert fence.error is None


def test_a_layer_whose_tensors_do_not_follow_each_other_in_a_slot_comes_back_byte_for_byte(
    new_kv_caches,
):
    caches = new_kv_caches(page_bytes=(64, 64, 64))
    layout = ChunkLayout(caches, PER_CHUNK)
    layers = [[0, 2], [1]]
    copier = make_copier(caches, Slab(NUM_SLOTS, layout.slot_bytes), layout, layers)
    try:
        before = [entry.tensor[:4].clone() for entry in caches.tensors]
        assert launch(copier, layout, True).wait(10)
        for entry in caches.tensors:
            entry.tensor[:4] = 0
        assert launch(copier, layout, False).wait(10)
        for entry, pages in zip(caches.tensors, before, strict=True):
            assert torch.equal(entry.tensor[:4], pages)
    finally:
        copier.close()


def test_a_layer_that_fails_fails_the_load_and_nobody_waits_for_ever(on_cpu, monkeypatch):
    caches, layout, copier = on_cpu
    scatter = Scatter.copy

    def fail_in_the_second_layer(part, *given):
        if part._offset != layout.regions[0][LAYERS[0][0]].offset:
            raise OSError("no more")
        scatter(part, *given)

    monkeypatch.setattr(Scatter, "copy", fail_in_the_second_layer)
    fence = launch(copier, layout, False)
    assert [fence.wait_for_layer_load(layer) for layer in range(2)] == [True, False]
    assert found(caches, LAYERS[0]) == LOADED
    assert fence.wait(10)
    assert str(fence.error) == "no more"


@pytest.fixture
def late():
    """A simulated device, and a copier of several portions a layer."""
    caches = small_caches()
    layout = ChunkLayout(caches, PER_CHUNK)
    slab = Slab(NUM_SLOTS, layout.slot_bytes)
    device = LateDevice(caches, slab, seed=3)
    copier = StreamCopier(caches, slab, layout, device, layers=LAYERS, stage_bytes=1000)
    stored(caches, copier, layout)
    yield caches, layout, copier, device
    copier.close()


def test_on_a_device_a_copy_that_is_refused_fails_the_layers_after_it(late):
    _, layout, copier, device = late
    copy, calls = device.copy, []

    def refuse_after_the_first_layer(stream, runs, to_host):
        calls.append(runs)
        if len(calls) > 2:  # the first layer takes one portion a chunk
            raise RuntimeError("out of something")
        copy(stream, runs, to_host)

    device.copy = refuse_after_the_first_layer
    fence = launch(copier, layout, False)
    assert [fence.wait_for_layer_load(layer) for layer in range(2)] == [True, False]
    assert fence.wait(10)
    assert str(fence.error) == "out of something"
    device.copy = copy
    again = launch(copier, layout, False)
    assert again.wait(10)
    assert again.error is None


def test_on_a_device_that_breaks_waits_end_and_the_load_has_failed(late):
    _, layout, copier, device = late

    def break_down():
        raise OSError("fell off the bus")

    device.engine.enqueue(break_down)
    fence = launch(copier, layout, False)
    for layer in range(len(LAYERS)):
        fence.wait_for_layer_load(layer)  # some end before the device tells
    assert fence.wait(10)
    assert fence.error is not None
    assert not fence.wait_for_layer_load(len(LAYERS))


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_without_layers_one_waits_for_everything(on):
    caches = small_caches()
    layout = ChunkLayout(caches, PER_CHUNK)
    slab = Slab(NUM_SLOTS, layout.slot_bytes)
    device = LateDevice(caches, slab, seed=3)
    copier = (
        make_copier(caches, slab, layout)
        if on == "cpu"
        else StreamCopier(caches, slab, layout, device)
    )
    try:
        stored(caches, copier, layout)
        fence = launch(copier, layout, False)
        assert fence.wait_for_layer_load(0)
        seen = []
        device.engine.enqueue(lambda: seen.append(found(caches, range(len(PAGES)))))
        device.run_all()
        assert seen == [LOADED]
    finally:
        copier.close()


@pytest.mark.parametrize(
    ("layers", "named"),
    [([[0], [1]], r"\[2\]"), ([[0, 1], [1, 2]], r"\[1\]"), ([[0, 1, 2, 7]], r"\[7\]")],
)
def test_layers_that_are_not_made_of_all_tensors_are_refused(layers, named):
    caches = small_caches()
    layout = ChunkLayout(caches, PER_CHUNK)
    slab = Slab(NUM_SLOTS, layout.slot_bytes)
    with pytest.raises(ValueError, match=f"tensors {named}"):
        make_copier(caches, slab, layout, layers)
    with pytest.raises(ValueError, match=f"tensors {named}"):
        StreamCopier(caches, slab, layout, LateDevice(caches, slab, 0), layers=layers)


class WaitingCaches(dict):
    """The mini engine's caches by layer; whoever takes one calls ``before`` first."""

    def __init__(self, caches, before):
        super().__init__(caches)
        self._before = before

    def __getitem__(self, name):
        self._before(list(self).index(name))
        return super().__getitem__(name)


def test_a_models_forward_pass_runs_with_layers_that_come_one_by_one(monkeypatch):
    """Each layer is let through only when the pass has come to it: it began before the load."""
    model = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    model |= {"head_size": 16, "intermediate_size": 96}
    config = {"kv_cache_bytes": 1 << 20, "block_size": 16, "max_model_len": 128, "model": model}
    with Engine(config) as engine:
        engine.add_request(list(range(65)), SamplingParams(max_tokens=1))
        request = engine._requests["request-0"]
        engine._scheduler.end_loads()
        (work,) = engine._scheduler.schedule()
        engine.runner.forward([work])
        blocks = work.block_ids[0][:4]  # 64 tokens; the last token is computed below
        last = Work(request, 64, 65, work.block_ids)
        expected = engine.runner.forward([last])

        caches = engine.runner.canonical_kv_caches()
        layout = ChunkLayout(caches, 4)
        layers = [(2 * i, 2 * i + 1) for i in range(3)]  # keys and values
        copier = make_copier(caches, Slab(1, layout.slot_bytes), layout, layers)
        try:
            assert launch(copier, layout, True, blocks, [0]).wait(10)
            kept = engine.runner._kv_caches
            for wait in (True, False):
                for cache in kept.values():
                    cache.zero_()
                with monkeypatch.context() as patched:
                    gate = Gate(patched)
                    fence = launch(copier, layout, False, blocks, [0])

                    def come_to(layer, gate=gate, fence=fence, wait=wait):
                        assert not fence.done()
                        if wait:
                            gate.open(layout, layers[layer])
                            assert fence.wait_for_layer_load(layer)

                    engine.runner._kv_caches = WaitingCaches(kept, come_to)
                    logits = engine.runner.forward([last])
                    assert torch.equal(logits, expected) is wait
                    for tensors in layers:
                        gate.open(layout, tensors)
                    assert fence.wait(10)
        finally:
            copier.close()
