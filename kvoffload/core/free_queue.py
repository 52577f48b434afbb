"""The order in which free blocks are reused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvoffload.core.block_index import FEW, Ints
from kvoffload.errors import InsufficientMemoryError

_NOWHERE = -1


class FreeBlockQueue:
    """Free blocks in reuse order: a stack of blocks without contents, then a queue of the rest.

    The queue is a long row of block numbers; ``place[block]`` is the index of a block's entry.
    Taking a block out of the middle only clears its place: the stale entry is skipped later. When
    the row's end is reached, live entries move to its front, at most once in ``num_blocks / 2``
    appends. All operations are O(1) a block, amortised.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks - 1
        self._head = self._tail = 0
        self._top = num_blocks - 1
        self._stack = array("i", range(num_blocks - 1, -1, -1))
        self._row = array("i", bytes(4 * (num_blocks + num_blocks // 2 + FEW)))
        self._place = array("i", [_NOWHERE]) * num_blocks
        self._stacks: Ints = np.frombuffer(self._stack, dtype=np.int32)
        self._rows: Ints = np.frombuffer(self._row, dtype=np.int32)
        self._places: Ints = np.frombuffer(self._place, dtype=np.int32)

    def pop(self, count: int) -> Ints:
        """Take the next ``count`` blocks out of the order.

        Raises:
            InsufficientMemoryError: fewer are free; nothing is taken.
        """
        self._claim(count)
        top = self._top
        self._top = bottom = max(top - count, 0)
        stacked = self._stacks[bottom:top][::-1]
        if len(stacked) == count:
            return stacked.copy()
        return np.concatenate([stacked, *self._pop_row(count - len(stacked))])

    def pop_few(self, count: int) -> list[int]:
        """Do as :meth:`pop` does, for a handful."""
        self._claim(count)
        blocks: list[int] = []
        while count and self._top:
            self._top -= 1
            blocks.append(self._stack[self._top])
            count -= 1
        row, place = self._row, self._place
        while count:
            head = self._head
            self._head = head + 1
            block = row[head]
            if place[block] == head:
                place[block] = _NOWHERE
                blocks.append(block)
                count -= 1
        return blocks

    def _claim(self, count: int) -> None:
        if count > self.num_free:
            raise InsufficientMemoryError(f"{count} blocks wanted, {self.num_free} are free")
        self.num_free -= count

    def _pop_row(self, count: int) -> list[Ints]:
        parts = []
        while count:
            head = self._head
            self._head = end = min(head + count, self._tail)
            live = self._live(head, end)
            self._places[live] = _NOWHERE
            parts.append(live)
            count -= len(live)
        return parts

    def _live(self, head: int, end: int) -> Ints:
        window = self._rows[head:end]
        live: Ints = window[self._places[window] == np.arange(head, end, dtype=np.int32)]
        return live

    def remove(self, blocks: Sequence[int] | Ints) -> None:
        """Take these blocks, which have contents, out of the middle of the order."""
        self.num_free -= len(blocks)
        if len(blocks) <= FEW:
            for block in blocks:
                self._place[block] = _NOWHERE
        else:
            self._places[blocks] = _NOWHERE

    def append(self, blocks: Sequence[int] | Ints) -> None:
        """Add blocks with contents at the end, the first to be reused first."""
        count = len(blocks)
        if self._tail + count > len(self._row):
            live = self._live(self._head, self._tail)
            self._rows[: len(live)] = live
            self._places[live] = np.arange(len(live), dtype=np.int32)
            self._head, self._tail = 0, len(live)
        tail = self._tail
        self.num_free += count
        self._tail = tail + count
        if count <= FEW:
            for offset, block in enumerate(blocks, tail):
                self._row[offset] = block
                self._place[block] = offset
        else:
            self._rows[tail : tail + count] = blocks
            self._places[blocks] = np.arange(tail, tail + count, dtype=np.int32)

    def prepend(self, blocks: Sequence[int] | Ints) -> None:
        """Add blocks without contents at the front, in this order."""
        count = len(blocks)
        self.num_free += count
        self._stacks[self._top : self._top + count] = blocks[::-1]
        self._top += count
