"""Idle chunks: loadable and used by nobody. Where each is, and which leaves next."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

from kvoffload.messages import OffloadKey
from kvoffload.offload.bulk import add_all, remove_all
from kvoffload.policies.base import Policy


@runtime_checkable
class CarriesNumbers(Protocol):
    """Optional: a policy that keeps a number with each key of its order.

    Its owner then needs no table of slots beside the order: half the memory and half the work.
    """

    numbers: dict[bytes, int]
    """All keys in the order; 0 for those added without a number."""

    def put_all(self, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Add keys, none of which is in the order, each with a number."""
        ...

    def remove_all(self, keys: Sequence[bytes]) -> None:
        """Take out keys, all of which are in the order."""
        ...

    def evict(self, count: int) -> tuple[list[bytes], list[int]]:
        """Do as ``victims``, and return the keys' numbers beside them."""
        ...


class Idle(Protocol):
    """Slots of idle chunks, in some policy's order."""

    slots: dict[OffloadKey, int]
    """Where each is; read by everybody, changed only through these methods."""

    def put(self, key: OffloadKey, slot: int) -> None:
        """A chunk becomes idle."""
        ...

    def put_all(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Chunks become idle, in the order given."""
        ...

    def take(self, key: OffloadKey) -> int:
        """An idle chunk is used or gone; return its slot."""
        ...

    def take_all(self, keys: Sequence[OffloadKey]) -> None:
        """Idle chunks are used or gone."""
        ...

    def victims(self, count: int) -> tuple[list[OffloadKey], list[int]]:
        """Take up to ``count`` chunks, the first to leave first; return them and their slots."""
        ...

    def clear(self) -> None:
        """Forget all."""
        ...


class InOwnOrder:
    """Slots kept by a policy that carries numbers."""

    def __init__(self, policy: CarriesNumbers) -> None:
        self._policy = policy
        self.slots = cast(dict[OffloadKey, int], policy.numbers)

    def put(self, key: OffloadKey, slot: int) -> None:
        """See :meth:`Idle.put`."""
        self._policy.put_all((key,), (slot,))

    def put_all(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """See :meth:`Idle.put_all`."""
        self._policy.put_all(keys, slots)

    def take(self, key: OffloadKey) -> int:
        """See :meth:`Idle.take`."""
        slot = self.slots[key]
        self._policy.remove_all((key,))
        return slot

    def take_all(self, keys: Sequence[OffloadKey]) -> None:
        """See :meth:`Idle.take_all`."""
        self._policy.remove_all(keys)

    def victims(self, count: int) -> tuple[list[OffloadKey], list[int]]:
        """See :meth:`Idle.victims`."""
        return cast(tuple[list[OffloadKey], list[int]], self._policy.evict(count))

    def clear(self) -> None:
        """See :meth:`Idle.clear`."""
        cast(Policy, self._policy).clear()


class ByPolicy:
    """Slots beside an order that knows none.

    Args:
        policy: the order.
        slots: of the keys that are in it already.
    """

    def __init__(self, policy: Policy, slots: Mapping[OffloadKey, int]) -> None:
        self._policy = policy
        self._add_all, self._remove_all = add_all(policy), remove_all(policy)
        self.slots = dict(slots)

    def put(self, key: OffloadKey, slot: int) -> None:
        """See :meth:`Idle.put`."""
        self.slots[key] = slot
        self._policy.add(key)

    def put_all(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """See :meth:`Idle.put_all`."""
        self.slots.update(zip(keys, slots, strict=True))
        self._add_all(keys)

    def take(self, key: OffloadKey) -> int:
        """See :meth:`Idle.take`."""
        self._policy.remove(key)
        return self.slots.pop(key)

    def take_all(self, keys: Sequence[OffloadKey]) -> None:
        """See :meth:`Idle.take_all`."""
        self._remove_all(keys)
        deque(map(self.slots.__delitem__, keys), maxlen=0)

    def victims(self, count: int) -> tuple[list[OffloadKey], list[int]]:
        """See :meth:`Idle.victims`."""
        keys = cast(list[OffloadKey], list(self._policy.victims(count)))
        return keys, list(map(self.slots.pop, keys))

    def clear(self) -> None:
        """See :meth:`Idle.clear`."""
        self.slots.clear()
        self._policy.clear()


def idle_in(policy: Policy, slots: Mapping[OffloadKey, int] | None = None) -> Idle:
    """Make the table of idle chunks for a policy; ``slots`` of those it orders already."""
    # A subclass may have changed what leaves first, and know nothing of ``evict``.
    if isinstance(policy, CarriesNumbers) and "evict" in vars(type(policy)):
        return InOwnOrder(policy)
    return ByPolicy(policy, slots or {})
