"""The arithmetic of copies: which pages are staged, and which bytes go where.

Pages of a block are small and scattered; a slot has a chunk in one piece. Small pages are gathered
into staging memory on the device first, so that the bus carries few large copies. Larger pages are
copied to their place in the slot directly.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.staged_blocks import Part
from kvoffload.transfer.layout import ChunkLayout, Moves, Numbers, Region, numbered

MOST_BLOCKS = 4096
"""In a staged portion, whose table lists them."""
FIRST_COPIES = 64
"""In a transfer's first step of direct copies: the bus idles until the driver has taken in a batch.
Each later step has four times as many."""
MOST_COPIES = 4096
MOST_BYTES = 64 << 20
"""In one step of direct copies."""


def many() -> int:
    """Return how many copies a step may have where many are one call of the driver."""
    return MOST_COPIES


class CopyPlan:
    """The way of each group's chunks between blocks and slots.

    The slots of all moves here are the first bytes of chunks: see :func:`in_bytes`.

    Args:
        stage_bytes: staging memory for one gather; at least the size of the largest region.
        direct_page_bytes: pages of this size and more are not staged.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: ChunkLayout,
        stage_bytes: int,
        direct_page_bytes: int,
    ) -> None:
        self._payloads = np.array(layout.payload_bytes)
        self._tensors = [entry.tensor for entry in kv_caches.tensors]
        # One row for each of a group's regions: address, bytes from block to block, place, page.
        self._regions = [self._describe(regions) for regions in layout.regions]
        staged = [
            (regions, count)
            if sum(region.page_bytes for region in regions) < direct_page_bytes * len(regions)
            else ()
            for regions, count in zip(layout.regions, layout.per_chunk, strict=True)
        ]
        widest = max(
            (r.page_bytes * group[1] for group in staged if group for r in group[0]), default=0
        )
        self.stage_bytes = max(stage_bytes, widest) if widest else 0
        self.parts = [tuple(self._cut(*group)) if group else () for group in staged]
        """For each group, the regions that are staged together; none if its pages are direct."""
        self.table_blocks = max(
            (self._chunks_at_once(part) * part.per_chunk for parts in self.parts for part in parts),
            default=0,
        )
        """Blocks of the largest portion."""

    def _describe(self, regions: Sequence[Region]) -> Numbers:
        rows = []
        for tensor_idx, offset, page_bytes in regions:
            tensor = self._tensors[tensor_idx]
            rows.append((tensor.data_ptr(), tensor.stride(0), offset, page_bytes))
        return np.array(rows, np.int64).reshape(-1, 4, 1)

    def _cut(self, regions: Sequence[Region], count: int) -> Iterator[Part]:
        """Cut where staging memory is full; in a slot, a group's regions are contiguous."""
        begin = 0
        for i in range(1, len(regions) + 1):
            length = sum(region.page_bytes for region in regions[begin : i + 1]) * count
            if i == len(regions) or length > self.stage_bytes:
                mine = tuple(regions[begin:i])
                num_bytes = sum(region.page_bytes for region in mine) * count
                yield Part(mine, mine[0].offset, count, num_bytes)
                begin = i

    def _chunks_at_once(self, part: Part) -> int:
        by_table = MOST_BLOCKS // part.per_chunk
        return max(1, min(self.stage_bytes // part.num_bytes, by_table))

    def host_end(self, moves: Moves) -> int:
        """Return where in host memory the last of these chunks ends."""
        starts, groups, *_ = moves.chunks
        return int((starts + self._payloads[groups]).max(initial=0))

    # ---- staged ----

    def portions(self, part: Part, moves: Moves, most: Callable[[], int] = many) -> Iterator[Moves]:
        """Divide a group's chunks into portions that fit staging memory and a table.

        Args:
            part: of the chunks.
            moves: the chunks.
            most: asked before each portion how many chunks it may have.
        """
        begin, at_once = 0, self._chunks_at_once(part)
        while begin < len(moves):
            end = begin + min(at_once, most())
            yield moves.take(slice(begin, end))
            begin = end

    def stage_copies(self, part: Part, moves: Moves, stage: int) -> Copies:
        """Return the copies between slots and staging memory at this address."""
        host, _, firsts, _, counts = moves.chunks
        device = np.arange(len(moves)) * part.num_bytes + stage
        whole = counts == part.per_chunk
        sizes = np.full(whole.sum(), part.num_bytes)
        copies = Copies(device[whole], host[whole] + part.start, sizes)
        if len(copies.sizes) < len(moves):
            # The rest of these chunks must stay as it is, at both ends.
            rest = ~whole
            _, _, offsets, pages = self._describe(part.regions).transpose(1, 0, 2)
            within = offsets + firsts[rest] * pages
            some = Copies(
                (device[rest] + within - part.start).ravel(),
                (host[rest] + within).ravel(),
                (counts[rest] * pages).ravel(),
            )
            copies = Copies(*map(np.concatenate, zip(copies, some, strict=True)))
        return copies.joined()

    # ---- direct ----

    def page_copies(
        self, group_idx: int, moves: Moves, most: Callable[[], int] = many
    ) -> Iterator[Copies]:
        """Return the copies between slots and a group's blocks, in steps that grow.

        Args:
            group_idx: of the group.
            moves: its chunks.
            most: asked before each step how many copies it may have, unless one block has more.
        """
        addresses, rows, offsets, pages = self._regions[group_idx].transpose(1, 0, 2)
        num_regions, block_bytes = len(pages), int(pages.sum())
        if not num_regions:
            return
        ids, chunks, within = blocks_of(moves)
        host = moves.host_slots[chunks]
        begin, num_copies = 0, FIRST_COPIES
        while begin < len(ids):
            num_blocks = min(num_copies, most()) // num_regions
            at_once = max(1, min(num_blocks, MOST_BYTES // block_bytes))
            some = slice(begin, begin + at_once)
            begin, num_copies = begin + at_once, 4 * num_copies
            device = addresses + ids[some] * rows
            yield Copies(
                device.ravel(),
                (host[some] + offsets + within[some] * pages).ravel(),
                np.broadcast_to(pages, device.shape).ravel(),
            ).joined()


def in_bytes(moves: Moves, slot_bytes: int) -> Moves:
    """Return these chunks with the first byte of each in the place of its slot."""
    chunks = moves.chunks.copy()
    chunks[0] *= slot_bytes
    return Moves(chunks, moves.block_ids)


def blocks_of(moves: Moves) -> tuple[Numbers, Numbers, Numbers]:
    """List all blocks: id, number of the chunk, place in the chunk."""
    _, _, firsts, starts, counts = moves.chunks
    chunks, nth = numbered(counts)
    ids = moves.block_ids[starts[chunks] + nth].astype(np.int64)
    return ids, chunks, firsts[chunks] + nth
