"""The memory of a host's server, as an engine sees it: mapped, and never written."""

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence

_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTDUMP", "MADV_DONTFORK")
"""As on the slab. Copies are faster in large pages; no core file and no child has the chunks."""


class LentMemory:
    """A mapping to read, and its end: the server reads it once no copy uses the memory.

    Args:
        fd: the memory file; closed here.
        pair: ends the use of the memory, for which its writing end is shut down; closed here.
    """

    def __init__(self, fd: int, pair: socket.socket) -> None:
        self._pair, self._lock = pair, threading.Lock()
        self._num_loans, self._has_left = 0, False
        try:
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except BaseException:
            pair.close()
            raise
        finally:
            os.close(fd)
        for name in _ADVICE:
            with contextlib.suppress(OSError, AttributeError):
                mapping.madvise(getattr(mmap, name))
        self.bytes = memoryview(mapping)
        """All of it, read-only."""

    def borrow(
        self, numbers: Sequence[int], starts: Sequence[int], release: Callable[[], None]
    ) -> "Loan":
        """Begin a loan; ``release`` is called at its end."""
        with self._lock:
            self._num_loans += 1
        return Loan(self, numbers, starts, release)

    def ended(self) -> None:
        """Take in that a loan has ended."""
        with self._lock:
            self._num_loans -= 1
            self._tell()

    def leave(self) -> None:
        """Borrow no more. The server learns of it when the last copy has ended."""
        with self._lock:
            self._has_left = True
            self._tell()

    def _tell(self) -> None:
        if self._has_left and not self._num_loans:
            with contextlib.suppress(OSError):  # the server has ended
                self._pair.shutdown(socket.SHUT_WR)
            self._pair.close()


class Loan:
    """Chunks of a load that are in the server's memory, verified, until :meth:`end`."""

    def __init__(
        self,
        memory: LentMemory,
        numbers: Sequence[int],
        starts: Sequence[int],
        release: Callable[[], None],
    ) -> None:
        self._memory, self._release = memory, release
        self.bytes = memory.bytes
        """The server's memory."""
        self.numbers = numbers
        """The chunks, by their places in the load."""
        self.starts = starts
        """The first byte of each."""

    def end(self) -> None:
        """Let the server use the chunks' memory again; once, from any thread, never waits."""
        self._release()
        self._memory.ended()
