"""Gather and scatter as one Triton kernel for each portion; imported only if Triton is installed.

Addresses and numbers are integers that Triton does not specialise on. The kernel is therefore
compiled when a copier is made, and not again while an engine serves.
"""

import torch
import triton
import triton.language as tl

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.device import BlockList, Part, Span
from kvoffload.transfer.cuda.kernels import word_bytes

TILE = 2048
"""Words that a program moves at once."""
PROGRAMS = 64
"""The most programs: several times as fast as the bus, and few compared to the engine's kernels."""
_TRITON_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(
    do_not_specialize=[
        "table", "size", "start", "first_chunk", "items", "stage", "regions", "num_regions",
        "tiles", "chunk_words",
    ]
)  # fmt: skip
def _move(
    table,
    size,
    start,
    first_chunk,
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
        block = start + item // tiles // num_regions
        block_id = tl.load(numbers + block)
        chunk = tl.load(numbers + size + block) - first_chunk
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
    """One launch for each portion."""

    name = "triton"

    def __init__(self, kv_caches: CanonicalKVCaches) -> None:
        self._tensors = [entry.tensor for entry in kv_caches.tensors]
        self._regions: dict[Part, tuple[int, torch.Tensor, int]] = {}

    def prepare(self, part: Part, table: BlockList) -> None:
        """Compile both directions and upload the places of the part's regions; moves no page."""
        for to_stage in (True, False):
            self._launch(part, Span(table, 0, 0, 0), table.device, to_stage)

    def gather(self, part: Part, span: Span, stage: torch.Tensor) -> None:
        self._launch(part, span, stage, True)

    def scatter(self, part: Part, span: Span, stage: torch.Tensor) -> None:
        self._launch(part, span, stage, False)

    def _launch(self, part: Part, span: Span, stage: torch.Tensor, to_stage: bool) -> None:
        width, regions, tiles = self._places(part)
        items = span.length * len(part.regions) * tiles
        _move[(max(1, min(PROGRAMS, items)),)](
            span.table.device.data_ptr(),
            span.table.count,
            span.start,
            span.first_chunk,
            items,
            stage.data_ptr(),
            regions.data_ptr(),
            len(part.regions),
            tiles,
            part.num_bytes // width,
            WORD=_TRITON_WORDS[width],
            TILE=TILE,
            TO_STAGE=to_stage,
            num_warps=8,
        )

    def _places(self, part: Part) -> tuple[int, torch.Tensor, int]:
        known = self._regions.get(part)
        if known is None:
            width = word_bytes(part, self._tensors)
            rows = [
                (
                    self._tensors[region.tensor_idx].data_ptr(),
                    self._tensors[region.tensor_idx].stride(0) // width,
                    region.page_bytes // width,
                    (region.offset - part.start) // width,
                )
                for region in part.regions
            ]
            device = self._tensors[0].device
            regions = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(device)
            widest = max(region.page_bytes for region in part.regions) // width
            known = self._regions[part] = (width, regions, -(-widest // TILE))
        return known
