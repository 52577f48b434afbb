"""The I/O process: ``python -m kvoffload.io.process SOCKET_FD SLAB_FD ENGINE_PID LOG_LEVEL``.

Started by :class:`kvoffload.io.forms.ServerProcess`. The process ends with the engine's end of the
socket or with the engine's process, whichever ends first.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback

from kvoffload.io.protocol import Logged
from kvoffload.io.server import Session
from kvoffload.io.server_loop import run_server

_PR_SET_PDEATHSIG = 1
NICE = 10
"""Of all threads: about a tenth of the share that a thread of the engine has in a core."""
WATCH_S = 0.5
"""Time between two looks whether the engine lives."""
LAST_S = 3.0
"""How long the process goes on after its engine died, to close the stores."""


class ToEngine(logging.Handler):
    """Sends log records to the engine's process, which logs them under their names."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = Logged(record.name, record.levelno, self.format(record))
            self._session.loop.call_soon_threadsafe(self._session.send, message)
        except Exception:  # a record that cannot be formatted, or the loop is closed
            self.handleError(record)


def main() -> None:
    """Serve, and end the process without waiting for threads that hang."""
    socket_fd, slab_fd, engine_pid, level = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the engine
    # The death of the engine continues a stopped process, which then ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    give_way()
    sock = socket.socket(fileno=socket_fd)
    slab = mmap.mmap(slab_fd, 0)
    os.close(slab_fd)
    slab.madvise(mmap.MADV_DONTDUMP)  # a core file must not contain clients' data
    memory = memoryview(slab)
    watch = threading.Thread(target=_end_with, args=(engine_pid, sock), daemon=True)

    def attach(session: Session) -> None:
        logging.basicConfig(level=level, format="%(message)s", handlers=[ToEngine(session)])
        watch.start()

    try:
        run_server(sock, memory, attach)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def give_way() -> None:
    """Let engines have the cores first; for threads that are started from now on."""
    with contextlib.suppress(OSError):  # containers may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # another was chosen on purpose
            # A message must not interrupt the thread that sent it, where no core is idle.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            # Nor must the engine's thread wait for a core until a slice of this process is over.
            os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _end_with(engine_pid: int, sock: socket.socket) -> None:
    """Wait for the death of the engine's process; then close the session, and soon the process.

    The socket alone does not tell: other children of the engine may have inherited its end. A
    descriptor of the engine's process would tell at once, but containers may forbid one.
    """
    while os.getppid() == engine_pid:
        time.sleep(WATCH_S)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    time.sleep(LAST_S)
    os._exit(1)


if __name__ == "__main__":
    main()
