"""The one interface of eviction policies.

A policy orders the *idle* residents of a store. Whoever owns the store takes a key out of the
order while it is pinned or in flight, so a policy never has to skip anything and no operation is
O(pinned).

What counts as a use is said by ``touch`` alone. ``add`` places a key, ``remove`` takes it out for a
while or for good; a key pinned for a load or a write-through and released again was not used once
more by that. So a policy that counts uses counts requests, whatever moved meanwhile.
"""

from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """Who leaves next. Owned and called by one store, on one thread. Keys are bytes.

    The constructor takes the store's capacity in entries: ``cls(capacity)``.
    """

    def add(self, key: bytes) -> None:
        """A key became idle and evictable: newly stored, or its last pin was released.

        The first ``add`` of a key is its first use. Later ones are none: the key comes back with
        what the policy knew of it when it was removed, at the recent end.
        """
        ...

    def touch(self, key: bytes) -> None:
        """A request used this key.

        Callers touch the keys of a prompt once a request, before they make room for it, the tail
        of the prefix first and its head last. A key that is pinned counts as used, too. An absent
        key changes no order; a policy with a memory of evicted keys may learn from it.
        """
        ...

    def remove(self, key: bytes) -> None:
        """A key left the order for another reason than eviction: it was pinned, or is gone.

        What is kept of such keys is bounded by the capacity.
        """
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
