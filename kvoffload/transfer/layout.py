"""The layout of a chunk in a host slot, and the cut of a transfer's blocks into chunks.

In a slot, a chunk is its tensors one after the other, and within a tensor its blocks in order::

    | tensor 0: block 0, block 1, ... | tensor 1: block 0, block 1, ... | ... | padding to 4096 |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.messages import (
    BlockIds,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadKey,
    get_offload_group_idx,
)
from kvoffload.transfer.slab import Slab

Numbers = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
PAGE = 4096
"""Slots and chunk payloads are multiples of this, so that any of them can be read with O_DIRECT."""


class Region(NamedTuple):
    """The place of one tensor's part of a chunk in a slot."""

    tensor_idx: int
    offset: int
    page_bytes: int


class ChunkMove(NamedTuple):
    """Blocks of one chunk to copy: ``block_ids[i]`` is block ``first + i`` of the chunk."""

    host_slot: int
    group_idx: int
    first: int
    block_ids: BlockIds


@dataclass(eq=False, repr=False, slots=True)
class Moves(LoadStoreSpec):
    """The chunks of a transfer as arrays, so that thousands of them cost no Python object each.

    It is the GPU end of a transfer, cut into chunks of which each has its host slot.
    """

    chunks: Numbers
    """Five rows, a column for each chunk. The rows are: host slot, group, number of the first block
    in the chunk, place of that block in ``block_ids``, number of blocks."""
    block_ids: BlockIds
    """The blocks of all chunks."""

    @staticmethod
    def medium() -> str:
        return "GPU"

    def __len__(self) -> int:
        return int(self.chunks.shape[1])

    def __iter__(self) -> Iterator[ChunkMove]:
        """Yield chunk after chunk, for copiers that copy them one by one."""
        for slot, group_idx, first, start, count in self.chunks.T.tolist():
            yield ChunkMove(slot, group_idx, first, self.block_ids[start : start + count])

    @property
    def host_slots(self) -> Numbers:
        """The slot of each chunk."""
        slots: Numbers = self.chunks[0]
        return slots

    def take(self, which: Sequence[int] | slice | npt.NDArray[np.integer | np.bool_]) -> "Moves":
        """Return some of the chunks, by number; the blocks are shared."""
        return Moves(self.chunks[:, which], self.block_ids)

    def of_group(self, group_idx: int) -> "Moves":
        """Return the chunks of one group."""
        return self.take(self.chunks[1] == group_idx)


def joined(parts: Sequence[Moves]) -> Moves:
    """Return the chunks of several transfers as those of one."""
    starts = np.cumsum([0, *(len(part.block_ids) for part in parts[:-1])])
    chunks = np.concatenate([part.chunks for part in parts], axis=1)
    chunks[3] += np.repeat(starts, [len(part) for part in parts])
    return Moves(chunks, np.concatenate([part.block_ids for part in parts]))


class ChunkLayout:
    """Sizes and regions of chunks, for each KV cache group.

    Args:
        kv_caches: the canonical views.
        blocks_per_chunk: blocks in a chunk; one number for all groups, or one for each.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int | Sequence[int]) -> None:
        if isinstance(blocks_per_chunk, int):
            blocks_per_chunk = [blocks_per_chunk] * len(kv_caches.group_data_refs)
        self.per_chunk = tuple(blocks_per_chunk)
        """Blocks in a chunk of each group."""
        self.chunk_blocks = np.array(self.per_chunk, np.int64)
        """The same numbers as an array."""
        self.num_blocks = min((len(entry.tensor) for entry in kv_caches.tensors), default=0)
        """Blocks that every tensor has."""
        self.regions: list[tuple[Region, ...]] = []
        self.payload_bytes: list[int] = []
        """Bytes of a chunk of each group as tiers store it: padded to whole pages."""
        num_groups = len(kv_caches.group_data_refs)
        self._block_bytes = np.array(list(map(kv_caches.block_bytes, range(num_groups))), np.int64)
        for refs, count in zip(kv_caches.group_data_refs, self.per_chunk, strict=True):
            regions, offset = [], 0
            for ref in refs:
                regions.append(Region(ref.tensor_idx, offset, ref.page_size_bytes))
                offset += ref.page_size_bytes * count
            self.regions.append(tuple(regions))
            self.payload_bytes.append(-(-offset // PAGE) * PAGE)

    @property
    def description(self) -> str:
        """A fact of the namespace: with another text nothing that is stored would be found."""
        pages = [[region.page_bytes for region in regions] for regions in self.regions]
        return f"tensor-major-1 {pages}"

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for a chunk of any group."""
        return max(self.payload_bytes)

    def moves(
        self, gpu: GPULoadStoreSpec, host_slots: Sequence[int] | BlockIds | None = None
    ) -> Moves:
        """Cut the GPU end of a transfer into chunks, in the order of ``host_slots``.

        None: the slots come later. Each is -1 then, which no transfer takes.

        Raises:
            ValueError: the blocks do not make up exactly that many chunks.
        """
        cuts = [
            (group_idx, size, index % per_chunk, per_chunk)
            for group_idx, (size, index, per_chunk) in enumerate(
                zip(gpu.group_sizes, gpu.block_indices, self.per_chunk, strict=False)
            )
            if size
        ]
        counts = [-(-(first + size) // per_chunk) for _, size, first, per_chunk in cuts]
        num_chunks = sum(counts)
        if host_slots is not None and len(host_slots) != num_chunks:
            raise ValueError(
                f"{len(gpu.block_ids)} blocks in groups of {gpu.group_sizes} from index "
                f"{gpu.block_indices} are not {len(host_slots)} chunks of "
                f"{' or '.join(map(str, dict.fromkeys(self.per_chunk)))} blocks"
            )
        chunks = np.empty((5, num_chunks), np.int64)
        chunks[0] = -1 if host_slots is None else host_slots
        start = at = 0
        for (group_idx, size, first, per_chunk), count in zip(cuts, counts, strict=True):
            mine = chunks[1:, at : at + count]
            mine[0], mine[1], mine[3] = group_idx, 0, per_chunk
            mine[2] = np.arange(start - first, start - first + count * per_chunk, per_chunk)
            # The first chunk may begin within, and the last one end within.
            mine[1, 0] = first
            mine[2, 0] = start
            mine[3, 0] -= first
            mine[3, -1] -= count * per_chunk - first - size
            start += size
            at += count
        return Moves(chunks, gpu.block_ids)

    def sizes(self, keys: Sequence[OffloadKey]) -> int | list[int]:
        """Return the bytes of each of these chunks as tiers store it; one number if all agree."""
        if len(set(self.payload_bytes)) == 1:
            return self.payload_bytes[0]
        return [self.payload_bytes[get_offload_group_idx(key)] for key in keys]

    def bytes_of(self, moves: Moves) -> int:
        """Bytes of these blocks."""
        return int(self._block_bytes[moves.chunks[1]] @ moves.chunks[4])


def numbered(counts: Numbers) -> tuple[Numbers, Numbers]:
    """List the members of groups of these sizes: the group of each, and its number in the group."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (counts.cumsum() - counts)[which]


def check_moves(moves: Moves, to_host: bool, layout: ChunkLayout, slab: Slab) -> None:
    """Refuse moves that are out of range or write one place twice.

    Raises:
        ValueError: naming the indices.
    """
    slots, groups, firsts, _, counts = moves.chunks
    per_chunk = layout.chunk_blocks[groups]
    if (too_long := firsts + counts > per_chunk).any():
        i = int(too_long.argmax())
        raise ValueError(
            f"host slot {slots[i]}: blocks {firsts[i]}..{firsts[i] + counts[i] - 1} "
            f"of a chunk of {per_chunk[i]}"
        )
    # A chunk larger than a row also uses the rows after it.
    num_rows = [-(-size // slab.slot_bytes) for size in layout.payload_bytes]
    if max(num_rows) > 1:
        rows = np.array(num_rows)[groups]
        _refuse_outside("host slots", slots, slab.num_slots, slots + rows - 1)
        which, nth = numbered(rows)
        slots = slots[which] + nth
    ends = ("host slots", slots, slab.num_slots), ("block ids", moves.block_ids, layout.num_blocks)
    target, source = ends if to_host else ends[::-1]
    what, written, limit = target
    _refuse_outside(*source)
    in_order = written.copy()
    in_order.sort()
    if len(in_order) and not 0 <= in_order[0] <= in_order[-1] < limit:
        _refuse_outside(*target)
    again = in_order[1:] == in_order[:-1]
    if again.any():
        repeated = np.unique(in_order[1:][again]).tolist()
        raise ValueError(f"{what} {repeated}: written twice")


def check_within(memory: memoryview, moves: Moves, layout: ChunkLayout) -> None:
    """Refuse moves from such memory, each from its first byte, that are not within it.

    Raises:
        ValueError: naming the places.
    """
    starts, sizes = moves.host_slots, np.array(layout.payload_bytes)[moves.chunks[1]]
    if (starts < 0).any() or (starts > memory.nbytes - sizes).any():
        raise ValueError(f"chunks at {starts.tolist()} of {memory.nbytes} bytes")


def _refuse_outside(
    what: str, numbers: Integers, limit: int, lasts: Integers | None = None
) -> None:
    """Refuse numbers, or ranges from them to ``lasts``, that are not within 0 and the limit."""
    lasts = numbers if lasts is None else lasts
    if len(numbers) and (numbers.min() < 0 or lasts.max() >= limit):
        strange = numbers[(numbers < 0) | (lasts >= limit)].tolist()
        raise ValueError(f"{what} {strange}: out of range, there are {limit}")
