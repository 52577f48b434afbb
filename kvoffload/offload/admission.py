"""Admission: only chunks that were seen often enough are stored."""

from collections import OrderedDict
from collections.abc import Iterable

from kvoffload.core.transfers import OffloadKey


class Sightings:
    """Counts in how many requests a chunk was seen, for as many chunks as it has room for.

    Args:
        threshold: sightings a chunk needs to be stored; 1 admits everything, at no cost.
        limit: chunks remembered; the one seen longest ago is forgotten first.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        self.threshold = threshold
        self._limit = limit
        self._seen: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, keys: Iterable[OffloadKey]) -> None:
        """A request uses these chunks."""
        if self.threshold <= 1:
            return
        for key in keys:
            self._seen[key] = self._seen.get(key, 0) + 1
            self._seen.move_to_end(key)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def admitted(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks to store; to be offered at all counts as the first sighting."""
        if self.threshold <= 1:
            return keys
        self.see([key for key in keys if key not in self._seen])
        return [key for key in keys if self._seen.get(key, 0) >= self.threshold]

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()
