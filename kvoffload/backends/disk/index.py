"""Which chunks a process believes to be on disk, and in what order they would leave.

Names carry a namespace number in front of the key, because the process that evicts looks after
every namespace under the root. Belief is enough: a read verifies whatever it finds.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvoffload.policies.base import Policy

Name = bytes
"""Two bytes of namespace number, then the key."""


_SLICE = 256


def name_of(number: int, key: bytes) -> Name:
    """Make the name of a key in namespace ``number`` of this process."""
    return number.to_bytes(2, "big") + key


def split_name(name: Name) -> tuple[int, bytes]:
    """Take a name apart: namespace number and key."""
    return int.from_bytes(name[:2], "big"), name[2:]


class Index:
    """Names → allocated bytes, and an eviction order over them. Thread-safe; never does I/O.

    Policies are plug-ins and may raise. What only reorders reports it and goes on: an order is no
    more than advice. :meth:`add`, :meth:`found` and :meth:`victims` raise it.
    """

    def __init__(
        self,
        make_policy: Callable[[int], Policy],
        capacity_bytes: int,
        policy_failed: Callable[[Exception], None],
    ) -> None:
        self._make_policy = make_policy
        self._capacity_bytes = capacity_bytes
        self._policy_failed = policy_failed
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Name, int] = OrderedDict()
        """In order of recency, whatever the policy, for the snapshot."""
        self._hidden: set[Name] = set()
        self._gone: set[Name] | None = None
        """What left since :meth:`watch`: a look may have seen it before."""
        self._order: Policy | None = None

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: Name) -> bool:
        # Two look-ups without the lock: each is atomic, and the answer is a belief anyway.
        return name in self._sizes and name not in self._hidden

    def hides(self, name: Name) -> bool:
        """Whether a name was declared absent although its file may be there."""
        return name in self._hidden

    def size(self, name: Name) -> int | None:
        """The bytes a chunk was counted with; None if it is not known."""
        return self._sizes.get(name)

    @property
    def has_victims(self) -> bool:
        """Whether anything known could leave."""
        return self._order is not None and len(self._order) > 0

    def watch(self, watched: bool) -> None:
        """A look begins, or has ended: what leaves meanwhile is not found by it."""
        with self._lock:
            self._gone = set() if watched else None

    def has_left(self, name: Name) -> bool:
        """Whether a chunk left during the look under way."""
        return self._gone is not None and name in self._gone

    def add(self, name: Name, allocated_bytes: int) -> None:
        """A chunk was published: it is the most recent one, and no longer hidden."""
        with self._lock:
            self._hidden.discard(name)
            if self._gone is not None:
                self._gone.discard(name)
            self._put(name, allocated_bytes)

    def found(self, sizes: Iterable[tuple[Name, int]]) -> None:
        """These files exist, the least recently used first."""
        remaining = iter(sizes)
        # In slices, because the engine's thread may be waiting for the lock.
        while part := list(islice(remaining, _SLICE)):
            with self._lock:
                for name, allocated_bytes in part:
                    if self._gone is None or name not in self._gone:
                        self._put(name, allocated_bytes)

    def measured(self, sizes: Iterable[tuple[Name, int]]) -> None:
        """These are as large; what once could not be removed may be tried again."""
        remaining = iter(sizes)
        while part := list(islice(remaining, _SLICE)):
            with self._lock:
                for name, allocated_bytes in part:
                    if name in self._sizes:
                        self._sizes[name] = allocated_bytes
                        if self._order is not None and name not in self._order:
                            self._order.add((name,))

    def touch(self, names: Iterable[Name]) -> None:
        """These chunks were read, the last named is the most recent."""
        with self._lock:
            try:
                known = [name for name in names if name in self._sizes]
                for name in known:
                    self._sizes.move_to_end(name)
                if self._order is not None:
                    self._order.touch([name for name in known if name in self._order])
            except Exception as error:
                self._policy_failed(error)

    def rank(self, names: Iterable[Name]) -> None:
        """These chunks were stored together: put them in this order, which is no use of them."""
        with self._lock:
            try:
                for name in names:
                    if name in self._sizes:
                        self._put(name, self._sizes[name])
            except Exception as error:
                self._policy_failed(error)

    def drop(self, name: Name) -> bool:
        """A file is gone; say whether it was known."""
        with self._lock:
            self._hidden.discard(name)
            if self._gone is not None:
                self._gone.add(name)
            known = self._sizes.pop(name, None) is not None
            if known and self._order is not None:
                try:
                    if name in self._order:
                        self._order.remove((name,))
                except Exception as error:
                    self._policy_failed(error)
            return known

    def hide(self, names: Iterable[Name]) -> None:
        """Answer "not here" for these until they are published again; they still take up space."""
        with self._lock:
            self._hidden.update(name for name in names if name in self._sizes)

    def victims(self, count: int) -> Sequence[Name]:
        """Take names out of the order, the first to leave first; they stay known until dropped."""
        with self._lock:
            return self._order.victims(count) if self._order is not None else ()

    def spare(self, name: Name) -> None:
        """Put back a victim that turned out to be in use by another process."""
        with self._lock:
            if name in self._sizes and self._order is not None and name not in self._order:
                self._order.add((name,))

    def sizes(self) -> list[tuple[Name, int]]:
        """A copy of everything, the least recently used first."""
        with self._lock:
            return list(self._sizes.items())

    def _put(self, name: Name, allocated_bytes: int) -> None:
        """Know a name, in order; unknown if that raises, since nothing would ever evict it."""
        self._sizes[name] = allocated_bytes
        self._sizes.move_to_end(name)
        try:
            if self._order is None:
                # A policy wants its capacity in entries: the first chunk tells how big they are.
                entries = self._capacity_bytes // max(1, allocated_bytes)
                self._order = self._make_policy(max(1, entries))
            # A file that a scan finds again was not used: it only moves to the recent end.
            if name in self._order:
                self._order.remove((name,))
            self._order.add((name,))
        except BaseException:
            self._sizes.pop(name, None)
            raise
