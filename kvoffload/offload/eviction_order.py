"""The order in which chunks leave host memory: a policy, and what goes before it.

From the outside in: what is kept for the queue, priorities, told returns, and the policy. Each one
wraps the next from its first chunk on.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from kvoffload.offload.priority import SHARE_ABOVE, PriorityPolicy
from kvoffload.policies.base import Policy
from kvoffload.policies.kept_order import KeptOrder
from kvoffload.policies.return_order import ExpectedReturns, ReturnOrder


class EvictionOrder(KeptOrder):
    """The order of the evictable chunks of one size; a policy itself.

    Args:
        policy: orders those without a claim, a told return or a priority; used by this alone.
        capacity: chunks that fit at most.
        claims: the claimed chunks, which the caller lists.
    """

    def __init__(self, policy: Policy, capacity: int, claims: Collection[bytes]) -> None:
        super().__init__(policy, claims)
        self._capacity = capacity
        self._priorities: PriorityPolicy | None = None
        self._returns: ReturnOrder | None = None

    # ---- priorities ----

    @property
    def num_above(self) -> int:
        """Chunks of a priority above 0."""
        return self._priorities.num_above if self._priorities is not None else 0

    def prioritise(self, keys: Sequence[bytes], priority: int) -> None:
        """Give chunks about to be stored a priority, which is not 0; see :class:`PriorityPolicy`.

        Chunks above :data:`SHARE_ABOVE` of the capacity stay normal.
        """
        if priority > 0:
            keys = keys[: max(0, int(self._capacity * SHARE_ABOVE) - self.num_above)]
        self.mark(keys, priority)

    def mark(self, keys: Sequence[bytes], priority: int) -> None:
        """Give chunks a priority, however many have one."""
        if self._priorities is None:
            self._priorities = self.normal = PriorityPolicy(self.normal)
        self._priorities.mark(keys, priority)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the priorities of chunks that left: stored again, they get new ones."""
        if self._priorities is not None:
            self._priorities.forget(keys)

    # ---- returns ----

    def returns(self, share: float, now_s: Callable[[], float]) -> ExpectedReturns:
        """Return the claims on chunks by when they are needed again; see :class:`ReturnOrder`."""
        if self._returns is None:
            outer = self if self._priorities is None else self._priorities
            self._returns = ReturnOrder(outer.normal, self._capacity, share, now_s)
            outer.normal = self._returns
        return self._returns
