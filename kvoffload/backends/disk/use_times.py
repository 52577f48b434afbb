"""When chunks were last used, as far as one process knows, and which have expired by that."""

import threading
import time
from collections.abc import Iterable

from kvoffload.backends.disk.index import Name

now_ns = time.time_ns


class UseTimes:
    """Times of last use. Thread-safe; never does I/O.

    Another process may have used a chunk later than this one knows: the file's access time says so.
    So :meth:`is_fresh` errs on one side alone.
    """

    def __init__(self, ttl_s: float | None) -> None:
        """Chunks expire ``ttl_s`` after their last use; None: never, and nothing is remembered."""
        self._ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._lock = threading.Lock()
        self._unwritten: dict[Name, int] = {}
        self._due_ns: dict[Name, int] = {}

    @property
    def expires(self) -> bool:
        """Whether chunks expire at all."""
        return self._ttl_ns is not None

    def used(self, names: Iterable[Name]) -> None:
        """Chunks were used now; their access times are to be written."""
        used = dict.fromkeys(names, now_ns())
        with self._lock:
            self._unwritten.update(used)
        self.seen(used.items())

    def stored(self, name: Name) -> None:
        """A chunk was stored now, and its file's access time says so."""
        self.seen([(name, now_ns())])

    def take_unwritten(self) -> dict[Name, int]:
        """Uses that access times do not tell yet, in nanoseconds since the epoch."""
        with self._lock:
            taken, self._unwritten = self._unwritten, {}
        return taken

    def seen(self, uses: Iterable[tuple[Name, int]]) -> None:
        """These were used at these times, or later."""
        if self._ttl_ns is None:
            return
        with self._lock:
            for name, used_ns in uses:
                self._due_ns[name] = max(self._due_ns.get(name, 0), used_ns + self._ttl_ns)

    def is_fresh(self, name: Name) -> bool:
        """Whether a chunk has surely not expired."""
        return self._ttl_ns is None or self._due_ns.get(name, 0) > now_ns()

    def forget(self, name: Name) -> None:
        """A chunk is gone."""
        if self._ttl_ns is not None:
            with self._lock:
                self._due_ns.pop(name, None)

    def overdue(self) -> list[Name]:
        """Chunks that have expired unless another process used them."""
        now = now_ns()
        with self._lock:
            return [name for name, due_ns in self._due_ns.items() if due_ns <= now]
