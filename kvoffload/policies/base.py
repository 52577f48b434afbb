"""The interface of eviction policies, and the check that a plug-in has it.

A policy orders the *evictable* keys of a store. A store takes a key out of the order while the key
is pinned or in flight. So a policy never skips a key, and no operation is O(pinned).

``touch`` alone counts a use. ``add`` places a key and ``remove`` takes it out. Pinning a key for a
load or a write-through is therefore no use, and a policy that counts uses counts requests.
"""

from collections.abc import Callable, Sequence
from typing import Protocol


class Policy(Protocol):
    """The order in which a store evicts its keys; called by one store, one call at a time.

    The constructor takes the store's capacity in entries: ``cls(capacity)``. Every call takes a
    batch and decides as a call for each key, in the order given, would.
    """

    def add(self, keys: Sequence[bytes]) -> None:
        """Put keys at the recent end: stored ones, or ones whose last pin was released.

        No key is in the order yet or named twice. The first ``add`` of a key is its first use. A
        later one is no use: what the policy knew at ``remove`` is valid again. A victim that the
        store must keep comes back by ``add`` as well, as a key that was evicted and stored again.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of each key.

        A store touches the keys of a prompt once a request, before it makes room for them. The tail
        of the prefix comes first, its head last. A pinned key counts as used, too. An unknown key
        changes no order; a policy that remembers evicted keys may learn from it.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Take keys out that were pinned or deleted; all are in the order, none is named twice.

        Notes on removed keys are bounded by the capacity.
        """
        ...

    def victims(self, count: int) -> Sequence[bytes]:
        """Take up to ``count`` keys out of the order, the first to leave first."""
        ...

    def clear(self) -> None:
        """Forget everything, history included."""
        ...

    def __len__(self) -> int:
        """Number of keys in the order."""
        ...

    def __contains__(self, key: object) -> bool:
        """Whether a key is in the order."""
        ...


def refusal(make: Callable[[int], Policy]) -> str:
    """Try a policy on a batch of two keys; return why it cannot be used, or ""."""
    keys = (b"first", b"second")
    try:
        policy = make(4)
        policy.add(keys)
        policy.touch(keys)
        policy.remove(keys[1:])
        policy.add(keys[1:])
        victims: object = policy.victims(2)
        if not isinstance(victims, Sequence):  # a store asks until it gets an empty one
            return f"returned a {type(victims).__name__} from victims, which is no sequence"
        taken = sorted(victims)
        found = "" if taken == list(keys) else f"evicted {taken} after a batch of two keys"
    except Exception as error:  # a plug-in may raise anything
        found = f"raised {error!r} for a batch of two keys"
    return found and (
        f"{found}; add, touch and remove take a sequence of keys: replace a parameter `key` by "
        "`keys` and loop over it, and check the policy with kvoffload.testing.PolicySuite"
    )
