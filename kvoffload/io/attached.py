"""The third form of an I/O server: that of the host, to which an engine attaches."""

import contextlib
import logging
import os
import select
import socket

from kvoffload.control import check_user
from kvoffload.io.greeting import greet
from kvoffload.io.lent_memory import LentMemory
from kvoffload.io.link import own_end

log = logging.getLogger(__name__)

CONNECT_S = 1.0
"""How long a server may leave a connection waiting: it accepts one between two messages."""


class AttachedServer:
    """A connection to the server of this host.

    Args:
        path: of its socket.
        slab_fd: the memory file, which the server maps until nothing touches it any more.

    Raises:
        OSError: there is no server, or it is another user's; its text ends in "; " and a remedy.
    """

    def __init__(self, path: str, slab_fd: int) -> None:
        self._path = path
        self.sock = own_end(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self._pair, theirs = map(own_end, socket.socketpair())
        except BaseException:
            self.sock.close()
            raise
        try:
            self.sock.settimeout(CONNECT_S)
            self.sock.connect(path)
            # A listening systemd is root, and starts the server as the user that its unit names.
            check_user(self.sock, 0, os.geteuid())
            greet(self.sock, slab_fd, theirs.fileno())
            self._pair.setblocking(False)
        except OSError as error:
            self.close()
            what = f"serve = {path!r}: {error.strerror or error}"
            remedy = "start kvoffload serve there, as the user of the engines"
            if isinstance(error, PermissionError):
                remedy = "run server, engines and commands as one user"
            raise OSError(f"{what}; {remedy}") from None
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def close(self) -> None:
        """Leave the server, with nothing begun."""
        self.sock.close()
        self._pair.close()

    def kill(self) -> bool:
        """Leave the server: it ends the session when it next runs."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        return True

    def lent_memory(self) -> LentMemory | None:
        data, fd = self._receive()
        if not data or fd < 0:
            return None
        try:
            try:
                pair = own_end(self._pair.dup())
            except BaseException:
                os.close(fd)  # it keeps all of the memory
                raise
            return LentMemory(fd, pair)
        # No descriptor, no room in the address space, no thread.
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("chunks are copied by the server, whose memory cannot be mapped: %s", error)
            return None

    def wait(self, timeout_s: float) -> bool:
        if self._pair.fileno() < 0 or self._is_ended():
            return True
        poll = select.poll()
        poll.register(self._pair, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s)) and self._is_ended()

    def _is_ended(self) -> bool:
        """Read what the server has sent and not been asked for; return whether its end is down."""
        while True:
            data, fd = self._receive()
            if fd >= 0:
                os.close(fd)
            if data is None:
                return False
            if not data:
                self._pair.close()
                return True

    def _receive(self) -> tuple[bytes | None, int]:
        """Return what there is, None for nothing and b"" for the end, and a descriptor or -1."""
        try:
            data, fds, _, _ = socket.recv_fds(self._pair, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None, -1
        except OSError:
            return b"", -1
        return data, fds[0] if fds else -1

    def __str__(self) -> str:
        return f"the server at {self._path}"
