"""The order in which free blocks are reused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.errors import InsufficientMemoryError, UsageError

_FEW = 12
_NOWHERE = -1


class FreeBlockQueue:
    """Free blocks in reuse order: a stack of blocks without contents, then a queue of the others.

    The queue is a long row of block ids; ``place[block]`` says where in the row a block's entry
    is. Taking a block out of the middle only clears its place: the entry left behind is skipped
    later. When the row's end is reached, live entries move to its front, which happens at most
    once in ``num_blocks`` appends. All operations are O(1) a block, amortised.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks - 1
        self._capacity = 2 * num_blocks
        self._stack = list(range(num_blocks - 1, 0, -1))
        self._head = self._tail = 0
        self._row = array("i", bytes(4 * self._capacity))
        self._place = array("i", [_NOWHERE]) * num_blocks
        self._rows: npt.NDArray[np.int32] = np.frombuffer(self._row, dtype=np.int32)
        self._places: npt.NDArray[np.int32] = np.frombuffer(self._place, dtype=np.int32)

    def pop(self, count: int) -> list[int]:
        """Take the next ``count`` blocks out of the order.

        Raises:
            InsufficientMemoryError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise InsufficientMemoryError(f"{count} blocks wanted, {self.num_free} are free")
        self.num_free -= count
        stack = self._stack
        if count == 1 and stack:
            return [stack.pop()]
        blocks: list[int] = []
        if stack and count:
            blocks = stack[-count:]
            blocks.reverse()
            del stack[-count:]
        missing = count - len(blocks)
        if missing > _FEW:
            self._pop_many(missing, blocks)
        elif missing:
            self._pop_few(missing, blocks)
        return blocks

    def _pop_few(self, count: int, into: list[int]) -> None:
        row, place, head = self._row, self._place, self._head
        while count:
            block = row[head]
            if place[block] == head:
                place[block] = _NOWHERE
                into.append(block)
                count -= 1
            head += 1
        self._head = head

    def _pop_many(self, count: int, into: list[int]) -> None:
        while count:
            head = self._head
            end = min(head + count, self._tail)
            window = self._rows[head:end]
            live = window[self._places[window] == np.arange(head, end, dtype=np.int32)]
            self._places[live] = _NOWHERE
            into += live.tolist()
            count -= len(live)
            self._head = end

    def remove(self, blocks: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Take these blocks, which have contents, out of the middle of the order."""
        self.num_free -= len(blocks)
        if len(blocks) <= _FEW:
            for block in blocks:
                self._place[block] = _NOWHERE
        else:
            self._places[blocks] = _NOWHERE

    def append(self, blocks: Sequence[int]) -> None:
        """Add blocks with contents at the end, the first to be reused first."""
        count = len(blocks)
        if not count:
            return
        if self._tail + count > self._capacity:
            self._compact()
        tail = self._tail
        self.num_free += count
        self._tail = tail + count
        if count <= _FEW:
            for offset, block in enumerate(blocks, tail):
                self._row[offset] = block
                self._place[block] = offset
            return
        ids = np.array(blocks, dtype=np.int32)
        self._rows[tail : tail + count] = ids
        self._places[ids] = np.arange(tail, tail + count, dtype=np.int32)

    def prepend(self, blocks: Sequence[int]) -> None:
        """Add blocks without contents at the front, in this order."""
        self.num_free += len(blocks)
        self._stack += blocks[::-1]

    def _compact(self) -> None:
        window = self._rows[self._head : self._tail]
        at = np.arange(self._head, self._tail, dtype=np.int32)
        live = window[self._places[window] == at]
        self._rows[: len(live)] = live
        self._places[live] = np.arange(len(live), dtype=np.int32)
        self._head, self._tail = 0, len(live)

    def in_order(self) -> list[int]:
        """List the free blocks, the next to be reused first."""
        queued = [
            self._row[i] for i in range(self._head, self._tail) if self._place[self._row[i]] == i
        ]
        return self._stack[::-1] + queued

    def check(self) -> set[int]:
        """Verify the invariants and return the free blocks; for tests.

        Raises:
            UsageError: a block is listed twice, or the count is wrong.
        """
        order = self.in_order()
        free = set(order)
        if len(free) != len(order) or len(order) != self.num_free:
            raise UsageError(f"{self.num_free} blocks are free, but the order is {order}")
        return free
