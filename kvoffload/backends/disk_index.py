"""Which chunks a process believes to be on disk, and in what order they would leave.

Names carry a namespace number in front of the key, because the process that evicts looks after
every namespace under the root. Belief is enough: a read verifies whatever it finds.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from kvoffload.offload.policies.base import Policy

Name = bytes
"""Two bytes of namespace number, then the key."""


def name_of(number: int, key: bytes) -> Name:
    """Make the name of a key in namespace ``number`` of this process."""
    return number.to_bytes(2, "big") + key


def split_name(name: Name) -> tuple[int, bytes]:
    """Take a name apart: namespace number and key."""
    return int.from_bytes(name[:2], "big"), name[2:]


class Index:
    """Names → allocated bytes, and an eviction order over them. Thread-safe; never does I/O."""

    def __init__(self, make_policy: Callable[[int], Policy], capacity_bytes: int) -> None:
        self._make_policy = make_policy
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._sizes: dict[Name, int] = {}
        self._hidden: set[Name] = set()
        self._order: Policy | None = None

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: Name) -> bool:
        # Two look-ups without the lock: each is atomic, and the answer is a belief anyway.
        return name in self._sizes and name not in self._hidden

    def add(self, name: Name, allocated_bytes: int) -> None:
        """A chunk was published: it is the most recent one, and no longer hidden."""
        with self._lock:
            self._hidden.discard(name)
            known = name in self._sizes
            self._sizes[name] = allocated_bytes
            order = self._ordered(allocated_bytes)
            if known and name in order:
                order.touch(name)
            else:
                order.add(name)

    def found(self, sizes: Iterable[tuple[Name, int]]) -> None:
        """A scan saw these files, the least recently used first; names known keep their rank."""
        with self._lock:
            for name, allocated_bytes in sizes:
                known = name in self._sizes
                self._sizes[name] = allocated_bytes
                if not known:
                    self._ordered(allocated_bytes).add(name)

    def touch(self, name: Name) -> None:
        """A chunk was read."""
        with self._lock:
            if self._order is not None and name in self._order:
                self._order.touch(name)

    def drop(self, name: Name) -> bool:
        """A file is gone; say whether it was known."""
        with self._lock:
            self._hidden.discard(name)
            known = self._sizes.pop(name, None) is not None
            if known and self._order is not None:
                self._order.remove(name)
            return known

    def hide(self, names: Iterable[Name]) -> None:
        """Answer "not here" for these until they are published again; they still take up space."""
        with self._lock:
            self._hidden.update(name for name in names if name in self._sizes)

    def victims(self, count: int) -> Sequence[Name]:
        """Take names out of the order, the first to leave first; they stay known until dropped."""
        with self._lock:
            return self._order.victims(count) if self._order is not None else ()

    def names(self) -> list[Name]:
        """A copy of all names."""
        with self._lock:
            return list(self._sizes)

    def allocated_bytes(self) -> int:
        """The sum over all names."""
        with self._lock:
            return sum(self._sizes.values())

    def _ordered(self, allocated_bytes: int) -> Policy:
        # A policy wants its capacity in entries: the first chunk tells how big entries are.
        if self._order is None:
            self._order = self._make_policy(max(1, self._capacity_bytes // max(1, allocated_bytes)))
        return self._order
