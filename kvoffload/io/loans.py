"""Chunks that stay in a server's memory while an engine copies them from there.

A *loan* is one message of them. It ends when the engine releases it, or reads nothing any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, runtime_checkable

from kvoffload.backends.base import ReadsEach
from kvoffload.io.protocol import Lent, Load, ToClient

AT_ONCE = 256
"""Chunks that are looked up while nothing else has a turn."""


@runtime_checkable
class Lends(ReadsEach, Protocol):
    """A store above memory that engines map."""

    async def verify(self, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Check chunks in the memory, so that they can be lent."""
        ...

    def lend(
        self, keys: Sequence[bytes], sizes: Sequence[int]
    ) -> tuple[list[int], Callable[[], None]]:
        """Lend chunks; return the first byte of each, -1 for those that are not lent, and the end.

        The second must be called once the chunks are not read any more; harmless a second time.
        """
        ...


class Loans:
    """The loans of one session; used on its event loop.

    Args:
        send: sends a message to the engine.
    """

    def __init__(self, send: Callable[[ToClient], None]) -> None:
        self._send = send
        self.may_begin = False
        """Whether the engine has the memory."""
        self._numbers = count(1)
        self._ends: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    async def lend(self, order: Load, store: Lends, ok: bytearray) -> None:
        """Lend the chunks of a load that are in the memory, and count them as good."""
        for start in range(0, len(ok), AT_ONCE):
            left = [i for i in range(start, min(start + AT_ONCE, len(ok))) if not ok[i]]
            if left := self.lend_verified(order, store, ok, left):
                await store.verify([order.keys[i] for i in left], order.sizes_of(left))
                self.lend_verified(order, store, ok, left)
            await asyncio.sleep(0)

    def lend_verified(
        self, order: Load, store: Lends, ok: bytearray, places: Sequence[int]
    ) -> list[int]:
        """Lend those of these chunks that are verified; return the places of the rest."""
        keys = order.keys
        starts, end = store.lend([keys[i] for i in places], order.sizes_of(places))
        lent = {i: start for i, start in zip(places, starts, strict=True) if start >= 0}
        if lent:
            number = next(self._numbers)
            self._ends[number] = end
            for i in lent:
                ok[i] = 1
            self._send(Lent(order.job, number, list(lent), list(lent.values())))
        return [i for i in places if i not in lent]

    def release(self, number: int) -> None:
        """End a loan; one that is unknown is none of this engine."""
        if end := self._ends.pop(number, None):
            end()

    def release_all(self) -> None:
        """End all loans: the engine reads nothing any more."""
        for number in list(self._ends):
            self.release(number)
