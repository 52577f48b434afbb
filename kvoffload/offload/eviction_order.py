"""The order in which chunks leave host memory: a policy, and what goes before it.

From the outside in: what is kept for the queue, priorities, told returns, and the policy. Each one
wraps the next from its first chunk on.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from kvoffload.offload.priority import SHARE_ABOVE, PriorityPolicy
from kvoffload.policies.base import Policy
from kvoffload.policies.kept_order import KeptOrder
from kvoffload.policies.return_order import ExpectedReturns, ReturnOrder


class EvictionOrder:
    """The order of the evictable chunks of one size.

    Args:
        policy: orders those without a claim, a told return or a priority; used by this alone.
        capacity: chunks that fit at most.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy = policy
        """All of it as one policy."""
        self._capacity = capacity
        self._kept: KeptOrder | None = None
        self._priorities: PriorityPolicy | None = None
        self._returns: ReturnOrder | None = None

    def _to_wrap(self) -> Policy:
        """Return the order that a policy is to wrap."""
        return self._kept.normal if self._kept is not None else self.policy

    # ---- what is kept ----

    def allow_claims(self, claims: Collection[bytes]) -> None:
        """Make ready for claims, before the first chunk; the caller lists the claimed chunks."""
        self.policy = self._kept = KeptOrder(self._to_wrap(), claims)

    def keep(self, keys: Sequence[bytes]) -> None:
        """Take evictable chunks that get a claim out of the order."""
        if self._kept is not None:
            self._kept.keep(keys)

    def let_go(self, keys: Sequence[bytes]) -> None:
        """Put evictable chunks whose claim has ended back, the last one the most recent."""
        if self._kept is not None:
            self._kept.let_go(keys)

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
            self._priorities = PriorityPolicy(self._to_wrap())
            self._put_outside(self._priorities)
        self._priorities.mark(keys, priority)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the priorities of chunks that left: stored again, they get new ones."""
        if self._priorities is not None:
            self._priorities.forget(keys)

    # ---- returns ----

    def returns(self, share: float, now_s: Callable[[], float]) -> ExpectedReturns:
        """Return the claims on chunks by when they are needed again; see :class:`ReturnOrder`."""
        if self._returns is None:
            inner = self._priorities.normal if self._priorities is not None else self._to_wrap()
            self._returns = order = ReturnOrder(inner, self._capacity, share, now_s)
            if self._priorities is not None:
                self._priorities.normal = order
            else:
                self._put_outside(order)
        return self._returns

    def _put_outside(self, order: Policy) -> None:
        """Let an order be the outermost but for what is kept."""
        if self._kept is not None:
            self._kept.normal = order
        else:
            self.policy = order
