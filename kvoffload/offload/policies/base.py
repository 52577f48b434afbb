"""The one interface of eviction policies.

A policy orders the *idle* residents of a store. Whoever owns the store takes a key out of the
order while it is pinned or in flight, so a policy never has to skip anything and no operation is
O(pinned).
"""

from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """Who leaves next. Owned and called by one store, on one thread. Keys are bytes.

    The constructor takes the store's capacity in entries: ``cls(capacity)``.
    """

    def add(self, key: bytes) -> None:
        """A key became idle and evictable: newly stored, or its last pin was released."""
        ...

    def touch(self, key: bytes) -> None:
        """An idle key was used. Callers touch the tail of a prefix first and its head last."""
        ...

    def remove(self, key: bytes) -> None:
        """A key left the order for another reason than eviction: it was pinned, or is gone."""
        ...

    def victims(self, count: int) -> Sequence[bytes]:
        """Take up to ``count`` keys out of the order, the first to leave first."""
        ...

    def __len__(self) -> int:
        """Number of keys in the order."""
        ...

    def __contains__(self, key: object) -> bool:
        """Whether a key is in the order."""
        ...

    def clear(self) -> None:
        """Forget everything, history included."""
        ...
