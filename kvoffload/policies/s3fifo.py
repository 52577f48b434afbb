"""S3-FIFO (J. Yang and others: SOSP 2023)."""

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.policies.history import PinnedState

_MOST_USES = 3


class S3FIFOPolicy:
    """A small queue tries new keys; those used twice there, or missed soon after, enter the main.

    A tenth of the capacity is the small queue's share; evicted from it without that, a key is
    remembered for 0.9 capacities of evictions. The main queue gives each key one more round a use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._small_share = max(1, capacity // 10)
        self._ghost_share = capacity - capacity // 10
        self._small: OrderedDict[bytes, int] = OrderedDict()  # uses since added
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._away: PinnedState[tuple[bool, int]] = PinnedState(capacity)  # in main?, uses

    def add(self, key: bytes) -> None:
        """Put a key at the end of the queue it belongs to."""
        if key in self:
            return
        in_main, uses = self._away.pop(key) if key in self._away else (False, 0)
        if key in self._ghosts:
            del self._ghosts[key]
            in_main = True
        (self._main if in_main else self._small)[key] = uses

    def touch(self, key: bytes) -> None:
        """Count a use, up to three; no key moves."""
        if key in self._small:
            self._small[key] = min(_MOST_USES, self._small[key] + 1)
        elif key in self._main:
            self._main[key] = min(_MOST_USES, self._main[key] + 1)
        elif key in self._away:
            in_main, uses = self._away[key]
            self._away[key] = in_main, min(_MOST_USES, uses + 1)

    def remove(self, key: bytes) -> None:
        """Take a key out of the order, remembering its queue and uses."""
        if key in self._small:
            self._away.keep(key, (False, self._small.pop(key)))
        elif key in self._main:
            self._away.keep(key, (True, self._main.pop(key)))

    def victims(self, count: int) -> Sequence[bytes]:
        """Take keys from the small queue while it has more than its share, else from the main."""
        return [self._victim() for _ in range(min(count, len(self)))]

    def _victim(self) -> bytes:
        while len(self._small) >= self._small_share or not self._main:
            key, uses = self._small.popitem(last=False)
            if uses > 1:
                self._main[key] = 0
                if len(self._main) > self.capacity - self._small_share:
                    break
            else:
                self._ghosts[key] = None
                if len(self._ghosts) > self._ghost_share:
                    self._ghosts.popitem(last=False)
                return key
        while True:
            key, uses = self._main.popitem(last=False)
            if not uses:
                return key
            self._main[key] = uses - 1

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def clear(self) -> None:
        """Forget everything, history included."""
        self.__init__(self.capacity)  # type: ignore[misc]
