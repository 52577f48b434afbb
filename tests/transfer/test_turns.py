"""Loads whose chunks take turns in slots, on a device that copies as late as the fences allow."""

import hashlib
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import open_backend
from kvoffload.messages import CPULoadStoreSpec, Fetch, GPULoadStoreSpec, make_offload_key
from kvoffload.transfer.cuda import stream_copier
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.tier_load import portions
from tests.support.interleavings import NUM_BLOCKS, PER_CHUNK, small_parts
from tests.support.io_rig import call, client_over
from tests.support.late_device import LateDevice

CHUNKS = NUM_BLOCKS // PER_CHUNK
KEYS = tuple(make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(CHUNKS))


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_a_slot_is_read_into_again_only_when_the_device_has_copied_it(until, seed, num_slots):
    draw = random.Random(seed)
    caches, layout, slab = small_parts(num_slots=num_slots)
    device = LateDevice(caches, slab, seed)
    copier = StreamCopier(caches, slab, layout, device, stage_bytes=1000)
    store = open_backend("memory", {"capacity": "1MiB"}, "0" * 64)
    io = client_over({"store": store}, slab)
    chunks = [np.frombuffer(draw.randbytes(layout.payload_bytes[0]), np.int8) for _ in KEYS]
    assert all(call(io, store.write(KEYS, [memoryview(chunk) for chunk in chunks])))
    engine = TransferEngine(io, slab, layout, copier)
    blocks = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    source = CPULoadStoreSpec(
        [i % num_slots for i in range(CHUNKS)], [Fetch("store", tuple(range(CHUNKS)), KEYS)]
    )
    try:
        assert engine.transfer_async(1, (source, GPULoadStoreSpec(blocks)))
        (result,) = until(engine.get_finished)
    finally:
        io.close()
        copier.close()
    assert result.success
    for region in layout.regions[0]:
        pages = caches.tensors[region.tensor_idx].tensor
        for i, block in enumerate(blocks):
            at = region.offset + i % PER_CHUNK * region.page_bytes
            wanted = chunks[i // PER_CHUNK][at : at + region.page_bytes]
            assert torch.equal(pages[block], torch.from_numpy(wanted.copy()))


@pytest.mark.parametrize("waits", [False, True], ids=["polled", "waited for"])
def test_a_copy_that_hangs_is_told_of_though_the_next_read_waits_for_it(
    until, monkeypatch, caplog, waits
):
    caches, layout, slab = small_parts(num_slots=2)
    device = LateDevice(caches, slab, 0)
    copier = StreamCopier(caches, slab, layout, device)
    store = open_backend("memory", {"capacity": "1MiB"}, "0" * 64)
    io = client_over({"store": store}, slab)
    chunk = memoryview(bytes(layout.payload_bytes[0]))
    assert all(call(io, store.write(KEYS, [chunk] * CHUNKS)))
    engine = TransferEngine(io, slab, layout, copier)
    source = CPULoadStoreSpec(
        [i % 2 for i in range(CHUNKS)], [Fetch("store", tuple(range(CHUNKS)), KEYS)]
    )
    copy, returns = device.copy, threading.Event()

    def hang(*given):
        returns.wait()
        copy(*given)

    monkeypatch.setattr(device, "copy", hang)
    monkeypatch.setattr(stream_copier, "LATE_S", 0.05)
    waiting = threading.Thread(target=engine.wait, args=([1],))
    try:
        assert engine.transfer_async(1, (source, GPULoadStoreSpec(range(NUM_BLOCKS))))
        if waits:
            waiting.start()
        until(lambda: "has not returned" in caplog.text or (not waits and engine.get_finished()))
        assert not engine.get_finished()
    finally:
        returns.set()
        if waits:
            waiting.join(60)
        (result,) = until(engine.get_finished)
        io.close()
        copier.close()
    assert result.success


@pytest.mark.parametrize(
    ("slots", "ends"),
    [
        ([], []),
        (list(range(10)), [10]),
        ([0, 1, 2, 3] * 2, [2, 4, 6, 8]),
        ([0, 1, 2, 3, 4] * 2, [2, 4, 6, 8, 10]),
        ([0, 1, 2, 0], [1, 2, 3, 4]),
        ([0, 0, 0], [1, 2, 3]),
    ],
)
def test_where_chunks_take_turns_a_part_has_half_of_the_slots(slots, ends):
    assert [end for _, end in portions(slots)] == ends


@given(st.lists(st.integers(0, 9), max_size=60))
def test_a_part_of_a_load_repeats_no_slot_and_leaves_none_out(slots):
    cuts = list(portions(slots))
    assert [end for _, end in cuts][:-1] == [start for start, _ in cuts][1:]
    assert [slots[i] for cut in cuts for i in range(*cut)] == slots
    for cut in cuts:
        call = slots[slice(*cut)]
        assert 0 < len(set(call)) == len(call)
