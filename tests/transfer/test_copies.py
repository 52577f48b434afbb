"""Copies between blocks and slots: byte-exact for any layout, refused whole if a part is wrong."""

import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness import caches_of
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.cpu.gather import PagesOfTensor, gathers, scatters
from kvoffload.transfer.layout import ChunkLayout, check_moves
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.moves import move, moves_of

NUM_BLOCKS = 24
LONGEST_S = 20.0


def make_caches(pages_by_group, padding, num_blocks=NUM_BLOCKS):
    def rows(page):
        raw = torch.randint(-128, 127, (num_blocks, page + padding), dtype=torch.int8)
        return raw[:, :page]

    return caches_of(*(list(map(rows, pages)) for pages in pages_by_group))


@settings(max_examples=60)
@given(
    pages=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=1, max_size=3),
    padding=st.sampled_from([0, 7, 64]),
    per_chunk=st.integers(1, 4),
    data=st.data(),
)
def test_a_round_trip_restores_every_byte(pages, padding, per_chunk, data):
    caches = make_caches(pages, padding)
    layout = ChunkLayout(caches, per_chunk)
    sizes = [data.draw(st.integers(0, 6)) for _ in pages]
    firsts = [data.draw(st.integers(0, per_chunk - 1)) for _ in pages]
    # All groups draw their blocks from one pool: no id twice in a transfer.
    ids = data.draw(st.permutations(range(NUM_BLOCKS)))[: sum(sizes)]
    spec = GPULoadStoreSpec(ids, sizes, firsts)
    num_chunks = sum(
        -(-(first + size) // per_chunk) if size else 0
        for first, size in zip(firsts, sizes, strict=True)
    )
    slots = data.draw(st.permutations(range(num_chunks + 2)))[:num_chunks]
    slab = Slab(num_chunks + 2, layout.slot_bytes)
    with closing(CpuCopier(caches, slab, layout)) as copier:
        moves = layout.moves(spec, slots)
        before = [tensor.tensor.clone() for tensor in caches.tensors]
        copier.launch(moves, to_host=True, after=copier.record_fence()).wait()
        touched = {int(i) for chunk in moves for i in chunk.block_ids}
        for tensor in caches.tensors:
            tensor.tensor[sorted(touched)] = 0
        fence = copier.launch(moves, to_host=False, after=copier.record_fence())
        assert ends(fence)
        assert fence.error is None
    for chunk in moves:
        for region in layout.regions[chunk.group_idx]:
            ours = caches.tensors[region.tensor_idx].tensor[chunk.block_ids]
            assert torch.equal(ours, before[region.tensor_idx][chunk.block_ids])


@pytest.fixture
def parts():
    caches = make_caches([[64, 64]], 0)
    layout = ChunkLayout(caches, 2)
    slab = Slab(4, layout.slot_bytes)
    copier = CpuCopier(caches, slab, layout)
    yield caches, layout, slab, copier
    copier.close()


def check(moves, to_host, layout, slab):
    check_moves(moves_of(*moves), to_host, layout, slab)


@pytest.mark.parametrize(
    ("moves", "to_host", "named"),
    [
        ([move(0, [1, NUM_BLOCKS])], True, str(NUM_BLOCKS)),
        ([move(0, [-1])], True, "-1"),
        ([move(4, [1])], True, r"\[4\]"),
        ([move(0, [1]), move(0, [2])], True, "written twice"),
        ([move(0, [1, 1])], False, r"\[1\]: written twice"),
        ([move(0, [1]), move(1, [1])], False, r"\[1\]: written twice"),
        ([move(0, [1, 2], first=1)], True, "of a chunk of 2"),
    ],
)
def test_bad_moves_are_refused(parts, moves, to_host, named):
    _, layout, slab, _ = parts
    with pytest.raises(ValueError, match=named):
        check(moves, to_host, layout, slab)


def test_chunks_of_several_rows_may_not_reach_into_each_other():
    caches = make_caches([[4096, 4096]], 0)
    layout = ChunkLayout(caches, 1)
    slab = Slab(6, 4096)  # a chunk takes two rows
    with pytest.raises(ValueError, match=r"host slots \[3\]: written twice"):
        check([move(2, [1]), move(3, [2])], True, layout, slab)
    with pytest.raises(ValueError, match=r"host slots \[5\]: out of range"):
        check([move(5, [1])], True, layout, slab)
    check([move(4, [1]), move(2, [2])], True, layout, slab)


def test_a_copy_waits_for_the_fence_it_is_given(parts):
    """A store launched before compute has written its blocks must copy what compute wrote."""
    caches, _, slab, copier = parts

    class Compute:
        error = None

        def done(self):
            return False

        def wait(self):
            caches.tensors[0].tensor[3] = 42  # the forward pass finishes only now

    copier.launch(moves_of(move(1, [3])), to_host=True, after=Compute()).wait()
    assert (slab.rows[1][:64] == 42).all()


def test_blocks_that_are_not_that_many_chunks_are_refused(parts):
    _, layout, _, _ = parts
    with pytest.raises(ValueError, match="are not 1 chunks of 2 blocks"):
        layout.moves(GPULoadStoreSpec([1, 2, 3]), [0])
    with pytest.raises(ValueError, match="are not 3 chunks"):
        layout.moves(GPULoadStoreSpec([1, 2, 3]), [0, 1, 2])
    entered_midway = layout.moves(GPULoadStoreSpec([7, 8, 9], [3], [5]), [0, 1])
    assert [(m.first, m.block_ids.tolist()) for m in entered_midway] == [(1, [7]), (0, [8, 9])]


@settings(max_examples=60)
@given(
    page=st.sampled_from([24, 64, 4096, 6144, 8192, 1 << 16]),
    padding=st.sampled_from([0, 8, 4096]),
    shifts=st.lists(st.sampled_from([0, 8, 64, 2048, 4096]), min_size=1, max_size=4),
    per_chunk=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_round_trip_restores_every_byte_wherever_tensors_lie(
    page, padding, shifts, per_chunk, seed
):
    """Side by side or oddly apart, with gaps between their rows: what lies between is untouched."""
    row = page + padding
    memory = torch.randint(-128, 127, (len(shifts) * (8 * row + 8192),), dtype=torch.int8)
    tensors, at = [], 0
    for shift in shifts:
        at += shift
        tensors.append(memory.as_strided((8, page), (row, 1), at))
        at += 8 * row
    caches = caches_of(tensors)
    layout = ChunkLayout(caches, per_chunk)
    rng = np.random.default_rng(seed)
    ids, first = rng.permutation(8)[: rng.integers(1, 9)], int(rng.integers(per_chunk))
    slab = Slab(9, layout.slot_bytes)
    count = -(-(first + len(ids)) // per_chunk)
    moves = layout.moves(GPULoadStoreSpec(ids, [len(ids)], [first]), rng.permutation(9)[:count])
    with closing(CpuCopier(caches, slab, layout)) as copier:
        before = memory.clone()
        stored = copier.launch(moves, to_host=True, after=copier.record_fence())
        assert ends(stored)
        for chunk in moves:
            for region in layout.regions[0]:
                begin = region.offset + chunk.first * page
                pages = slab.rows[chunk.host_slot][begin : begin + len(chunk.block_ids) * page]
                ours = tensors[region.tensor_idx][chunk.block_ids].numpy()
                assert (pages.reshape(-1, page) == ours).all()
        for tensor in tensors:
            tensor[ids] = 0
        loaded = copier.launch(moves, to_host=False, after=copier.record_fence())
        assert ends(loaded)
        assert (stored.error, loaded.error) == (None, None)
        assert torch.equal(memory, before)


@pytest.mark.parametrize(
    ("page", "num_tensors", "num_blocks"),
    [(1 << 18, 4, NUM_BLOCKS), (1 << 20, 1, 1), (1 << 17, 1, 4), (1 << 16, 1, 8)],
)
def test_copies_leave_the_interpreter_to_others(page, num_tensors, num_blocks):
    """While pages are copied, another Python thread runs: the GIL is free."""
    caches = make_caches([[page] * num_tensors], 0, num_blocks)
    layout = ChunkLayout(caches, num_blocks)
    slab = Slab(1, layout.slot_bytes)
    parts = [
        PagesOfTensor(tensor.tensor.numpy(), region.offset)
        for tensor, region in zip(caches.tensors, layout.regions[0], strict=True)
    ]
    ids = np.random.default_rng(0).permutation(num_blocks)[None]
    copies = [*gathers(parts, num_blocks, 0), *scatters(parts, num_blocks, 0)]
    assert len({type(part) for part in copies}) == 2
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread is asked for the GIL: the copy must release it
    try:
        for part in copies:
            steps = []

            def copy_until_the_other_has_moved(part=part, steps=steps):
                # One part, or several: that depends on where the tensors came to lie.
                # In time of this thread: a busy machine may run the other one late.
                while len(steps) < 5 and time.thread_time() < LONGEST_S:
                    part.copy(ids, 0, slab.flat, [0])

            thread = threading.Thread(target=copy_until_the_other_has_moved)
            thread.start()
            while thread.is_alive():
                steps.append(1)
                time.sleep(0)
            assert len(steps) >= 5, type(part)
    finally:
        sys.setswitchinterval(interval)


def test_submitting_takes_work_in_proportion_to_the_blocks():
    """Lines of Python run by a launch, which do not depend on the machine as time would."""
    counts = {}
    for num_blocks in (256, 2048):
        caches = make_caches([[8]], 0, num_blocks)
        layout = ChunkLayout(caches, 1)
        slab = Slab(num_blocks, layout.slot_bytes)
        copier = CpuCopier(caches, slab, layout)
        moves = layout.moves(GPULoadStoreSpec(range(num_blocks)), list(range(num_blocks)))
        for to_host in (True, False):
            lines = []

            def count(frame, event, arg, lines=lines):
                lines.append(event)
                return count

            before = sys.gettrace()
            sys.settrace(count)
            try:
                fence = copier.launch(moves, to_host, copier.record_fence())
            finally:
                sys.settrace(before)
            assert ends(fence)
            counts[num_blocks, to_host] = len(lines)
        copier.close()
    for to_host in (True, False):
        assert counts[2048, to_host] < 8.2 * counts[256, to_host]
        assert counts[2048, to_host] < 16 * 2048


@pytest.mark.parametrize("page", [512, 1 << 16])
def test_a_further_chunk_of_a_copy_takes_few_calls(page):
    """Of Python or of numpy: each of them needs the GIL, for which the engine waits."""
    counts = {}
    for num_chunks in (40, 120):
        caches = make_caches([[page]], 0, 4 * num_chunks)
        layout = ChunkLayout(caches, 4)
        slab = Slab(num_chunks, layout.slot_bytes)
        spec = GPULoadStoreSpec(np.random.default_rng(0).permutation(4 * num_chunks))
        moves = layout.moves(spec, list(range(num_chunks)))
        calls = []

        def count(frame, event, arg, calls=calls):
            if event in ("call", "c_call"):
                calls.append(event)

        threading.setprofile(count)
        try:
            with closing(CpuCopier(caches, slab, layout)) as copier:
                for to_host in (True, False):
                    copier.launch(moves, to_host, copier.record_fence()).wait()
        finally:
            threading.setprofile(None)
        counts[num_chunks] = len(calls)
    assert counts[120] - counts[40] < 80 * 2 * 2
