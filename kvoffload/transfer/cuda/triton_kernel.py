"""Gather and scatter as one Triton kernel for each portion; imported only if Triton is installed.

Addresses and numbers are integers that Triton does not specialise on. The kernel is therefore
compiled when a copier is made, and not again while an engine serves.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part

MOST_WORDS = 2048
"""Words that a program moves at once, if pages have as many."""
LEAST_WORDS = 128
PROGRAMS = 64
"""The most programs, if each moves ``MOST_WORDS`` at once: several times as fast as the bus, and
few compared to the engine's kernels. For smaller tiles there are as many more."""
_TRITON_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(
    do_not_specialize=[
        "table", "size", "items", "stage", "regions", "num_regions", "tiles", "chunk_words",
    ]
)  # fmt: skip
def _move(
    table,
    size,
    items,
    stage,
    regions,
    num_regions,
    tiles,
    chunk_words,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
    TO_STAGE: tl.constexpr,
):
    """Move one tile of one region's page of one block at a time.

    ``table`` has three rows of ``size``: block id, chunk, place in the chunk. ``regions`` has four
    rows of ``num_regions``: address, words from row to row, words of a page, and the place in the
    staged part.
    """
    numbers = table.to(tl.pointer_type(tl.int64))
    places = regions.to(tl.pointer_type(tl.int64))
    staged = stage.to(tl.pointer_type(WORD))
    lane = tl.arange(0, TILE)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item % tiles
        region = (item // tiles) % num_regions
        block = item // tiles // num_regions
        block_id = tl.load(numbers + block)
        chunk = tl.load(numbers + size + block)
        within = tl.load(numbers + 2 * size + block)
        address = tl.load(places + region)
        row_words = tl.load(places + num_regions + region)
        page_words = tl.load(places + 2 * num_regions + region)
        offset = tl.load(places + 3 * num_regions + region)
        word = tile * TILE + lane
        inside = word < page_words
        page = address.to(tl.pointer_type(WORD)) + block_id * row_words + word
        place = staged + chunk * chunk_words + offset + within * page_words + word
        if TO_STAGE:
            tl.store(place, tl.load(page, mask=inside), mask=inside)
        else:
            tl.store(page, tl.load(place, mask=inside), mask=inside)


class TritonKernels:
    """One launch for each portion. Compiles for all parts at once and moves no page then."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, parts: Sequence[Part], programs: int = PROGRAMS
    ) -> None:
        self._programs = programs
        tensors = [entry.tensor for entry in kv_caches.tensors]
        self._shapes = {part: shape_of(part, tensors) for part in parts}
        nothing = torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
        empty = BlockTable(nothing.cpu().numpy(), nothing)
        for part in parts:
            for to_stage in (True, False):
                self.move(part, empty, nothing, to_stage)

    def move(self, part: Part, table: BlockTable, stage: torch.Tensor, to_stage: bool) -> None:
        width, regions, tile, tiles = self._shapes[part]
        items = table.count * len(part.regions) * tiles
        programs = self._programs * (MOST_WORDS // tile)
        _move[(max(1, min(programs, items)),)](
            table.device.data_ptr(),
            table.count,
            items,
            stage.data_ptr(),
            regions.data_ptr(),
            len(part.regions),
            tiles,
            part.num_bytes // width,
            WORD=_TRITON_WORDS[width],
            TILE=tile,
            TO_STAGE=to_stage,
            num_warps=max(1, tile // 256),
        )


def shape_of(part: Part, tensors: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor, int, int]:
    """Choose how a part is moved, and upload the places of its regions.

    Returns:
        Bytes of a word, the places on the device, words of a tile, tiles of the widest page.
    """
    width = word_bytes(part, tensors)
    rows = []
    for tensor_idx, offset, page_bytes in part.regions:
        tensor = tensors[tensor_idx]
        sizes = (tensor.stride(0), page_bytes, offset - part.start)
        rows.append((tensor.data_ptr(), *(size // width for size in sizes)))
    regions = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(tensors[0].device)
    widest = max(region.page_bytes for region in part.regions) // width
    tile = min(MOST_WORDS, max(LEAST_WORDS, triton.next_power_of_2(widest)))
    return width, regions, tile, -(-widest // tile)


def word_bytes(part: Part, tensors: Sequence[torch.Tensor]) -> int:
    """Return the widest word that divides all sizes and places of a part."""
    numbers = [8, part.num_bytes]
    for tensor_idx, offset, page_bytes in part.regions:
        tensor = tensors[tensor_idx]
        numbers += [page_bytes, offset - part.start, int(tensor.stride(0)), tensor.data_ptr()]
    return math.gcd(*numbers)
