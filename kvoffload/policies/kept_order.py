"""Chunks that leave an eviction order for a while, whatever the policy: nothing evicts them."""

from collections.abc import Collection, Sequence
from itertools import filterfalse

from kvoffload.policies.base import Policy


class KeptOrder:
    """A policy that never names a claimed key as a victim; a policy itself.

    A claimed key is out of the wrapped order, as a pinned one is. So an eviction skips none.

    Args:
        normal: orders the keys without a claim.
        claims: the claimed keys; the caller changes it, and several orders may share it.
    """

    def __init__(self, normal: Policy, claims: Collection[bytes]) -> None:
        self.normal = normal
        self._claims = claims
        self.num_kept = 0
        """Claimed keys that would be in the wrapped order without the claim."""

    def keep(self, keys: Sequence[bytes]) -> None:
        """Take keys that get a claim out of the wrapped order."""
        self.normal.remove(keys)
        self.num_kept += len(keys)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Put keys whose claim has ended back into the wrapped order."""
        self.num_kept -= len(keys)
        self.normal.add(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        if normal := self._unclaimed(keys):
            self.normal.add(normal)
        self.num_kept += len(keys) - len(normal)

    def _unclaimed(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return [*filterfalse(self._claims.__contains__, keys)] if self._claims else keys

    def touch(self, keys: Sequence[bytes]) -> None:
        self.normal.touch(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        if normal := self._unclaimed(keys):
            self.normal.remove(normal)
        self.num_kept -= len(keys) - len(normal)

    def victims(self, count: int) -> Sequence[bytes]:
        return self.normal.victims(count)

    def clear(self) -> None:
        self.normal.clear()
        self.num_kept = 0

    def __len__(self) -> int:
        return len(self.normal) + self.num_kept

    def __contains__(self, key: object) -> bool:
        return key in self._claims or key in self.normal
