"""The engine's end of the socket to an I/O server: any thread sends, one receives."""

import contextlib
import os
import select
import socket
import threading
from weakref import WeakSet

_READ_BYTES = 1 << 16
CLOGGED_BYTES = 1 << 20
_own_ends: "WeakSet[socket.socket]" = WeakSet()


def own_end(sock: socket.socket) -> socket.socket:
    """Return a socket that forked children close.

    While one has it open, the other end does not learn that this process has closed it, or ended.
    """
    _own_ends.add(sock)
    return sock


def _close_inherited() -> None:
    for sock in list(_own_ends):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)


class Link:
    """Sends without ever waiting: what the socket does not take, the receiving thread sends later.

    The link outlives sockets: :meth:`attach` gives it the next one.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Guards the socket and what it has not taken; the owner may guard more with it."""
        self._sock: socket.socket | None = None
        self.is_up = False
        """Whether there is a socket."""
        self._out = bytearray()
        self._woken_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._woken_fd, False)
        os.set_blocking(self._wake_fd, False)

    @property
    def is_clogged(self) -> bool:
        """Whether much waits because the other end reads nothing."""
        return len(self._out) > CLOGGED_BYTES

    def attach(self, sock: socket.socket) -> None:
        """Use this socket from now on; the caller holds the lock."""
        sock.setblocking(False)
        self._sock, self.is_up = sock, True

    def detach(self) -> None:
        """Close the socket and drop what it has not taken; the caller holds the lock."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self.is_up = None, False
        self._out.clear()

    def push(self, data: bytes) -> None:
        """Send as :meth:`send`, for a caller that holds the lock.

        Without a socket the bytes are dropped.
        """
        sent = 0
        if self._sock is None:
            return
        if not self._out:
            # The receiving thread notices a broken socket.
            with contextlib.suppress(OSError):
                sent = self._sock.send(data)
        self._out += data[sent:]
        if sent < len(data):
            self._wake()

    def send(self, data: bytes) -> None:
        """Send what the socket takes, from any thread; wake the receiving thread for the rest."""
        with self.lock:
            self.push(data)

    def wake(self) -> None:
        """Let :meth:`receive` return; from any thread."""
        with self.lock:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            if self._wake_fd >= 0:
                os.write(self._wake_fd, b"\0")

    def receive(self, timeout_s: float) -> tuple[bytes | None, bool]:
        """Wait for bytes; return them, and whether the link was woken.

        Returns:
            None in place of bytes if there are none, b"" if the other end is closed.
        """
        sock, poll = self._sock, select.poll()
        poll.register(self._woken_fd, select.POLLIN)
        if sock is not None:
            poll.register(sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        ready = dict(poll.poll(1e3 * timeout_s))
        if is_woken := self._woken_fd in ready:
            os.read(self._woken_fd, _READ_BYTES)
        events = ready.get(sock.fileno(), 0) if sock is not None else 0
        if sock is None or not events:
            return None, is_woken
        if events & select.POLLOUT:
            with self.lock, contextlib.suppress(OSError):
                try:
                    del self._out[: sock.send(self._out[:_READ_BYTES])]
                except BrokenPipeError:  # else poll() would return at once for ever
                    self._out.clear()
        try:
            return sock.recv(_READ_BYTES), is_woken
        except BlockingIOError:
            return None, is_woken
        except OSError:
            return b"", is_woken

    def end_sending(self) -> None:
        """Let the other end read that this one is done, once the socket has taken everything."""
        with self.lock, contextlib.suppress(OSError):
            if self._sock is not None and not self._out:
                self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Release the descriptors; sending does nothing from now on."""
        with self.lock:
            self.detach()
            os.close(self._wake_fd)
            os.close(self._woken_fd)
            self._wake_fd = -1
