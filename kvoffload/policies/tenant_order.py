"""Shares of tenants, over any policy: a tenant above its share evicts its own chunks first.

The wrapped policy orders the chunks of all tenants, and decides while no tenant is above its share.
Above it, the least recently used chunk of the tenant furthest above leaves. A store without need of
room evicts nothing: a share is no limit.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

from kvoffload.policies.base import Policy


class TenantShares:
    """Whose the chunks of a store are, and which tenants are above their share.

    Args:
        share: the part of the store that one tenant may hold, above 0.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._limit_bytes: float = inf
        self.bytes_of: Callable[[Any], int] = lambda key: 1
        """The bytes that a chunk counts."""
        self.of: dict[bytes, bytes] = {}
        """Chunk in the store, or about to come → its tenant."""
        self._bytes: dict[bytes, int] = {}
        self._above: set[bytes] = set()

    def use(self, capacity_bytes: int, bytes_of: Callable[[Any], int]) -> None:
        """Count the chunks of a store by their bytes, which stay the same; before the first one."""
        self.bytes_of = bytes_of
        self.limit(capacity_bytes)

    def limit(self, capacity: int) -> None:
        """Say how much the store holds; without :meth:`use`, in chunks."""
        self._limit_bytes = int(self._share * capacity)
        self._above = {each for each, held in self._bytes.items() if held > self._limit_bytes}

    def own(self, keys: Iterable[bytes], tenant: bytes) -> None:
        """Count chunks as a tenant's, before they are in the order; counted ones stay as they are.

        Args:
            keys: the chunks.
            tenant: its name; empty for chunks that all share.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self.of]
        self.of.update(dict.fromkeys(new, tenant))
        self.count(tenant, sum(map(self.bytes_of, new)))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Count chunks no longer, which left for good."""
        for key in keys:
            if (tenant := self.of.pop(key, None)) is not None:
                self.count(tenant, -self.bytes_of(key))

    def count(self, tenant: bytes, num_bytes: int) -> None:
        """Count more bytes as a tenant's, or fewer; :meth:`own` and :meth:`forget` do so."""
        held = self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        if held > self._limit_bytes:
            self._above.add(tenant)
        else:
            self._above.discard(tenant)
        if not held:
            del self._bytes[tenant]

    def clear(self) -> None:
        """Forget all chunks."""
        self.of.clear()
        self._bytes.clear()
        self._above.clear()

    def above(self) -> list[tuple[bytes, float]]:
        """Return the tenants above their share and by how many bytes, the furthest first."""
        above = [(tenant, self._bytes[tenant] - self._limit_bytes) for tenant in self._above]
        return sorted(above, key=lambda each: -each[1])


class TenantOrder:
    """A policy that takes victims of tenants above their share first; a policy itself.

    Args:
        normal: orders all chunks; used by this object alone.
        shares: knows whose each chunk is, before it is added; several orders may have the same.
    """

    def __init__(self, normal: Policy, shares: TenantShares) -> None:
        self.normal = normal
        self._shares = shares
        self._orders: dict[bytes | None, OrderedDict[bytes, None]] = {}
        """Tenant → its chunks in the order, the least recently used first. None: those of which it
        is not known whose they are."""

    def add(self, keys: Sequence[bytes]) -> None:
        self.normal.add(keys)
        of = self._shares.of
        for key in keys:
            self._orders.setdefault(of.get(key), OrderedDict())[key] = None

    def touch(self, keys: Sequence[bytes]) -> None:
        self.normal.touch(keys)
        of = self._shares.of
        for key in keys:
            order = self._orders.get(of.get(key))
            if order is not None and key in order:
                order.move_to_end(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.normal.remove(keys)
        self._drop(keys)

    def victims(self, count: int) -> Sequence[bytes]:
        taken: list[bytes] = []
        # A tenant alone takes room of no other one: the policy knows best what to evict.
        for tenant, excess in self._shares.above() if len(self._orders) > 1 else ():
            for key in self._orders.get(tenant, ()):
                if len(taken) == count or excess <= 0:
                    break
                taken.append(key)
                excess -= self._shares.bytes_of(key)  # noqa: PLW2901
        if taken:
            self.remove(taken)
        if len(taken) < count:
            others = self.normal.victims(count - len(taken))
            self._drop(others)
            taken += others
        return taken

    def _drop(self, keys: Iterable[bytes]) -> None:
        of = self._shares.of
        for key in keys:
            tenant = of.get(key)
            order = self._orders[tenant]
            del order[key]
            if not order:
                del self._orders[tenant]

    def clear(self) -> None:
        self.normal.clear()
        self._orders.clear()

    def __len__(self) -> int:
        return len(self.normal)

    def __contains__(self, key: object) -> bool:
        return key in self.normal


def told_apart(
    new_policy: Callable[[int], Policy], shares: TenantShares | None
) -> Callable[[int], Policy]:
    """Return what makes the policy of a store in which tenants have these shares, if any."""
    return new_policy if shares is None else lambda most: TenantOrder(new_policy(most), shares)
