"""Admission: only chunks that were seen often enough are stored."""

from collections import OrderedDict
from collections.abc import Iterable

from kvoffload.messages import OffloadKey


class AdmissionFilter:
    """Counts in how many requests a chunk was seen, for as many chunks as it has room for.

    Args:
        threshold: requests a chunk must be seen in to be stored; 1 admits everything, at no cost.
        limit: chunks remembered; the one seen longest ago is forgotten first.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        self.threshold = threshold
        self._limit = limit
        # Key → requests, and the last of them, which may name a chunk more than once.
        self._seen: OrderedDict[OffloadKey, tuple[int, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, keys: Iterable[OffloadKey], req_id: str) -> None:
        """A request uses these chunks; without a name, each time as another request."""
        if self.threshold <= 1:
            return
        for key in keys:
            count, last = self._seen.get(key, (0, ""))
            if not (count and req_id) or last != req_id:
                self._seen[key] = count + 1, req_id
            self._seen.move_to_end(key)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def admitted(self, keys: list[OffloadKey], req_id: str) -> list[OffloadKey]:
        """Return the chunks to store; to be offered is to be seen."""
        if self.threshold <= 1:
            return keys
        self.see(keys, req_id)
        return [key for key in keys if self._seen.get(key, (0,))[0] >= self.threshold]

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()
