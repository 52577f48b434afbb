"""Shares of namespaces in the server's memory: what each keeps, and what it has at most."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Sequence

from kvoffload.policies.base import Policy

_MOST_PASSED = 64
"""Chunks that one eviction passes, as their namespaces keep them."""


class NamespaceShares:
    """Bytes that each namespace has, and which of them have some to spare. Not thread-safe.

    A minimum is for namespaces with engines: what an old version of a model has stored may leave.

    Args:
        least_bytes: a namespace with engines keeps so many while another one has some to spare.
        most_bytes: a namespace has at most so many; None: as many as there are.
    """

    def __init__(self, least_bytes: int = 0, most_bytes: int | None = None) -> None:
        self._least_bytes, self._most_bytes = least_bytes, most_bytes
        self.bytes_of = Counter[bytes]()
        """Namespace → bytes of its blocks: also of those that are being written, or on loan though
        their chunk has left."""
        self.attached: Container[bytes] = ()
        """Those that have engines."""

    def count(self, number: bytes, num_bytes: int) -> None:
        """Count more bytes as a namespace's, or fewer."""
        self.bytes_of[number] += num_bytes
        if not self.bytes_of[number]:
            del self.bytes_of[number]

    def has_room(self, number: bytes, num_bytes: int = 0) -> bool:
        """Whether a namespace may have so many more."""
        most = self._most_bytes
        return most is None or self.bytes_of[number] + num_bytes <= most

    def keeps(self, number: bytes) -> bool:
        """Whether a namespace has none to spare."""
        return number in self.attached and self.bytes_of[number] <= self._least_bytes

    def givers(self) -> list[bytes]:
        """Return the namespaces that have some to spare, those with most of them first."""
        least = self._least_bytes
        spare = Counter(
            {n: size - least * (n in self.attached) for n, size in self.bytes_of.items()}
        )
        return [number for number, left in spare.most_common() if left > 0]


class NamespaceOrder:
    """Chunks of all namespaces, each of which has a policy of its own; a policy itself.

    The chunk that was used least recently tells which namespace makes room, unless that one has
    none to spare. The namespace's policy tells which of its chunks leaves. So what a namespace
    keeps stays in its order.

    Args:
        make_policy: makes the order of one namespace.
        shares: knows what namespaces have.
        number_of: says whose a chunk is.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        shares: NamespaceShares,
        number_of: Callable[[bytes], bytes],
    ) -> None:
        self._policies = defaultdict[bytes, Policy](make_policy)
        self._shares, self._number_of = shares, number_of
        self._by_use = OrderedDict[bytes, None]()
        """All chunks, the least recently used first; but one that an eviction passes is last."""

    def add(self, keys: Sequence[bytes]) -> None:
        for number, own in self._apart(keys):
            self._policies[number].add(own)
        self._by_use.update(dict.fromkeys(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        for number, own in self._apart(keys):
            self._policies[number].touch(own)
        for key in keys:
            if key in self._by_use:
                self._by_use.move_to_end(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        for number, own in self._apart(keys):
            self._policies[number].remove(own)
        for key in keys:
            del self._by_use[key]

    def victims(self, count: int) -> Sequence[bytes]:
        """Take chunks that may leave; none if those to spare are not in the order."""
        taken = list[bytes]()
        while len(taken) < count and (number := self._giver()) is not None:
            taken += self.victims_of(number, 1)
        return taken

    def victims_of(self, number: bytes, count: int) -> Sequence[bytes]:
        """Take chunks of one namespace."""
        taken = self._policies[number].victims(count)
        for key in taken:
            del self._by_use[key]
        return taken

    def any_victims(self) -> Sequence[bytes]:
        """Take a chunk of the namespace of the oldest one, whatever it keeps."""
        oldest = next(iter(self._by_use), None)
        return () if oldest is None else self.victims_of(self._number_of(oldest), 1)

    def _giver(self) -> bytes | None:
        """Return the namespace whose turn it is to make room; None: there is none."""
        for _ in range(min(_MOST_PASSED, len(self._by_use))):
            key = next(iter(self._by_use))
            # It has had its turn, whichever chunk of its namespace leaves.
            self._by_use.move_to_end(key)
            if not self._shares.keeps(number := self._number_of(key)):
                return number
        givers = self._shares.givers()
        if not givers and self._by_use:  # the minima are more than the memory
            return self._number_of(next(iter(self._by_use)))
        return next((number for number in givers if self._policies.get(number)), None)

    def forget(self, number: bytes) -> None:
        """Forget the order of a namespace, which has no chunk any more."""
        self._policies.pop(number, None)

    def _apart(self, keys: Sequence[bytes]) -> list[tuple[bytes, list[bytes]]]:
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            groups.setdefault(self._number_of(key), []).append(key)
        return list(groups.items())

    def clear(self) -> None:
        self._policies.clear()
        self._by_use.clear()

    def __len__(self) -> int:
        return len(self._by_use)

    def __contains__(self, key: object) -> bool:
        return key in self._by_use
