"""The socket of a host's server: one server listens on it, and a dead one's is taken over."""

import contextlib
import fcntl
import os
import socket
import stat

from kvoffload.control import is_listening
from kvoffload.errors import ConfigError

BACKLOG = 512
"""Connections that wait while the server is busy; an engine beyond it has to try again."""


class Listener:
    """A listening socket, from systemd or by its path; its maker closes it.

    Args:
        path: of the socket. A lock, ``PATH.lock``, tells whether a server has it.
        passed_fd: the socket that systemd has passed; -1 without one.

    Raises:
        ConfigError: another server has it, or something else is there.
    """

    def __init__(self, path: str, passed_fd: int = -1) -> None:
        self._path = path
        self._lock_fd = -1
        if passed_fd >= 0:
            self.sock = socket.socket(fileno=passed_fd)
            if self.sock.family != socket.AF_UNIX:
                raise ConfigError("socket", path, "systemd has passed another kind of socket")
        else:
            try:
                self.sock = self._bound()
            except FileNotFoundError:
                self.close()
                folder = os.path.dirname(path)
                remedy = f"there is no folder {folder}: make it, for the user of the engines"
                if os.path.isdir(folder):  # as /proc
                    remedy = f"no file can be made in {folder}: give a path in another folder"
                raise ConfigError("socket", path, remedy) from None
            except OSError as error:
                self.close()
                where = f"{error.filename or path}, which this user must be able to write"
                remedy = f"cannot be listened on: {error.strerror or error} at {where}"
                raise ConfigError("socket", path, remedy) from error
            except BaseException:
                self.close()
                raise
        self.sock.setblocking(False)

    def _bound(self) -> socket.socket:
        path = self._path
        self._lock_fd = os.open(lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("socket", path, "another server listens there") from None
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError("socket", path, "is there, and is no socket: give another path")
            if is_listening(path):
                raise ConfigError("socket", path, "another program listens there")
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mask = os.umask(0o177)  # from its first moment on, no other user may connect
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Stop listening. The path of a socket of one's own is removed. Idempotent."""
        if hasattr(self, "sock"):
            self.sock.close()
        if self._lock_fd >= 0:
            if hasattr(self, "sock"):
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            os.close(self._lock_fd)
            self._lock_fd = -1


def lock_of(path: str) -> str:
    """Return the file that servers lock at a socket's path; it stays when they have ended."""
    return f"{path}.lock"
