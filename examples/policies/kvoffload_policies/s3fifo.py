"""S3-FIFO (J. Yang et al.: SOSP 2023)."""

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.policies.history import PinnedState

_MOST_USES = 3


class S3FIFOPolicy:
    """A small queue tries new keys; keys used twice there, or missed soon after, enter the main.

    A tenth of the capacity is the small queue's share. A key evicted from it is remembered for 0.9
    capacities of evictions. The main queue gives each key one more round a use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._small_share = max(1, capacity // 10)
        self._ghost_share = capacity - capacity // 10
        self.clear()

    def clear(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()  # uses since added
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._pinned: PinnedState[tuple[bool, int]] = PinnedState(self.capacity)  # in main?, uses

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the end of the queue they belong to."""
        for key in keys:
            in_main, uses = self._pinned.pop(key, (False, 0))
            if key in self._ghosts:
                del self._ghosts[key]
                in_main = True
            (self._main if in_main else self._small)[key] = uses

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count uses, up to three; no key moves."""
        for key in keys:
            if key in self._small:
                self._small[key] = min(_MOST_USES, self._small[key] + 1)
            elif key in self._main:
                self._main[key] = min(_MOST_USES, self._main[key] + 1)
            elif key in self._pinned:
                in_main, uses = self._pinned[key]
                self._pinned[key] = in_main, min(_MOST_USES, uses + 1)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out of the order and remember their queue and uses."""
        small, main = self._small, self._main
        notes = [(False, small.pop(key)) if key in small else (True, main.pop(key)) for key in keys]
        self._pinned.keep(keys, notes)

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
