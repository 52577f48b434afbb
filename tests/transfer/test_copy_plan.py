"""Which bytes are copied where: joined where both ends go on, cut where CUDA or the engine asks."""

import ctypes
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opcodes import count_opcodes

from benchmarks.harness import caches_of
from kvoffload.messages import CanonicalKVCaches, GPULoadStoreSpec
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.copy_plan import (
    FIRST_COPIES,
    MOST_BYTES,
    MOST_COPIES,
    CopyPlan,
    in_bytes,
)
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.moves import move, moves_of

PER_CHUNK = 2
PAGE = 4096
"""Such pages fill a slot without padding: chunks in adjacent slots are adjacent bytes."""


def noise(pages, num_blocks, padding=0):
    """Make caches of one group."""
    return caches_of(
        [
            torch.randint(-128, 127, (num_blocks, page + padding), dtype=torch.int8)[:, :page]
            for page in pages
        ]
    )


def plan_of(direct_page_bytes, num_blocks=8):
    caches = noise([PAGE], num_blocks)
    layout = ChunkLayout(caches, PER_CHUNK)
    plan = CopyPlan(caches, layout, 1 << 20, direct_page_bytes)
    return plan, caches.tensors[0].tensor.data_ptr()


def test_a_transfer_ends_in_the_slab_where_its_last_chunk_does():
    """Slots are rows: a chunk of a wider group takes several."""
    caches = noise([PAGE, PAGE, PAGE], 8)
    wide, thin = caches.group_data_refs[0][:2], caches.group_data_refs[0][2:]
    layout = ChunkLayout(CanonicalKVCaches(caches.tensors, (wide, thin)), PER_CHUNK)
    plan = CopyPlan(caches, layout, 1 << 20, 1)

    def end(*moves):
        return plan.host_end(in_bytes(moves_of(*moves), 2 * PAGE))

    assert end(move(3, [1]), move(4, [2], group_idx=1)) == 10 * PAGE
    assert end(move(2, [1]), move(4, [2], group_idx=1)) == 10 * PAGE
    assert end(move(4, [2], group_idx=1)) == 10 * PAGE
    assert end(move(4, [2, 3]), move(0, [1])) == 12 * PAGE


def pairs_of(slots_and_blocks, slot_bytes=PER_CHUNK * PAGE):
    return in_bytes(moves_of(*(move(slot, ids) for slot, *ids in slots_and_blocks)), slot_bytes)


def columns(copies):
    return list(zip(*(row.tolist() for row in copies), strict=True))


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([3, 4, 5], [(0, 3, 3)]),
        ([3, 4, 6], [(0, 3, 2), (2, 6, 1)]),
        ([4, 3], [(0, 4, 1), (1, 3, 1)]),
        ([3, 3], [(0, 3, 1), (1, 3, 1)]),
    ],
)
def test_staged_chunks_in_adjacent_slots_are_one_copy(slots, runs):
    plan, _ = plan_of(1 << 20)
    (part,) = plan.parts[0]
    made = plan.stage_copies(part, pairs_of([(slot, 0, 1) for slot in slots]), 7)
    size = PER_CHUNK * PAGE
    assert columns(made) == [(7 + at * size, slot * size, count * size) for at, slot, count in runs]


def test_direct_pages_are_one_copy_only_where_blocks_and_slots_are_adjacent():
    plan, address = plan_of(1)
    (made,) = plan.page_copies(0, pairs_of([(2, 4, 5), (3, 6, 1), (5, 2, 3)]))
    assert [((at - address) // PAGE, host // PAGE, n // PAGE) for at, host, n in columns(made)] == [
        (4, 4, 3),
        (1, 7, 1),
        (2, 10, 2),
    ]


@settings(max_examples=100)
@given(
    pages=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    padding=st.sampled_from([0, 9]),
    per_chunk=st.integers(1, 4),
    unit=st.sampled_from([64, 1000, 4096]),
    stage_bytes=st.sampled_from([1, 2000, 1 << 16]),
    staged=st.booleans(),
    data=st.data(),
)
def test_every_byte_of_the_blocks_goes_to_its_place_in_the_slots_and_no_other(
    pages, padding, per_chunk, unit, stage_bytes, staged, data
):
    """Carried out with memmove, against the layout's own description, for any part of chunks."""
    caches = noise(pages, 20, padding)
    layout = ChunkLayout(caches, per_chunk)
    first = data.draw(st.integers(0, per_chunk - 1))
    ids = data.draw(st.permutations(range(20)))[: data.draw(st.integers(1, 12))]
    count = -(-(first + len(ids)) // per_chunk)
    slots = data.draw(st.permutations(range(12)))[:count]
    moves = layout.moves(GPULoadStoreSpec(ids, [len(ids)], [first]), slots)
    slab = Slab(12, layout.slot_bytes)
    slab.flat[:] = 1
    expected = slab.flat.copy().reshape(slab.rows.shape)
    for slot, _, begin, blocks in moves:
        for region in layout.regions[0]:
            at = region.offset + begin * region.page_bytes
            rows = caches.tensors[region.tensor_idx].tensor[blocks].numpy().ravel()
            expected[slot, at : at + rows.size] = rows
    plan = CopyPlan(caches, layout, stage_bytes, 501 if staged else 0)
    moves = in_bytes(moves, slab.slot_bytes)
    if staged:
        made = []
        for part in plan.parts[0]:
            for portion in plan.portions(part, moves):
                # Staging memory as a gather leaves it: the chunks one after the other.
                stage = np.full(max(1, plan.stage_bytes), 77, np.int8)
                for i, (_, _, begin, blocks) in enumerate(portion):
                    for tensor_idx, offset, page in part.regions:
                        at = i * part.num_bytes + offset - part.start + begin * page
                        rows = caches.tensors[tensor_idx].tensor[blocks].numpy().ravel()
                        stage[at : at + rows.size] = rows
                copies = plan.stage_copies(part, portion, stage.ctypes.data)
                made.append((copies, stage))
    else:
        made = [(copies, None) for copies in plan.page_copies(0, moves)]
    for copies, _ in made:
        cut = copies.within_registrations(unit).of_at_most(unit // 2)
        assert cut.sizes.max() <= unit // 2
        assert (cut.host // unit == (cut.host + cut.sizes - 1) // unit).all()
        assert cut.sizes.sum() == copies.sizes.sum()
        for device, host, num_bytes in columns(cut):
            ctypes.memmove(slab.address + host, device, num_bytes)
    assert np.array_equal(slab.rows, expected)


def test_nothing_to_copy_is_no_copy():
    none = Copies(*(np.zeros(0, np.int64) for _ in range(3)))
    assert len(none.joined().within_registrations(4096).of_at_most(64).sizes) == 0


def test_a_batch_has_a_bounded_number_of_copies_and_bytes():
    tensors, page, chunks = 64, 64 << 10, 100
    pages = torch.empty((chunks, page), dtype=torch.int8)  # one memory for all: nothing is copied
    caches = caches_of([pages] * tensors)
    layout = ChunkLayout(caches, 1)
    plan = CopyPlan(caches, layout, 1 << 20, 32 << 10)
    moves = layout.moves(GPULoadStoreSpec(range(chunks)[::-1]), list(range(chunks)))
    moves = in_bytes(moves, layout.slot_bytes)
    for most in (MOST_COPIES, 256):
        sizes = [copies.sizes for copies in plan.page_copies(0, moves, partial(int, most))]
        assert sum(batch.sum() for batch in sizes) == tensors * page * chunks
        assert all(batch.sum() <= MOST_BYTES and len(batch) <= most for batch in sizes)
        assert max(len(batch) for batch in sizes) == min(most, MOST_BYTES // page)


def test_the_first_batch_is_small_and_each_later_one_four_times_as_large():
    """The bus idles until the driver has taken in a whole batch."""
    plan, _ = plan_of(1, num_blocks=2 * MOST_COPIES)
    blocks = np.random.default_rng(0).permutation(2 * MOST_COPIES)
    moves = pairs_of((i, *blocks[2 * i : 2 * i + 2]) for i in range(MOST_COPIES))
    counts = [copies.sizes.sum() // PAGE for copies in plan.page_copies(0, moves)]
    assert counts == [64, 256, 1024, 4096, 2752]
    assert counts[0] == FIRST_COPIES


@pytest.mark.parametrize("tensors", [1, 64])
def test_a_batch_takes_the_same_steps_however_many_copies_it_has(tensors):
    """Thousands of pages cost no Python of their own: the thread would hold the GIL for them."""
    caches = noise([64] * tensors, 2 * MOST_COPIES)
    layout = ChunkLayout(caches, 1)
    plan = CopyPlan(caches, layout, 1 << 20, 1)

    def steps(count):
        blocks = np.random.default_rng(0).permutation(2 * MOST_COPIES)[:count]
        moves = layout.moves(GPULoadStoreSpec(blocks), list(range(count)))
        moves = in_bytes(moves, layout.slot_bytes)
        made = []

        def descriptors():
            for copies in plan.page_copies(0, moves):
                made.append(copies.within_registrations(1 << 20).of_at_most(1 << 16))

        opcodes = count_opcodes(descriptors)
        assert sum(copies.sizes.sum() for copies in made) == 64 * tensors * count
        return opcodes, len(made)

    few, one = steps(max(1, 8 // tensors))
    many, batches = steps(MOST_COPIES)
    # Those of 64, 256 and 1,024 copies, and the rest in batches of ``MOST_COPIES``.
    assert (one, batches) == (1, 3 + -(-(tensors * MOST_COPIES - 1344) // MOST_COPIES))
    assert many / batches <= few + 100


def test_the_layout_s_description_is_the_one_that_namespaces_are_made_of():
    """Another text would lose all that is stored."""
    layout = ChunkLayout(noise([64, 32], 4), PER_CHUNK)
    assert layout.description == "tensor-major-1 [[64, 32]]"
