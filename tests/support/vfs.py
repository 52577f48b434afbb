"""Broken disks for the disk backend: wrappers around its system calls.

``DiskBackend(options, namespace, vfs=FailingVfs(...))`` runs on the real file system, with one call
failing, stuck or deadly. ``tests.support.powerloss`` builds on the same hook.
"""

import errno
import fcntl
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from kvoffload.backends.disk.vfs import Buffers, Vfs

T = TypeVar("T")


class HookedVfs(Vfs):
    """Every call passes through :meth:`around`, which knows its name and path; see below."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: dict[int, str] = {}

    def around(self, call: str, path: str, perform: Callable[[], T]) -> T:
        """Do the call, or something else; override."""
        return perform()

    def open(self, path: str, flags: int) -> int:
        fd = self.around("open", path, lambda: Vfs.open(self, path, flags))
        self._paths[fd] = path
        return fd

    def open_cached(self, name: bytes, flags: int, folder_fd: int | None = None) -> int:
        path = os.fsdecode(name)
        opened = self.around("open_cached", path, lambda: Vfs.open_cached(name, flags, folder_fd))
        self._paths[opened] = path
        return opened

    def close(self, fd: int) -> None:
        """See :class:`Vfs`; the descriptor is closed even if the call is made to fail."""
        path = self._paths.pop(fd, "")
        closed = False

        def perform() -> None:
            nonlocal closed
            closed = True
            Vfs.close(self, fd)

        try:
            self.around("close", path, perform)
        finally:
            if not closed:
                Vfs.close(self, fd)

    def rename(self, source: str, target: str) -> None:
        """See :class:`Vfs`; ``take`` is the removal of a chunk whose file is to be overwritten."""
        is_taken = kind_of(source) == "chunk" and kind_of(target) == "temporary"
        call, path = ("take", source) if is_taken else ("rename", target)
        self.around(call, path, lambda: Vfs.rename(self, source, target))
        for fd, opened in list(self._paths.items()):
            if opened == source:
                self._paths[fd] = target

    def listfacts(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        return self.around("listdir", path, lambda: iter([*Vfs.listfacts(self, path)]))


OF_DESCRIPTORS = (
    "fstat", "preadv", "pwritev", "is_cached", "punch", "read_cached", "start_writeback",
    "bypass_cache", "fsync", "set_length", "lock_part", "flock",
)  # fmt: skip
OF_PATHS = ("lstat", "unlink", "mkdir", "rmdir", "listdir", "statvfs", "utime")
"""Calls that are hooked by their names alone; the first argument is a descriptor, or the path."""


def _hooked(call: str, path_of: Callable[[HookedVfs, Any], str]) -> Callable[..., Any]:
    def method(self: HookedVfs, what: Any, *rest: Any) -> Any:
        perform = partial(getattr(super(HookedVfs, self), call), what, *rest)
        return self.around(call, path_of(self, what), perform)

    return method


for _call in OF_DESCRIPTORS:
    setattr(HookedVfs, _call, _hooked(_call, lambda vfs, fd: vfs._paths[fd]))
for _call in OF_PATHS:
    setattr(HookedVfs, _call, _hooked(_call, lambda vfs, path: path))


class FailingVfs(HookedVfs):
    """The n-th call fails, once or from then on."""

    def __init__(
        self,
        nth: int,
        error: int | None,
        *,
        sticky: bool = False,
        when: Callable[[str, str], bool] = lambda call, path: True,
    ) -> None:
        """Prepare the fault.

        Args:
            nth: number of the call that fails, from 1; 0: none does, calls are only counted.
            error: its errno; None: a read or write moves half of what it should, others pass.
            sticky: whether all later calls fail as well.
            when: which calls count, by name and path.
        """
        super().__init__()
        self.nth = nth
        self.error = error
        self.sticky = sticky
        self.calls = 0
        self._when = when
        self._counting = threading.Lock()

    def heal(self) -> None:
        """Let everything work again."""
        self.nth = 0

    def around(self, call: str, path: str, perform: Callable[[], T]) -> T:
        """Fail this call if it is its turn."""
        if call == "lstat" and not os.path.lexists(path):
            return perform()  # fails by itself
        if self.error is None and call in ("preadv", "read_cached", "pwritev"):
            return perform()  # counted by _shortened
        if self._strikes(call, path) and self.error is not None:
            raise OSError(self.error, os.strerror(self.error), path)
        return perform()

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read, possibly less than asked."""
        return super().preadv(fd, self._shortened("preadv", fd, buffers), offset)

    def read_cached(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read, possibly less than asked."""
        return super().read_cached(fd, self._shortened("read_cached", fd, buffers), offset)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write, possibly less than asked."""
        return super().pwritev(fd, self._shortened("pwritev", fd, buffers), offset)

    def _shortened(self, call: str, fd: int, buffers: Buffers) -> Buffers:
        if self.error is not None or not self._strikes(call, self._paths[fd]):
            return buffers
        # Half of it, but something: moving nothing would mean the end of the file.
        left = max(1, sum(map(len, buffers)) // 2)
        cut = []
        for buffer in buffers:
            cut.append(memoryview(buffer)[:left])
            left -= len(cut[-1])
        return cut

    def _strikes(self, call: str, path: str) -> bool:
        if not self._when(call, path):
            return False
        with self._counting:
            self.calls += 1
            return bool(self.nth) and (
                self.calls >= self.nth if self.sticky else self.calls == self.nth
            )


class CountedWrites(HookedVfs):
    """Counts writes by the kinds of their paths; those that a test names by number raise."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error or OSError(errno.EIO, "a test")
        self.writes: Counter[str] = Counter()
        self.failing: dict[str, set[int]] = {}

    def around(self, call: str, path: str, perform: Callable[[], T]) -> T:
        """Count this call if it writes, and fail it if it is its turn."""
        if call == "pwritev":
            kind = kind_of(path)
            self.writes[kind] += 1
            if self.writes[kind] in self.failing.get(kind, ()):
                raise type(self.error)(*self.error.args)  # one with frames would keep them
        return perform()


class StuckVfs(HookedVfs):
    """Calls chosen by :attr:`when` do not return until :meth:`release`."""

    def __init__(self, when: Callable[[str, str], bool]) -> None:
        super().__init__()
        self.when = when
        self._released = threading.Event()
        self.stuck = 0

    def release(self) -> None:
        """Let them go on."""
        self._released.set()

    def hold(self) -> None:
        """Hold back those to come."""
        self._released.clear()

    def around(self, call: str, path: str, perform: Callable[[], T]) -> T:
        """Wait first, if this call is one of those."""
        if self.when(call, path):
            self.stuck += 1
            self._released.wait()
        return perform()


class PointsVfs(HookedVfs):
    """Tells of the points ``<call>:<kind>:<before|after>``, see :func:`kind_of`."""

    def around(self, call: str, path: str, perform: Callable[[], T]) -> T:
        """Reach the point before the call, and the one after it."""
        where = f"{call}:{kind_of(path)}"
        self._reached(f"{where}:before")
        result = perform()
        self._reached(f"{where}:after")
        return result

    def _reached(self, point: str) -> None:
        raise NotImplementedError


class BesideVfs(PointsVfs):
    """Does something once, just before or after a call of some kind: as another process might."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: dict[str, tuple[Callable[[], object], int | None]] = {}

    def on(self, point: str, act: Callable[[], object], thread: int | None = None) -> None:
        """Do ``act`` at a point; on any thread, or on one."""
        self.acts[point] = act, thread

    def _reached(self, point: str) -> None:
        act, thread = self.acts.get(point, (None, None))
        if act is not None and thread in (None, threading.get_ident()):
            del self.acts[point]
            act()


class DeadlyVfs(PointsVfs):
    """SIGKILL to this very process before, in the middle of, or after a call of some kind."""

    def __init__(self, point: str = "", nth: int = 1) -> None:
        """Prepare: ``point`` is ``<call>:<kind>:<before|after>``, see :func:`kind_of`."""
        super().__init__()
        self.point = point
        self.nth = nth
        self.seen: Counter[str] = Counter()

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write; dying in the middle leaves half of the bytes."""
        if self.point == f"pwritev:{kind_of(self._paths[fd])}:middle":
            whole = b"".join(buffers)
            if self.seen[self.point] + 1 >= self.nth:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                os.pwrite(fd, whole[: len(whole) // 2], offset)
            self._reached(self.point)
        return super().pwritev(fd, buffers, offset)

    def _reached(self, point: str) -> None:
        self.seen[point] += 1
        if point == self.point and self.seen[point] >= self.nth:
            os.kill(os.getpid(), signal.SIGKILL)


def kind_of(path: str) -> str:
    """What a path under a root is: chunk, shard, namespace, snapshot, ledger, temporary..."""
    parts = path.split("/")
    name, above = parts[-1], parts[-2] if len(parts) > 1 else ""
    fixed = {".ledger": "ledger", ".owner": "owner", "snapshot": "snapshot", "lock": "lock"}
    fixed |= {".bounds.json": "bounds"}
    if name in fixed:
        return fixed[name]
    if ".writers" in parts:
        return ("writers", "writer", "temporary")[len(parts) - 1 - parts.index(".writers")]
    if ".quarantine" in parts:
        return "quarantine"
    if above == "segments":
        return "table" if name.endswith(".table") else "slots"
    if len(name) == 64 and len(above) != 2:
        return "namespace"
    if len(name) == 2:
        return "shard"
    return "chunk" if len(above) == 2 else "root"


def calls_on(kind: str, *calls: str) -> Callable[[str, str], bool]:
    """Choose these calls on paths of a kind, see :func:`kind_of`."""
    return lambda call, path: call in calls and kind_of(path) == kind


EVERY_ERROR = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR, errno.EACCES, None)
"""Errors worth trying on every call; None is a short read or write."""
