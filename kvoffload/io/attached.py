"""The third form of an I/O server: that of the host, to which an engine attaches."""

import contextlib
import os
import select
import socket

from kvoffload.io.greeting import check_user, greet

CONNECT_S = 1.0
"""How long a server may leave a connection waiting: it accepts one between two messages."""


class AttachedServer:
    """A connection to the server of this host.

    Args:
        path: of its socket.
        slab_fd: the memory file, which the server maps until nothing touches it any more.

    Raises:
        OSError: there is no server, or it is another user's.
    """

    def __init__(self, path: str, slab_fd: int) -> None:
        self._path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._ended_fd, theirs = os.pipe()
        except BaseException:
            self.sock.close()
            raise
        try:
            self.sock.settimeout(CONNECT_S)
            self.sock.connect(path)
            # A listening systemd is root, and starts the server as the user that its unit names.
            check_user(self.sock, 0, os.geteuid())
            greet(self.sock, slab_fd, theirs)
        except BaseException:
            self.sock.close()
            os.close(self._ended_fd)
            raise
        finally:
            os.close(theirs)

    def kill(self) -> bool:
        """Leave the server: it ends the session when it next runs."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        return True

    def wait(self, timeout_s: float) -> bool:
        if self._ended_fd >= 0:
            poll = select.poll()
            poll.register(self._ended_fd, select.POLLIN)
            if not poll.poll(1e3 * timeout_s):
                return False
            os.close(self._ended_fd)
            self._ended_fd = -1
        return True

    def __str__(self) -> str:
        return f"the server at {self._path}"
