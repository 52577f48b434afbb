"""When an engine reads the server's memory no more: it says so, or its process has ended."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator


class MemoryReader:
    """An engine that has the server's memory mapped.

    Args:
        pair: the engine shuts its end down once none of its copies uses the memory.
        pid_fd: readable when its process has ended; -1 if the kernel does not tell.
    """

    def __init__(self, pair: socket.socket, pid_fd: int) -> None:
        self._pair, self._pid_fd = pair, pid_fd

    async def gone(self) -> None:
        """Wait until it reads nothing, however long it lives or is stopped."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        says_so = loop.create_task(self._said_so(loop))
        says_so.add_done_callback(lambda _: has_ended.set())
        if self._pid_fd >= 0:  # a forked child may have the pair for longer
            loop.add_reader(self._pid_fd, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            if self._pid_fd >= 0:
                loop.remove_reader(self._pid_fd)
            says_so.cancel()
            await asyncio.wait([says_so])  # it watches the pair, which is closed next

    async def _said_so(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):
            while await loop.sock_recv(self._pair, 1 << 10):
                pass


@contextlib.contextmanager
def reader_of(pair: socket.socket, pid: int) -> Iterator[MemoryReader]:
    """Watch an engine from now on, while the number of its process is surely its own."""
    try:
        pid_fd = os.pidfd_open(pid)
    except OSError:  # it is in another PID namespace, or has ended
        pid_fd = -1
    try:
        yield MemoryReader(pair, pid_fd)
    finally:
        if pid_fd >= 0:
            os.close(pid_fd)
