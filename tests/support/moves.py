"""Moves made by hand, for tests of copiers without an engine."""

import numpy as np

from kvoffload.transfer.layout import ChunkMove, Moves


def moves_of(*chunks: ChunkMove) -> Moves:
    """Put chunks together in the order given; their numbers need not make sense."""
    begin, columns = 0, []
    for slot, group_idx, first, ids in chunks:
        columns.append((slot, group_idx, first, begin, len(ids)))
        begin += len(ids)
    blocks = np.concatenate([chunk.block_ids for chunk in chunks], dtype=np.int32)
    return Moves(np.array(columns, np.int64).T.copy(), blocks)


def move(slot: int, blocks: list[int], first: int = 0, group_idx: int = 0) -> ChunkMove:
    """Make one chunk's move; of a whole chunk, of group 0, unless told."""
    return ChunkMove(slot, group_idx, first, np.array(blocks, np.int32))
