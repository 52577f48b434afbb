"""The two forms of the I/O server: a process, or a thread of the engine's process."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvoffload.io.lent_memory import LentMemory
from kvoffload.io.link import own_end
from kvoffload.io.server import Session
from kvoffload.io.server_loop import run_server

log = logging.getLogger(__name__)


class Peer(Protocol):
    """A running server."""

    sock: socket.socket
    """The engine's end."""

    def kill(self) -> bool:
        """End it at once, if its form can; return whether that is so."""
        ...

    def lent_memory(self) -> LentMemory | None:
        """Return memory of the server that the engine can read, once the server has passed it."""
        return None

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, and touches no memory any more; wait at most so long."""
        ...

    def __str__(self) -> str: ...


Form = Callable[[], Peer]
"""Starts a server."""


class ServerThread(Peer):
    """The server on a daemon thread named ``kvoffload-io``.

    Args:
        memory: the slab.
    """

    def __init__(self, memory: memoryview) -> None:
        self.sock, self._other = map(own_end, socket.socketpair())
        self._memory = memory
        self.session: Session
        """Set when the server runs; its loop is the thread's."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-io", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        run_server(self._other, self._memory, lambda session: setattr(self, "session", session))

    def kill(self) -> bool:
        """Do nothing: a thread that hangs cannot be ended."""
        return False

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __str__(self) -> str:
        return "the I/O thread"


def check_interpreter() -> None:
    """Check that a Python can be started from here.

    Raises:
        OSError: the program is frozen or has Python embedded, so that what would be started is the
            program once more.
    """
    if getattr(sys, "frozen", False):
        raise OSError(f"{sys.executable} is a frozen program")
    if "python" not in os.path.basename(sys.executable or "").lower():
        raise OSError(f"sys.executable is {sys.executable!r}, no Python")


class ServerProcess(Peer):
    """The server in a process of its own: spawned, never forked.

    It inherits the module search path, the environment, and two descriptors: its end of the
    socket, and the slab's memory file.

    Args:
        slab_fd: the memory file.
    """

    def __init__(self, slab_fd: int) -> None:
        self.sock, other = map(own_end, socket.socketpair())
        inherited = (other.fileno(), slab_fd)
        level = logging.getLogger("kvoffload").getEffectiveLevel()
        arguments = [*inherited, os.getpid(), level]
        # What is here by a relative path, such as an empty one, is meant as it was at the start.
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        environment = {**os.environ, "PYTHONPATH": paths}
        with other:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "kvoffload.io.process", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=inherited,
                    env=environment,
                )
            except BaseException:
                self.sock.close()
                raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        return True

    def wait(self, timeout_s: float) -> bool:
        # Not Popen.wait: that one polls ever more slowly.
        until_s = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.005)
        return True

    def __str__(self) -> str:
        return f"the I/O process {self.pid}"
