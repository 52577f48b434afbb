"""The face that every copier has: what handlers launch copies with, and the fences between them.

A *fence* is a point in a stream of work: it is done when everything before it is done.
"""

from collections.abc import Sequence
from typing import Protocol

from kvoffload.transfer.layout import ChunkMove


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

    def launch(self, moves: Sequence[ChunkMove], to_host: bool, after: Fence) -> CopyFence:
        """Begin copying GPU blocks to host slots, or the other way, once ``after`` is done.

        The moves have passed :func:`kvoffload.transfer.layout.check_moves`. Callable from the
        engine's thread and from the I/O thread. Returns at once.

        Raises:
            RuntimeError: the copier is closed.
        """
        ...

    def stats(self) -> dict[str, str | int]:
        """Say how bytes are copied here and why so, for logs and ``stats()`` of connectors."""
        ...

    def close(self) -> None:
        """Finish what was launched and release threads, streams and buffers."""
        ...
