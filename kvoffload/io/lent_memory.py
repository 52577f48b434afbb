"""The memory of a host's server, as an engine sees it: mapped, and never written."""

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

ADVICE = getattr(mmap, "MADV_HUGEPAGE", -1), getattr(mmap, "MADV_DONTDUMP", -1)
"""Of all host memory. Large pages make copies faster; no core file has clients' data."""
NO_FORK = getattr(mmap, "MADV_DONTFORK", -1)
"""Of both ends of lent memory: no child has clients' data."""
_MADV_POPULATE_READ = 22
"""Python's mmap does not name it; Linux has it since 5.14."""
_PORTION_BYTES = 4 << 20
# Once: each CDLL makes a class, which only the garbage collector frees.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


class LentMemory:
    """A mapping to read, and its end: the server reads it once no copy uses the memory.

    A thread maps the pages of the chunks that are there, or the first loads would: page by page,
    twice as long as they take.

    Args:
        fd: the memory file; closed here.
        pair: ends the use of the memory, for which its writing end is shut down; closed here.
    """

    name = "the server's memory"

    def __init__(self, fd: int, pair: socket.socket) -> None:
        self._pair, self._lock = pair, threading.Lock()
        self._num_loans, self._has_left = 0, False
        self._calls: list[Callable[[], None]] = []
        try:
            self.bytes, self.address = _mapped(fd)
            """All of it, read-only, and where it begins."""
            self.num_bytes = self.bytes.nbytes
            work = partial(self._map_pages, fd)
            threading.Thread(target=work, name="kvoffload-map", daemon=True).start()
        except BaseException:
            pair.close()
            os.close(fd)
            raise

    def populate(self, start: int, length: int) -> bool:
        """Allocate nothing: it is the server's, and another thread maps what it has."""
        return False

    def _map_pages(self, fd: int) -> None:
        """Map what the memory has now; pages that have no bytes yet stay away."""
        try:
            for start, length in portions(fd):
                if self._has_left or not advise(self.address + start, length, _MADV_POPULATE_READ):
                    break
        finally:
            os.close(fd)

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

    def when_left(self, call: Callable[[], None]) -> None:
        """Call this once when the last loan of this memory has ended; during a loan, any thread."""
        with self._lock:
            self._calls.append(call)

    def leave(self) -> None:
        """Borrow no more. The server learns of it when the last copy has ended."""
        with self._lock:
            self._has_left = True
            self._tell()

    def _tell(self) -> None:
        if self._has_left and not self._num_loans:
            while self._calls:
                self._calls.pop()()
            with contextlib.suppress(OSError):  # the server has ended
                self._pair.shutdown(socket.SHUT_WR)
            self._pair.close()


def _mapped(fd: int) -> tuple[memoryview, int]:
    """Map a file to read; return it, and its address, which Python's own mmap does not tell.

    Raises:
        OSError: the system refuses.
    """
    size = os.fstat(fd).st_size
    sizes = ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0)
    address = _libc.mmap(None, *sizes)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapping = (ctypes.c_char * size).from_address(address)
    unmap = weakref.finalize(mapping, _unmap, os.getpid(), address, size)
    unmap.atexit = False  # a thread may copy until the process ends
    for advice in (*ADVICE, NO_FORK):
        advise(address, size, advice)
    return memoryview(mapping).toreadonly().cast("B"), address


def _unmap(pid: int, address: int, size: int) -> None:
    if os.getpid() == pid:  # a forked child has other memory there: see NO_FORK
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


def advise(address: int, length: int, advice: int) -> bool:
    """Advise the kernel, without the GIL; return whether it follows."""
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


def portions(fd: int, end: int = 0) -> Iterator[tuple[int, int]]:
    """List the parts of a memory file that have bytes, from a place on, as (start, length)."""
    with contextlib.suppress(OSError):  # no more of them
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            hole = os.lseek(fd, start, os.SEEK_HOLE)
            end = min(hole, start + _PORTION_BYTES)
            yield start, end - start


@dataclass(eq=False)
class Loan:
    """Chunks of a load that are in the server's memory, verified, until :meth:`end`."""

    memory: LentMemory
    numbers: Sequence[int]
    """The chunks, by their places in the load."""
    starts: Sequence[int]
    """The first byte of each."""
    release: Callable[[], None]
    """Tells the server of the end."""

    def end(self) -> None:
        """Let the server use the chunks' memory again; once, from any thread, never waits."""
        self.release()
        self.memory.ended()
