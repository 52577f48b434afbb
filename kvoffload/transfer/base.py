"""The interface of every copier, and the fences between copies and the engine's work.

A *fence* is a point in a stream of work. It is done when all work before it is done.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from kvoffload.io.lent_memory import LentMemory
from kvoffload.transfer.layout import Moves


class Fence(Protocol):
    """A point in the engine's stream of work."""

    def wait(self) -> None:
        """Block until it is done."""
        ...


class CopyFence:
    """The end of a transfer's copies. The copying thread reaches it; any thread may wait for it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """Of the copies, once done: the bytes after it must not be used."""
        self.copy_time_s = 0.0
        """Seconds from the transfer's first copy to its end, once done; 0 if it failed.

        The transfer begins when the engine's work before it and earlier transfers are done. Neither
        wait counts."""
        self._is_reached = False
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether all of them are done; never blocks."""
        return self._is_reached

    def wait(self) -> None:
        """Block until they are."""
        with self._changed:
            self._changed.wait_for(self.done)

    def reach(self, error: BaseException | None = None, copy_time_s: float = 0.0) -> None:
        """Mark the end; harmless a second time."""
        with self._changed:
            self.error = self.error or error
            self.copy_time_s = copy_time_s
            self._is_reached = True
            self._changed.notify_all()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def when_reached(self, call: Callable[[], None]) -> None:
        """Call this once at the end, on the thread that reaches it; now if it is reached.

        The call must neither wait nor raise.
        """
        with self._changed:
            if not self._is_reached:
                self._calls.append(call)
                return
        call()


class Copier(Protocol):
    """Launches copies that run in the background.

    Copies run in any order, also those of one direction. A copy that must follow another is
    launched when the fence of the other is done.
    """

    def record_fence(self) -> Fence:
        """Mark the engine's stream of work as it is now; called on the engine's thread."""
        ...

    def launch(
        self, moves: Moves, to_host: bool, after: Fence, lent: LentMemory | None = None
    ) -> CopyFence:
        """Begin copies from GPU blocks to host slots, or the reverse.

        Callable from the engine's thread and from the I/O client's thread. Returns at once.

        Args:
            moves: the chunks, which have passed :func:`kvoffload.transfer.layout.check_moves`.
            to_host: which way.
            after: the copies begin once it is done.
            lent: memory of a server that has the chunks whole, in place of the slots. It is not
                left before the copies have ended; each move's host slot is a chunk's first byte.

        Raises:
            UsageError: the copier is closed.
            ValueError: a chunk is not within the memory.
        """
        ...

    def can_borrow(self) -> bool:
        """Whether copies from a loan are as good as from slots; for any thread, never blocks."""
        ...

    def stats(self) -> dict[str, str | int]:
        """Name the way that bytes are copied, and why, for logs and ``stats()`` of connectors."""
        ...

    def close(self) -> None:
        """Finish the launched copies and release threads, streams and buffers."""
        ...
