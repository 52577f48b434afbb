"""What one process knows of the chunks: which are there, and when each was last used."""

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import TypeVar

KNOWN_S = 300.0
"""How long a chunk counts as present without another look: other hosts may evict it meanwhile."""
RENEW_S = 3600.0
"""A file's time tells of a use when it is older than this: one metadata operation an hour."""
T = TypeVar("T")
_MOST = 1 << 20
"""Keys remembered of each kind; the oldest are forgotten first."""


class KnownChunks:
    """Chunks that were stored, loaded or seen, those that are of no use here, and uses to tell of.

    Thread-safe; does no I/O. Each step on a dictionary is atomic, and the later of two stands.
    """

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}
        self._passed_over: dict[bytes, None] = {}
        self._young_until_s: dict[bytes, float] = {}
        """Until when a file's time tells of each use well enough: nothing needs to read it."""
        self._due: dict[bytes, None] = {}
        self._taking = threading.Lock()

    def __len__(self) -> int:
        return len(self._until_s)

    def holds(self, key: bytes) -> bool | None:
        """Return True or False without a look at the folder, or None: nothing is known."""
        if key in self._passed_over:
            return False
        return True if self._until_s.get(key, 0.0) > time.monotonic() else None

    def found(self, keys: Iterable[bytes]) -> None:
        """Note chunks whose files are there."""
        until_s = time.monotonic() + KNOWN_S
        for key in keys:
            _put(self._until_s, key, until_s)

    def stored(self, key: bytes) -> None:
        """Note a chunk that was just written: its file's time is now."""
        self._passed_over.pop(key, None)
        self.found([key])
        _put(self._young_until_s, key, time.monotonic() + RENEW_S)

    def is_young(self, key: bytes) -> bool:
        """Return whether a chunk's file is known to have a time of the last :data:`RENEW_S`."""
        return self._young_until_s.get(key, 0.0) > time.monotonic()

    def used(self, key: bytes, age_s: float) -> None:
        """Note a load of a chunk whose file's time is so old; 0: that is not known yet."""
        self.found([key])
        until_s = time.monotonic() + RENEW_S
        if age_s <= RENEW_S:
            if age_s:
                _put(self._young_until_s, key, until_s - max(age_s, 0.0))
        elif not self.is_young(key):
            _put(self._young_until_s, key, until_s)
            with self._taking:
                _put(self._due, key, None)

    def take_due(self) -> bytes | None:
        """Return a chunk whose file is to be given the present time; None: there is none."""
        with self._taking:
            return self._due.popitem()[0] if self._due else None

    def pass_over(self, key: bytes) -> None:
        """Count a chunk as absent until it is stored: of another length, or of another version."""
        self._until_s.pop(key, None)
        _put(self._passed_over, key, None)

    def forget(self, key: bytes) -> bool:
        """Know nothing of a chunk any more; return whether it counted as present."""
        self._young_until_s.pop(key, None)
        return self._until_s.pop(key, None) is not None

    def clear(self) -> None:
        """Know nothing: the root is another store now."""
        for table in (self._until_s, self._passed_over, self._young_until_s):
            table.clear()


def _put(table: dict[bytes, T], key: bytes, value: T) -> None:
    """Set an entry, as the youngest."""
    table.pop(key, None)
    if len(table) >= _MOST:
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread changed it
            table.pop(next(iter(table)), None)
    table[key] = value
