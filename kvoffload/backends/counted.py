"""What the base classes of backends have in common: counts, failures, whether it is closed."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal

from kvoffload.backends.base import Observable, Removal, Usage
from kvoffload.backends.log_rate import Throttle

log = logging.getLogger(__name__)

Kind = Literal["read", "write"]
_MAX_REMOVALS = 1 << 16
"""Removals kept for a listener that may never ask; older ones are lost to it."""


class Counts:
    """Counts by reason, and the chunks that left. Thread-safe."""

    def __init__(self) -> None:
        self.__removals: deque[Removal] = deque(maxlen=_MAX_REMOVALS)
        self.__counts: Counter[str] = Counter()
        self.__lock = threading.Lock()

    def count(self, reason: str, number: int = 1) -> None:
        """Add to a counter; thread-safe."""
        with self.__lock:
            self.__counts[reason] += number

    def counters(self) -> Mapping[str, int]:
        """Return the counts by reason, those of the base classes included."""
        with self.__lock:
            return dict(self.__counts)

    def note_removal(self, key: bytes, reason: str) -> None:
        """Report that a chunk left by the store's own decision; thread-safe."""
        self.__removals.append(Removal(key, reason))

    def take_removals(self) -> list[Removal]:
        """Return the removals since the last call."""
        return [self.__removals.popleft() for _ in range(len(self.__removals))]


class CountedBackend(Counts, Observable):
    """Counts what happens to chunks, and logs what the functions of a subclass raise.

    Args:
        name: of the store, for the log; by default that of the class.
    """

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.__name = name or type(self).__name__
        self.__closed = False
        self.__failures = Throttle(log)

    def usage(self) -> Usage:
        """Return what is stored; unknown by default, as a store need not know."""
        return Usage(None, None, None)

    def note_failure(self, kind: Kind, error: Exception) -> None:
        """Count and log that a function raised, and its chunk is a miss."""
        self.count(f"{kind}_failed")
        is_bug = not isinstance(error, MemoryError)  # which may come anywhere
        self.__failures.warning("%s: a %s failed: %r", self.__name, kind, error, traceback=is_bug)

    @property
    def is_closed(self) -> bool:
        """Whether every call is answered False from now on."""
        return self.__closed

    def begin_close(self) -> bool:
        """Answer every later call with False; return whether this is the first call of it."""
        first, self.__closed = not self.__closed, True
        return first
