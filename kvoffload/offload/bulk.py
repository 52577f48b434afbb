"""Putting many keys into an order, or taking them out, at the price of one call."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvoffload.policies.base import Policy

Many = Callable[[Sequence[bytes]], object]


@runtime_checkable
class InBulk(Protocol):
    """Optional: a policy that takes many keys in a call; equal to as many single calls."""

    def add_all(self, keys: Sequence[bytes]) -> object:
        """Add keys, none of which is in the order."""
        ...

    def remove_all(self, keys: Sequence[bytes]) -> object:
        """Take out keys, all of which are in the order."""
        ...


def add_all(policy: Policy) -> Many:
    """Return what adds many keys to a policy, none of which is in its order."""
    if isinstance(policy, InBulk):
        return policy.add_all
    return lambda keys: deque(map(policy.add, keys), maxlen=0)


def remove_all(policy: Policy) -> Many:
    """Return what takes many keys out of a policy, all of which are in its order."""
    if isinstance(policy, InBulk):
        return policy.remove_all
    return lambda keys: deque(map(policy.remove, keys), maxlen=0)
