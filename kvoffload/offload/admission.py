"""Admission: only chunks that were seen often enough are stored."""

from collections import OrderedDict
from collections.abc import Iterable

from kvoffload.messages import OffloadKey

MIN_REMEMBERED = 1 << 16
MAX_NAMES = 8
"""Latest requests that are remembered of each chunk: they do not count again."""


class AdmissionFilter:
    """Counts the requests that each chunk was seen in, for a bounded number of chunks.

    Args:
        threshold: requests a chunk must be seen in to be stored; more than 1.
        limit: chunks remembered; the least recently seen is forgotten first.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        self.threshold = threshold
        self._limit = limit
        # Key → how many requests, and the latest of them.
        self._seen: OrderedDict[OffloadKey, tuple[int, tuple[str, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, keys: Iterable[OffloadKey], req_id: str) -> None:
        """Count a request that uses these chunks; each call without a name is another request."""
        for key in keys:
            count, names = self._seen.get(key, (0, ()))
            if count < self.threshold and not (req_id and req_id in names):
                self._seen[key] = count + 1, (*names, req_id)[-MAX_NAMES:]
            self._seen.move_to_end(key)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def admit(
        self, keys: list[OffloadKey], req_id: str
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Count a request that offers these chunks; return the chunks to store, and the rest."""
        self.see(keys, req_id)
        admitted: list[OffloadKey] = []
        rest: list[OffloadKey] = []
        for key in keys:
            count, _ = self._seen.get(key, (0, ()))
            (admitted if count >= self.threshold else rest).append(key)
        return admitted, rest

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()


def make_filter(threshold: int, num_slots: int) -> AdmissionFilter | None:
    """Make the filter of a host cache with so many slots; None if each chunk is to be stored."""
    limit = max(MIN_REMEMBERED, 2 * num_slots)
    return AdmissionFilter(threshold, limit) if threshold > 1 else None
