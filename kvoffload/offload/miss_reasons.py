"""Why a chunk is not there: a bounded memory of how chunks departed, read when someone asks."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from kvoffload.messages import OffloadKey

NEVER_STORED = "never_stored"
EVICTED = "evicted"
DROPPED = "dropped"
OTHER_NAMESPACE = "other_namespace"


class MissReasons:
    """Remembers the latest ``limit`` departures; keys of twice as many are kept at most.

    Noting is O(1) for a whole batch, because it happens with every eviction; the index that answers
    questions is brought up to date only when one is asked.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._batches: deque[tuple[Sequence[OffloadKey], str]] = deque()
        self._num_noted = 0
        self._index: OrderedDict[OffloadKey, str] = OrderedDict()

    def note(self, keys: Sequence[OffloadKey], reason: str) -> None:
        """These chunks left some place, or never got there, for this reason."""
        if not keys:
            return
        keys = keys[-self._limit :]
        self._batches.append((keys, reason))
        self._num_noted += len(keys)
        while self._num_noted - len(self._batches[0][0]) >= self._limit:
            self._num_noted -= len(self._batches.popleft()[0])

    def reason(self, key: OffloadKey) -> str:
        """Why a chunk that is nowhere is nowhere."""
        self._catch_up()
        return self._index.get(key, NEVER_STORED)

    def new_namespace(self) -> None:
        """All chunks known so far belong to another namespace from now on."""
        self._catch_up()
        for key in self._index:
            self._index[key] = OTHER_NAMESPACE

    def _catch_up(self) -> None:
        while self._batches:
            keys, reason = self._batches.popleft()
            for key in keys:
                self._index[key] = reason
                self._index.move_to_end(key)
        self._num_noted = 0
        while len(self._index) > self._limit:
            self._index.popitem(last=False)
