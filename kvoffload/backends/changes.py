"""The keys whose presence changed since the reader of an index asked last."""

import threading
from collections.abc import Collection, Iterable


class ChangedKeys:
    """Keys that changed and that the one reader has not taken. Thread-safe.

    An index without a reader costs nothing: keys are noted from :meth:`begin_parts` on. The owner
    notes a key after its presence changed. The reader takes a key before it looks up the presence.
    A change after that is noted again, so the last answer to a key is right. A key that changes
    while the first listing lasts is taken with the changes, and once more with the listing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: list[bytes] = []
        """Keys of the part that has its turn. A list of a million keys is made and cut in a
        fraction of the time of a dictionary."""
        self._parts: list[Collection[bytes]] = []
        """Those of which the keys are yet to be listed."""
        self._keys: dict[bytes, None] | None = None
        """Keys noted since then, each once. None: there is no reader."""
        self.is_read = False
        """Whether there is a reader."""

    def __len__(self) -> int:
        return len(self._listed) + sum(map(len, self._parts)) + len(self._keys or ())

    def __bool__(self) -> bool:
        return bool(self._listed or self._keys or any(self._parts))

    def begin_parts(self, parts: Iterable[Collection[bytes]]) -> None:
        """Note all keys that are present: those in these parts, each listed when it has its turn.

        The parts may change until then, and each change must be noted, too. Begun again, it keeps
        the keys that were noted and not taken: some of them may be gone.
        """
        with self._lock:
            self._listed, self._parts = [], list(parts)
            self._keys = self._keys or {}
        self.is_read = True

    def note(self, key: bytes) -> None:
        """Note that the presence of a key changed, or may have."""
        if self._keys is not None:
            with self._lock:
                self._keys[key] = None

    def note_all(self, keys: Iterable[bytes]) -> None:
        """Note that the presence of these changed, or may have."""
        if self._keys is not None:
            with self._lock:
                self._keys.update(dict.fromkeys(keys))

    def take(self, limit: int) -> list[bytes]:
        """Take at most so many keys, the latest first."""
        if not self:
            self._parts = []  # what comes into an empty part is noted
            return []
        with self._lock:
            keys = self._keys or {}
            taken = [keys.popitem()[0] for _ in range(min(limit, len(keys)))]
            if not keys:
                self._keys = {}  # an emptied dictionary keeps the memory of many changes
            while (left := limit - len(taken)) and (self._listed or self._parts):
                if not self._listed:
                    self._listed = list(self._parts.pop())
                taken += self._listed[: -left - 1 : -1]
                del self._listed[-left:]
        return taken
