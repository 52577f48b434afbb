"""The face that every copier has: what handlers launch copies with, and the fences between them.

A *fence* is a point in a stream of work: it is done when everything before it is done.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

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


class CopyFence(Fence, Protocol):
    """The end of a transfer's copies."""

    @property
    def copy_time_s(self) -> float:
        """Seconds from the transfer's first copy to its end, once done; 0 if it failed.

        The transfer begins when the engine's work before it and earlier transfers are done: neither
        wait counts.
        """
        ...


class Copier(Protocol):
    """Launches copies that run by themselves.

    Copies that were launched run in any order, also those of one direction: whoever launches one
    that must follow another waits for the other's fence first.
    """

    def record_fence(self) -> Fence:
        """Mark the engine's stream of work as it is now; called on the engine's thread."""
        ...

    def check(self, moves: Sequence[ChunkMove], to_host: bool) -> None:
        """Refuse what :meth:`launch` would refuse: for moves that are launched in parts, later.

        Raises:
            ValueError: as there.
        """
        ...

    def launch(self, moves: Sequence[ChunkMove], to_host: bool, after: Fence) -> CopyFence:
        """Begin copying GPU blocks to host slots, or the other way, once ``after`` is done.

        Callable from the engine's thread and from the I/O thread. Returns at once.

        Raises:
            ValueError: blocks or slots out of range, or one destination named twice; nothing has
                been launched.
            RuntimeError: the copier is closed.
        """
        ...

    def stats(self) -> dict[str, str | int]:
        """Say how bytes are copied here and why so, for logs and ``stats()`` of connectors."""
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
    # Plain Python: it is on the way of every submission, mostly of few moves.
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
    blocks = [block for move in moves for block in move.block_ids.tolist()]
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
        strange = [block for block in blocks if not 0 <= block < num_blocks]
        raise ValueError(f"block ids {strange}: out of range, there are {num_blocks}")
    if to_host:
        # A chunk larger than a row takes the rows after it as well.
        slots = [move.host_slot for move in moves]
        if max(num_rows) > 1:
            slots = [slot + i for slot, group, _, _ in moves for i in range(num_rows[group])]
        _refuse_repeated("host slots", slots)
    else:
        _refuse_repeated("block ids", blocks)


def _refuse_repeated(what: str, numbers: list[int]) -> None:
    if len(set(numbers)) < len(numbers):
        again = sorted(number for number, count in Counter(numbers).items() if count > 1)
        raise ValueError(f"{what} {again}: written twice")
