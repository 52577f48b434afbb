"""Times of last use, as far as one process knows them, and the expiry they imply."""

import threading
import time
from collections.abc import Callable, Iterable

from kvoffload.backends.disk.index import Name

now_ns = time.time_ns


class UseTimes:
    """Times of last use. Thread-safe; never does I/O.

    The access time of a file may tell of a later use by another process. :meth:`is_fresh` therefore
    errs on one side only.
    """

    def __init__(
        self,
        ttl_s: float | None,
        became_fresh: Callable[[Iterable[Name]], None] = lambda names: None,
    ) -> None:
        """Chunks expire ``ttl_s`` after their last use; None: never.

        Without expiry only those uses are remembered that access times do not tell yet.
        ``became_fresh`` learns of chunks that had expired, or were unknown, and are fresh now.
        """
        self._ttl_ns = None if ttl_s is None else int(ttl_s * 1e9)
        self._became_fresh = became_fresh
        self._lock = threading.Lock()
        self._unwritten: dict[Name, int] = {}
        self._due_ns: dict[Name, int] = {}

    @property
    def expires(self) -> bool:
        """Whether chunks expire at all."""
        return self._ttl_ns is not None

    def used(self, names: Iterable[Name]) -> None:
        """Note a use now, to be written to the files' access times."""
        used = dict.fromkeys(names, now_ns())
        with self._lock:
            self._unwritten.update(used)
        self.seen(used.items())

    def take_unwritten(self) -> dict[Name, int]:
        """Return and clear the uses that access times do not tell yet, in ns since the epoch."""
        with self._lock:
            taken, self._unwritten = self._unwritten, {}
        return taken

    def seen(self, uses: Iterable[tuple[Name, int]]) -> None:
        """Note uses at these times."""
        if self._ttl_ns is None:
            return
        now, fresh = now_ns(), []
        with self._lock:
            for name, used_ns in uses:
                before_ns = self._due_ns.get(name, 0)
                due_ns = self._due_ns[name] = max(before_ns, used_ns + self._ttl_ns)
                if before_ns <= now < due_ns:
                    fresh.append(name)
        if fresh:
            self._became_fresh(fresh)

    def is_fresh(self, name: Name) -> bool:
        """Return whether a chunk has surely not expired."""
        return self._ttl_ns is None or self._due_ns.get(name, 0) > now_ns()

    def forget(self, name: Name) -> None:
        if self._ttl_ns is not None:
            with self._lock:
                self._due_ns.pop(name, None)

    def overdue(self) -> list[Name]:
        """Return the chunks that have expired unless another process used them."""
        now = now_ns()
        with self._lock:
            return [name for name, due_ns in self._due_ns.items() if due_ns <= now]
