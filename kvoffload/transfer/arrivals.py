"""Chunks that arrive on other threads, handed to the I/O loop as many at once as there are."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence


class Arrivals:
    """Gathers what arrives until the loop gets round to it: a busy loop is not called for each.

    Made on the loop.

    Args:
        take: called on the loop with what has arrived since it was last called.
    """

    def __init__(self, take: Callable[[Sequence[int]], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._new: deque[int] = deque()
        self._called = False

    def add(self, i: int) -> None:
        """Something arrived; from any thread, returns at once."""
        self._new.append(i)
        if not self._called:
            self._called = True
            # A loop that was closed meanwhile refuses: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        # First, so that what is added from now on calls again.
        self._called = False
        self._take([self._new.popleft() for _ in range(len(self._new))])
