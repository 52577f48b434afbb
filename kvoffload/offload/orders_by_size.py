"""The eviction orders of several sizes of chunks as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvoffload.offload.eviction_order import EvictionOrder
from kvoffload.offload.priority import SHARE_ABOVE
from kvoffload.policies.return_order import ExpectedReturns

OrderOf = Callable[[bytes], EvictionOrder]
"""Returns the order of a chunk's size."""


def split(keys: Iterable[bytes], order_of: OrderOf) -> dict[EvictionOrder, list[bytes]]:
    """Return chunks by the order that they belong to."""
    by_order: dict[EvictionOrder, list[bytes]] = {}
    for key in keys:
        by_order.setdefault(order_of(key), []).append(key)
    return by_order


class _ReturnsBySize:
    """The claims on chunks of all sizes; a claim covers the chunks of each size in their order."""

    def __init__(self, order_of: OrderOf, claims: dict[EvictionOrder, ExpectedReturns]) -> None:
        self._order_of = order_of
        self._claims = claims

    def expect(self, claim: bytes, keys: Sequence[bytes], in_s: float) -> None:
        parts = split(keys, self._order_of)
        for order, claims in self._claims.items():
            claims.expect(claim, parts.get(order, ()), in_s)

    def withdraw(self, claim: bytes) -> None:
        for claims in self._claims.values():
            claims.withdraw(claim)

    def used(self, keys: Sequence[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            self._claims[order].used(mine)

    def has_claim(self, claim: bytes) -> bool:
        return any(claims.has_claim(claim) for claims in self._claims.values())


class OrdersBySize:
    """The orders of all sizes, which are asked as one; a policy itself.

    Args:
        order_of: returns the order of a chunk's size.
        rows: of a slot, by the order of its size.
        num_rows: of host memory.
    """

    def __init__(self, order_of: OrderOf, rows: Mapping[EvictionOrder, int], num_rows: int) -> None:
        self._order_of = order_of
        self._rows = rows
        self._num_rows = num_rows
        self._by_return: ExpectedReturns | None = None

    def add(self, keys: Sequence[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            order.add(mine)

    def touch(self, keys: Sequence[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            order.touch(mine)

    def remove(self, keys: Sequence[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            order.remove(mine)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take victims from the largest order first; the cache itself asks the order of a size."""
        taken: list[bytes] = []
        for order in sorted(self._rows, key=lambda order: -len(order)):
            taken.extend(order.victims(count - len(taken)))
        return taken

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def __contains__(self, key: object) -> bool:
        return any(key in order for order in self._rows)

    def clear(self) -> None:
        for order in self._rows:
            order.clear()

    def keep(self, keys: Sequence[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            order.keep(mine)

    def let_go(self, keys: Sequence[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            order.let_go(mine)

    def prioritise(self, keys: Sequence[bytes], priority: int) -> None:
        for order, mine in split(keys, self._order_of).items():
            most = self._rows_left() // self._rows[order] if priority > 0 else len(mine)
            order.mark(mine[:most], priority)

    def _rows_left(self) -> int:
        above = sum(rows * order.num_above for order, rows in self._rows.items())
        return max(0, int(self._num_rows * SHARE_ABOVE) - above)

    def forget(self, keys: Iterable[bytes]) -> None:
        for order, mine in split(keys, self._order_of).items():
            order.forget(mine)

    def returns(self, share: float, now_s: Callable[[], float]) -> ExpectedReturns:
        if self._by_return is None:
            claims = {order: order.returns(share, now_s) for order in self._rows}
            self._by_return = _ReturnsBySize(self._order_of, claims)
        return self._by_return
