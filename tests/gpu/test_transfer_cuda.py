"""Copies on a real GPU: byte-exact by every way, in every order, no growth, refused if wrong."""

import random
import threading
from contextlib import closing

import pytest
import torch

from benchmarks.gpu.ours import tier_slab
from benchmarks.harness import caches_of
from kvoffload.messages import CanonicalKVCaches, GPULoadStoreSpec
from kvoffload.transfer.cuda.pinning import PORTION_BYTES
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends, store_and_load
from tests.support.interleavings import (
    NUM_SLOTS,
    PER_CHUNK,
    Interleaving,
    small_caches,
    small_parts,
    words,
)
from tests.support.lender import Lender
from tests.support.moves import move, moves_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_BLOCKS = 48
RUNS_EACH = 100
"""Interleavings that a test of them runs."""
PINNED_BYTES = 300 << 20
"""More than one registration, which is of ``PORTION_BYTES``."""
WARM_UP, TRANSFERS = 1000, 100_000
AT_ONCE = 100
GIB = 1 << 30
DTYPES = (torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
WAYS = [(True, True), (True, False), (False, True), (False, False)]


def new_copier(caches, slab, layout, *, triton=True, batches=True, **sizes):
    from kvoffload.transfer.cuda.torch_device import CudaDevice

    device = CudaDevice(caches, slab, triton=triton, batches=batches)
    return StreamCopier(caches, slab, layout, device, **sizes)


def random_caches(draw, num_groups):
    """Groups of tensors of any page size and dtype, with padded rows."""

    def rows():
        width = torch.empty(0, dtype=draw.choice(DTYPES)).element_size()
        page = width * draw.choice([1, 3, 8, 100, 576, 4096])
        raw = torch.randint(-128, 127, (NUM_BLOCKS, page + draw.choice([0, width, 512])))
        return raw.to(torch.int8).cuda()[:, :page]

    return caches_of(*([rows() for _ in range(draw.randint(1, 4))] for _ in range(num_groups)))


@pytest.mark.parametrize(("triton", "batches"), WAYS)
@pytest.mark.parametrize("seed", range(15))
def test_a_round_trip_restores_every_byte(seed, triton, batches):
    draw = random.Random(seed)
    groups = draw.randint(1, 3)
    caches = random_caches(draw, groups)
    per_chunk = draw.randint(1, 4)
    layout = ChunkLayout(caches, per_chunk)
    slab = tier_slab(64, layout.slot_bytes)
    sizes = [draw.randint(0, 14) for _ in range(groups)]
    firsts = [draw.randrange(per_chunk) for _ in range(groups)]
    ids = draw.sample(range(NUM_BLOCKS), sum(sizes))
    chunks = sum(-(-(f + s) // per_chunk) if s else 0 for f, s in zip(firsts, sizes, strict=True))
    moves = layout.moves(GPULoadStoreSpec(ids, sizes, firsts), draw.sample(range(64), chunks))
    with closing(
        new_copier(
            caches,
            slab,
            layout,
            triton=triton,
            batches=batches,
            stage_bytes=draw.choice([4096, 100_000, 16 << 20]),
            direct_page_bytes=draw.choice([1, 4096, 1 << 20]),
        )
    ) as copier:
        before = [entry.tensor.clone() for entry in caches.tensors]
        stored = copier.launch(moves, True, copier.record_fence())
        assert ends(stored)
        assert stored.error is None
        for chunk in moves:
            for region in layout.regions[chunk.group_idx]:
                caches.tensors[region.tensor_idx].tensor[
                    torch.from_numpy(chunk.block_ids).long()
                ] = 0
        loaded = copier.launch(moves, False, copier.record_fence())
        assert ends(loaded)
        assert loaded.error is None
        for entry, expected in zip(caches.tensors, before, strict=True):
            assert torch.equal(entry.tensor, expected), copier.stats()


class CudaEngine:
    """Forward passes on the current stream, which is kept busy so that they come late."""

    def __init__(self, kv_caches, seed):
        self.kv_caches, self.draw = kv_caches, random.Random(seed)

    def _dawdle(self):
        if self.draw.random() < 0.2:
            torch.cuda._sleep(self.draw.choice([20_000, 200_000]))

    def write(self, block, version):
        self._dawdle()
        for page in words(self.kv_caches, block):
            page.fill_(version)

    def read(self, block):
        self._dawdle()
        pages = [page.clone() for page in words(self.kv_caches, block)]
        return lambda: sorted({number for page in pages for number in page.tolist()})

    def finish(self):
        torch.cuda.synchronize()


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_whatever_the_order_every_block_and_slot_holds_what_it_must(first):
    caches, layout, slab = small_parts("cuda", new_slab=tier_slab)
    stage_bytes = [16, 1000, 1 << 20][first // 100 % 3]
    with closing(
        new_copier(
            caches,
            slab,
            layout,
            stage_bytes=stage_bytes,
            triton=first % 200 == 0,
        )
    ) as copier:
        for seed in range(first, first + RUNS_EACH):
            for entry in caches.tensors:
                entry.tensor.zero_()
            Interleaving(copier, CudaEngine(caches, seed), slab, layout, seed=seed).run()


@pytest.mark.parametrize("new_slab", [tier_slab, Slab])
def test_what_is_pinned_is_what_was_asked_for_and_let_go_again(until, new_slab):
    caches = small_caches("cuda")
    layout = ChunkLayout(caches, PER_CHUNK)
    slab = new_slab(PINNED_BYTES // layout.slot_bytes, layout.slot_bytes)
    with closing(make_copier(caches, slab, layout)) as copier:
        until(lambda: copier.stats()["pinned_bytes"] == slab.num_bytes, 60)
        assert torch.from_numpy(slab.flat).is_pinned()
    assert not torch.from_numpy(slab.flat).is_pinned()


def test_a_chunk_that_lies_across_two_registrations_comes_back():
    caches = small_caches("cuda")
    layout = ChunkLayout(caches, 7)
    slab = tier_slab(PINNED_BYTES // layout.slot_bytes, layout.slot_bytes)
    across = PORTION_BYTES // layout.slot_bytes
    assert across * layout.slot_bytes + layout.payload_bytes[0] > PORTION_BYTES
    with closing(make_copier(caches, slab, layout)) as copier:
        for entry in caches.tensors:
            entry.tensor.random_(-128, 127)
        moves = layout.moves(GPULoadStoreSpec(list(range(20, 6, -1))), [across, across - 1])
        store_and_load(copier, caches, moves, list(range(7, 21)))


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 30])
def test_blocks_beyond_two_gib_of_a_tensor_come_back(direct_page_bytes):
    page = 1 << 20
    tensor = torch.empty((5 * GIB // page, page), dtype=torch.int8, device="cuda")
    caches = caches_of([tensor])
    layout = ChunkLayout(caches, 1)
    slab = tier_slab(4, layout.slot_bytes)
    blocks = [len(tensor) - 1, 2 * GIB // page, 2 * GIB // page - 1, 0]
    for block in blocks:
        tensor[block] = block % 100 + 1
    with closing(new_copier(caches, slab, layout, direct_page_bytes=direct_page_bytes)) as copier:
        moves = layout.moves(GPULoadStoreSpec(blocks), [2, 0, 3, 1])
        store_and_load(copier, caches, moves, blocks, compared=blocks)


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 30])
def test_caches_made_under_inference_mode_are_loaded(direct_page_bytes):
    with torch.inference_mode():
        caches = small_caches("cuda")
        for entry in caches.tensors:
            entry.tensor.random_(-128, 127)
    layout = ChunkLayout(caches, PER_CHUNK)
    slab = tier_slab(NUM_SLOTS, layout.slot_bytes)
    with closing(new_copier(caches, slab, layout, direct_page_bytes=direct_page_bytes)) as copier:
        moves = layout.moves(GPULoadStoreSpec([3, 5, 4, 7]), [6, 2])
        store_and_load(copier, caches, moves, [3, 5, 4, 7])


def test_a_store_waits_for_the_stream_that_the_engine_uses():
    caches, layout, slab = small_parts("cuda", new_slab=tier_slab)
    with closing(new_copier(caches, slab, layout)) as copier:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            for page in words(caches, 3):
                page.fill_(9)
            fence = copier.launch(moves_of(move(1, [3, 4])), True, copier.record_fence())
        assert ends(fence)
        assert (slab.rows[1][: caches.tensors[0].page_size_bytes] == [9, *[0] * 7] * 32).all()


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 30])
def test_a_copier_closed_while_copies_run_lets_them_end_first(direct_page_bytes):
    caches, layout, slab = small_parts("cuda", new_slab=tier_slab)
    copier = new_copier(caches, slab, layout, direct_page_bytes=direct_page_bytes)
    torch.cuda._sleep(200_000_000)
    fences = [
        copier.launch(moves_of(move(slot, [slot, slot + 8])), True, copier.record_fence())
        for slot in range(NUM_SLOTS)
    ]
    copier.close()
    assert all(fence.done() and fence.error is None for fence in fences)
    assert not torch.from_numpy(slab.flat).is_pinned()


def test_memory_and_threads_do_not_grow_over_many_transfers():
    caches, layout, slab = small_parts("cuda", new_slab=tier_slab)
    copier = new_copier(caches, slab, layout)
    moves = moves_of(move(0, [3, 5]), move(2, [7, 4]))  # several copies: a batch of the driver

    def many(count):
        for _ in range(count // AT_ONCE):
            fences = [copier.launch(moves, True, copier.record_fence()) for _ in range(AT_ONCE)]
            assert all(ends(fence) and fence.error is None for fence in fences)

    try:
        many(WARM_UP)
        device = torch.cuda.memory_allocated()
        free, threads = torch.cuda.mem_get_info()[0], threading.active_count()
        many(TRANSFERS)
        # Tables are made at the start: no transfer allocates.
        assert torch.cuda.memory_allocated() <= device
        assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)
        assert threading.active_count() <= threads
    finally:
        copier.close()


@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 30])
def test_chunks_arrive_from_a_server_s_memory_before_it_is_pinned_and_after(
    direct_page_bytes, until
):
    caches, layout, slab = small_parts("cuda", new_slab=tier_slab)
    lender = Lender(PINNED_BYTES // layout.slot_bytes * layout.slot_bytes)
    chunks = [3, 0, PORTION_BYTES // layout.slot_bytes, PINNED_BYTES // layout.slot_bytes - 1]
    with closing(new_copier(caches, slab, layout, direct_page_bytes=direct_page_bytes)) as copier:
        lender.load(copier, layout, caches, chunks)
        pinned = copier._device.lent(lender.memory, 0)
        until(lambda: pinned.pinned_bytes == len(lender.written), 60)
        for _ in range(3):
            lender.load(copier, layout, caches, chunks)
        assert pinned.takes_batches
        lender.memory.leave()
        until(lambda: not pinned.pinned_bytes, 60)
    lender.close()


def test_tensors_on_two_devices_are_refused():
    on_gpu, on_cpu = small_caches("cuda"), small_caches("cpu")
    mixed = CanonicalKVCaches((*on_gpu.tensors[:2], on_cpu.tensors[2]), on_gpu.group_data_refs)
    layout = ChunkLayout(mixed, PER_CHUNK)
    with pytest.raises(ValueError, match=r"several devices.*2: 'cpu'"):
        make_copier(mixed, tier_slab(1, layout.slot_bytes), layout)
