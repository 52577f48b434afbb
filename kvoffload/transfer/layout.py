"""The layout of a chunk in a host slot, and the cut of a transfer's blocks into chunks.

In a slot, a chunk is its tensors one after the other, and within a tensor its blocks in order::

    | tensor 0: block 0, block 1, ... | tensor 1: block 0, block 1, ... | ... | padding to 4096 |
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat
from operator import mul
from typing import NamedTuple

from kvoffload.messages import (
    BlockIds,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadKey,
    get_offload_group_idx,
)
from kvoffload.transfer.slab import Slab

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
        self.num_blocks = min((len(entry.tensor) for entry in kv_caches.tensors), default=0)
        """Blocks that every tensor has."""
        self.regions: list[tuple[Region, ...]] = []
        self.payload_bytes: list[int] = []
        """Bytes of a chunk of each group as tiers store it: padded to whole pages."""
        self._block_bytes = [
            sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs
        ]
        for refs, count in zip(kv_caches.group_data_refs, self.per_chunk, strict=True):
            regions, offset = [], 0
            for ref in refs:
                regions.append(Region(ref.tensor_idx, offset, ref.page_size_bytes))
                offset += ref.page_size_bytes * count
            self.regions.append(tuple(regions))
            self.payload_bytes.append(-(-offset // PAGE) * PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for a chunk of any group."""
        return max(self.payload_bytes)

    def moves(self, gpu: GPULoadStoreSpec, host_slots: Sequence[int]) -> list[ChunkMove]:
        """Cut the GPU end of a transfer into chunks, in the order of ``host_slots``.

        Raises:
            ValueError: the blocks do not make up exactly that many chunks.
        """
        # Every submission runs this: one call for all chunks of a group is fastest.
        moves: list[ChunkMove] = []
        start = count = 0
        for group_idx, size in enumerate(gpu.group_sizes):
            if not size:
                continue
            per_chunk = self.per_chunk[group_idx]
            first = gpu.block_indices[group_idx] % per_chunk
            pieces = _cut(gpu.block_ids[start : start + size], first, per_chunk)
            firsts = chain((first,), repeat(0))
            slots = host_slots[count:]
            fields = zip(slots, repeat(group_idx), firsts, pieces, strict=False)
            moves.extend(map(tuple.__new__, repeat(ChunkMove), fields))  # four times as fast
            start += size
            count += len(pieces)
        if count != len(host_slots):
            raise ValueError(
                f"{len(gpu.block_ids)} blocks in groups of {gpu.group_sizes} from index "
                f"{gpu.block_indices} are not {len(host_slots)} chunks of "
                f"{' or '.join(map(str, dict.fromkeys(self.per_chunk)))} blocks"
            )
        return moves

    def views(
        self, slab: Slab, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> list[memoryview]:
        """Return the payloads of these chunks in their slots; writable, not copies."""
        return [
            slab.slot(slot, self.payload_bytes[get_offload_group_idx(key)])
            for key, slot in zip(keys, slots, strict=True)
        ]

    def bytes_of(self, gpu: GPULoadStoreSpec) -> int:
        """Bytes of these blocks."""
        return sum(map(mul, gpu.group_sizes, self._block_bytes))


def _cut(ids: BlockIds, first: int, per_chunk: int) -> list[BlockIds]:
    """Cut blocks where chunks begin; the first one is block ``first`` of its chunk."""
    head = min(per_chunk - first, len(ids)) if first else 0
    tail = head + (len(ids) - head) // per_chunk * per_chunk
    pieces = [ids[:head]] if head else []
    pieces.extend(ids[head:tail].reshape(-1, per_chunk))
    if tail < len(ids):
        pieces.append(ids[tail:])
    return pieces


def check_moves(
    moves: Sequence[ChunkMove],
    blocks: Sequence[int],
    to_host: bool,
    layout: ChunkLayout,
    slab: Slab,
) -> None:
    """Refuse moves of these blocks that are out of range or write one place twice.

    Raises:
        ValueError: naming the indices.
    """
    # Plain Python is faster than numpy here: most submissions have few moves.
    num_blocks = layout.num_blocks
    num_rows = [-(-size // slab.slot_bytes) for size in layout.payload_bytes]
    last = [slab.num_slots - rows for rows in num_rows]
    per_chunk = layout.per_chunk
    outside = []
    for slot, group_idx, first, ids in moves:
        if not 0 <= slot <= last[group_idx]:
            outside.append(slot)
        if first + len(ids) > per_chunk[group_idx]:
            raise ValueError(
                f"host slot {slot}: blocks {first}..{first + len(ids) - 1} "
                f"of a chunk of {per_chunk[group_idx]}"
            )
    if outside:
        raise ValueError(f"host slots {outside}: out of range, there are {slab.num_slots}")
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
        strange = [block for block in blocks if not 0 <= block < num_blocks]
        raise ValueError(f"block ids {strange}: out of range, there are {num_blocks}")
    if to_host:
        # A chunk larger than a row also uses the rows after it.
        slots = [move.host_slot for move in moves]
        if max(num_rows) > 1:
            slots = [slot + i for slot, group, _, _ in moves for i in range(num_rows[group])]
        _refuse_repeated("host slots", slots)
    else:
        _refuse_repeated("block ids", blocks)


def _refuse_repeated(what: str, numbers: Sequence[int]) -> None:
    if len(set(numbers)) < len(numbers):
        again = sorted(number for number, count in Counter(numbers).items() if count > 1)
        raise ValueError(f"{what} {again}: written twice")
