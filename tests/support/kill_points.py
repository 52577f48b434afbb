"""SIGKILL the I/O process at a named point, from inside it.

:func:`installed` puts a ``sitecustomize`` module on the path of the I/O processes started from
here, so each of them hooks itself by :func:`hook`. An armed point kills one process, once.
"""

import os
import signal
import threading
import time

POINTS = (
    # a message is read, and acted on
    "Load:received", "Load:taken", "Store:received", "Store:taken", "Ask:received",
    "Forget:received", "Remove:taken", "Cancel:received", "Cancel:taken",
    # a load: half a slot is filled; some chunks are told; all are, and no answer is sent
    "preadv:half", "Arrived:sent", "Answered:unsent", "Answered:half", "Answered:sent",
    # a store
    "pwritev:half", "Present:unsent", "Figures:unsent",
    # stores are opened, and list what they have
    "Open:received", "store:opening", "store:opened", "Opened:unsent", "Opened:sent",
    "greet:begun", "PresenceChanges:sent", "Alive:sent",
    # stores are renewed
    "Renewal:received", "retire:begun", "purge:begun", "Renewal:taken",
    # the session ends
    "end:begun", "close:begun", "close:ended",
)  # fmt: skip
"""``<message or call>:<moment>``."""
LOAN_POINTS = (
    "Borrow:received", "Borrow:taken", "Passed:unsent", "Passed:half", "Passed:sent",
    "Lent:unsent", "Lent:half", "Lent:sent", "Release:received", "Release:taken",
)  # fmt: skip
"""A server of the host passes its memory, and lends chunks of it."""
MEMORY_POINTS = (
    "copy:begun", "copy:half", "copy:ended", "note:begun", "note:half", "note:ended",
    "clear:begun", "clear:half", "clear:ended", "mark:begun", "mark:ended", "use:begun",
)  # fmt: skip
"""A server of the host changes its memory, or the table of it, which the next one adopts."""

_SITE = """
import pathlib
from tests.support import kill_points
kill_points.hook(pathlib.Path(__file__).parent)
"""
KEYS_PER_MESSAGE = 8


class KillPoints:
    """The armed point, and when it killed: files that both processes see."""

    def __init__(self, folder):
        self._armed, self._died = folder / "armed", folder / "died"
        self._seen = 0
        self._dying = threading.Lock()

    def arm(self, point, nth=1):
        assert point in POINTS + LOAN_POINTS + MEMORY_POINTS, point
        _write(self._armed, f"{point} {nth}")

    @property
    def killed_s(self):
        """When the armed point killed, on the monotonic clock; None: not yet."""
        return None if self._armed.exists() else float(self._died.read_text())

    def is_due(self, point):
        try:
            wanted, nth = self._armed.read_text().split()
        except FileNotFoundError:
            return False
        self._seen += point == wanted
        return point == wanted and self._seen >= int(nth)

    def die(self):
        self._dying.acquire()  # Never released: several threads may reach a point at once.
        _write(self._died, str(time.monotonic()))
        self._armed.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def reached(self, point):
        if self.is_due(point):
            self.die()


def _write(file, text):
    """Whole, or not at all: the other process may read at any moment."""
    whole = file.with_suffix(".new")
    whole.write_text(text)
    whole.replace(file)


def installed(folder, monkeypatch):
    """Let all I/O processes started from here have kill points."""
    site = folder / "kill_points"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    monkeypatch.syspath_prepend(str(site))
    return KillPoints(site)


def hook(folder):
    """Hook this process."""
    from kvoffload.backends.disk.vfs import Vfs
    from kvoffload.io import open_stores, server
    from kvoffload.io.server import Session

    points = KillPoints(folder)
    # Lists of few chunks, too, are told in several messages.
    server.KEYS_PER_MESSAGE = open_stores.KEYS_PER_MESSAGE = KEYS_PER_MESSAGE
    _hook_session(Session, points)
    _hook_calls(Vfs, points)
    open_stores._open = _around(open_stores._open, points, "store:opening", "store:opened")
    server.greet = _around(server.greet, points, "greet:begun")
    server.purge = _around(server.purge, points, "purge:begun")
    Session._retire = _around(Session._retire, points, "retire:begun")
    server.close_stores = _around_async(server.close_stores, points, "close:begun", "close:ended")
    Session._end = _around(Session._end, points, "end:begun")
    _hook_memory(points)


def _around(call, points, before, after=""):
    def hooked(*args):
        points.reached(before)
        result = call(*args)
        points.reached(after)
        return result

    return hooked


def _around_async(call, points, before, after):
    async def hooked(*args):
        points.reached(before)
        result = await call(*args)
        points.reached(after)
        return result

    return hooked


def _hook_session(session, points):
    take, send, flush = session._take, session.send, session._flush

    def hooked_take(self, message):
        name = type(message).__name__
        if name == "Open" and self._wanted is not None:
            name = "Renewal"
        points.reached(f"{name}:received")
        take(self, message)
        points.reached(f"{name}:taken")

    def hooked_send(self, message):
        name = type(message).__name__
        points.reached(f"{name}:unsent")
        send(self, message)
        vars(self).setdefault("names", []).append(name)

    def hooked_flush(self):
        names, self.names = self.names, []
        if self._out and any(points.is_due(f"{name}:half") for name in names):
            data = b"".join(self._out)
            os.write(self._writer.get_extra_info("socket").fileno(), data[: len(data) - 3])
            points.die()
        flush(self)
        for name in names:
            points.reached(f"{name}:sent")

    session._take, session.send, session._flush = hooked_take, hooked_send, hooked_flush


def _hook_calls(vfs, points):
    write = vfs.pwritev

    def is_chunk(fd):
        return os.readlink(f"/proc/self/fd/{fd}").endswith(".slots")

    def hooked(read):
        def hooked_read(fd, buffers, offset):
            if is_chunk(fd) and points.is_due("preadv:half"):
                half = buffers[1][: len(buffers[1]) // 2]
                half[:] = b"\xee" * len(half)
                points.die()
            return read(fd, buffers, offset)

        return staticmethod(hooked_read)

    def hooked_write(fd, buffers, offset):
        if len(buffers) > 1 and points.is_due("pwritev:half"):
            write(fd, buffers[:1], offset)  # the header, without the chunk
            points.die()
        return write(fd, buffers, offset)

    vfs.read_cached, vfs.preadv = hooked(vfs.read_cached), hooked(vfs.preadv)
    vfs.pwritev = staticmethod(hooked_write)


def _hook_memory(points):
    from kvoffload.io.service.host_memory import HostMemory
    from kvoffload.io.service.memory_file import MemoryFile

    copy_in, note, clear = HostMemory._copy_in, MemoryFile.note, MemoryFile.clear

    def hooked_copy(self, runs, chunk):
        points.reached("copy:begun")
        if points.is_due("copy:half"):
            copy_in(self, runs, chunk[: chunk.nbytes // 2])
            points.die()
        copy_in(self, runs, chunk)
        points.reached("copy:ended")

    def half(self, first, change):
        """Make a change of a record's header, but of its first bytes alone."""
        at = self._at(first)
        later = slice(at + 4, at + 256)
        before = self.map[later]
        change()
        self.map[later] = before
        points.die()

    def hooked_note(self, header, runs):
        points.reached("note:begun")
        if points.is_due("note:half"):
            half(self, runs[0][0], lambda: note(self, header, runs))
        note(self, header, runs)
        points.reached("note:ended")

    def hooked_clear(self, first):
        points.reached("clear:begun")
        if points.is_due("clear:half"):
            half(self, first, lambda: clear(self, first))
        clear(self, first)
        points.reached("clear:ended")

    def hooked_mark(self, first, **marks):
        points.reached("mark:begun")
        mark(self, first, **marks)
        points.reached("mark:ended")

    mark, MemoryFile.mark = MemoryFile.mark, hooked_mark
    HostMemory._copy_in = hooked_copy
    MemoryFile.note, MemoryFile.clear = hooked_note, hooked_clear
    MemoryFile.use = _around(MemoryFile.use, points, "use:begun")
