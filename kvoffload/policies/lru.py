"""Least recently used: in a table of its own, or in the order of a table that the store keeps."""

from collections import deque
from collections.abc import Sequence
from itertools import islice, repeat

from kvoffload.policies.ordered_queue import AT_LEAST, PART


class LRUOfTable:
    """LRU as the order of a table that the store keeps anyway: half the memory and half the work.

    The table has exactly the keys of the order. The store puts keys in after ``add``. It deletes
    keys after ``remove``, if it does not add them at once, and those that ``victims`` returned.

    Args:
        capacity: of the store in entries.
        table: the store's entries by key.
    """

    def __init__(self, capacity: int, table: dict[bytes, int]) -> None:
        self._table = table
        self._ahead = max(AT_LEAST, capacity // PART)
        # The keys of the last look-ahead, the oldest at the end; and those not moved since.
        self._oldest: list[bytes] = []
        self._unmoved: set[bytes] = set()

    def clear(self) -> None:
        self._oldest.clear()
        self._unmoved.clear()

    def add(self, keys: Sequence[bytes]) -> None:
        """Leave it to the store to put new keys at the end of its table; move those it has there.

        A store that only puts keys in order does not delete them in between.
        """
        if keys and keys[0] in self._table:
            self.touch(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Move keys of the table to its end."""
        table = self._table
        if not table.keys().isdisjoint(keys):
            here = list(filter(table.__contains__, keys))
            table.update(zip(here, map(table.pop, here), strict=True))
            self._unmoved.difference_update(here)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Note keys that the store is about to delete, and may put in again."""
        self._unmoved.difference_update(keys)

    def victims(self, count: int) -> Sequence[bytes]:
        """Name the least recently used keys."""
        count = min(count, len(self._table))
        taken: list[bytes] = []
        while len(taken) < count:
            if not self._oldest:
                # The first keys of the table are those taken now; the store has not deleted them.
                self._oldest = list(islice(self._table, len(taken), len(taken) + self._ahead))
                self._unmoved = set(self._oldest)
                self._oldest.reverse()
            first = max(0, len(self._oldest) - count + len(taken))
            candidates = self._oldest[first:]
            del self._oldest[first:]
            candidates.reverse()
            if not self._unmoved.issuperset(candidates):
                candidates = [key for key in candidates if key in self._unmoved]
            taken += candidates
        return taken

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, key: object) -> bool:
        return key in self._table


class LRUPolicy(LRUOfTable):
    """The key used longest ago leaves first; every operation is O(1), amortised."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, {})

    def clear(self) -> None:
        super().clear()
        self._table.clear()

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the recent end."""
        self._table.update(zip(keys, repeat(0)))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order."""
        self._unmoved.difference_update(keys)
        deque(map(self._table.pop, keys), maxlen=0)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take the least recently used keys."""
        taken = super().victims(count)
        deque(map(self._table.pop, taken), maxlen=0)
        return taken
