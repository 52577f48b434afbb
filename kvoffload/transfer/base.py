"""The face that every copier has: what handlers launch copies with, and the fences between them.

A *fence* is a point in a stream of work: it is done when everything before it is done.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvoffload.transfer.layout import ChunkLayout, ChunkMove
from kvoffload.transfer.slab import Slab


class Fence(Protocol):
    """A point in a stream of work."""

    def done(self) -> bool:
        """Whether everything before it has happened; never blocks."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is done; False if ``timeout_s`` passed first."""
        ...

    @property
    def error(self) -> BaseException | None:
        """What went wrong before it, once done: the bytes after it are not to be trusted."""
        ...


class Copier(Protocol):
    """Launches copies that run by themselves, in the order launched for each direction."""

    def record_fence(self) -> Fence:
        """Mark the engine's stream of work as it is now; called on the engine's thread."""
        ...

    def launch(self, moves: Sequence[ChunkMove], to_host: bool, after: Fence) -> Fence:
        """Begin copying GPU blocks to host slots, or the other way, once ``after`` is done.

        Callable from the engine's thread and from the I/O thread. Returns at once.

        Raises:
            ValueError: blocks or slots out of range, or one destination named twice; nothing has
                been launched.
        """
        ...

    def close(self) -> None:
        """Finish what was launched and release threads, streams and buffers."""
        ...


def check_moves(
    moves: Sequence[ChunkMove], to_host: bool, layout: ChunkLayout, num_blocks: int, slab: Slab
) -> None:
    """Refuse moves that would read or write outside, or write one place twice.

    Raises:
        ValueError: naming the indices.
    """
    slots = [move.host_slot for move in moves]
    num_rows = [-(-size // slab.slot_bytes) for size in layout.payload_bytes]
    bad = [
        move.host_slot
        for move in moves
        if not 0 <= move.host_slot <= slab.num_slots - num_rows[move.group_idx]
    ]
    if bad:
        raise ValueError(f"host slots {bad}: out of range, there are {slab.num_slots}")
    for move in moves:
        per_chunk = layout.per_chunk[move.group_idx]
        if move.first + len(move.block_ids) > per_chunk:
            raise ValueError(
                f"host slot {move.host_slot}: blocks {move.first}.."
                f"{move.first + len(move.block_ids) - 1} of a chunk of {per_chunk}"
            )
    ids = np.concatenate([move.block_ids for move in moves]) if moves else np.empty(0, np.int32)
    if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
        bad = ids[(ids < 0) | (ids >= num_blocks)].tolist()
        raise ValueError(f"block ids {bad}: out of range, there are {num_blocks}")
    if to_host and len(set(slots)) < len(slots):
        raise ValueError(f"host slots {slots}: one is written twice")
    if not to_host and len(np.unique(ids)) < len(ids):
        values, counts = np.unique(ids, return_counts=True)
        raise ValueError(f"block ids {values[counts > 1].tolist()}: written twice")
