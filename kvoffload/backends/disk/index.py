"""The index: which chunks a process believes to be on disk, and their order of eviction.

Names carry a namespace number in front of the key, because the evicting process evicts in every
namespace under the root. The index may be wrong: each load verifies what it finds.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from kvoffload.backends.changes import ChangedKeys
from kvoffload.policies.base import Policy
from kvoffload.policies.kept_order import KeptOrder
from kvoffload.policies.return_order import ReturnOrder
from kvoffload.policies.tenant_order import TenantShares, told_apart
from kvoffload.policies.told_return import LatestReturns, ToldReturn

Name = bytes
"""Two bytes of namespace number, then the key."""

T = TypeVar("T")
_SLICE = 256
_LEAST_BYTES = 8192
"""A chunk has two pages at least; a damaged file may have none."""


def name_of(number: int, key: bytes) -> Name:
    """Return the name of a key in namespace ``number`` of this process."""
    return number.to_bytes(2, "big") + key


def split_name(name: Name) -> tuple[int, bytes]:
    """Return the namespace number and the key of a name."""
    return int.from_bytes(name[:2], "big"), name[2:]


def named(told: ToldReturn) -> ToldReturn:
    """Return what is told of keys of the own namespace, told of their names."""
    names = [name_of(0, key) for key in told.keys]
    return told._replace(claim=name_of(0, told.claim), keys=names)


def _slices(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield items in parts for the time under the lock: the I/O loop may be waiting for it."""
    remaining = iter(items)
    while part := list(islice(remaining, _SLICE)):
        yield part


_OWN = name_of(0, b"")
"""How the names of this process's own namespace begin."""


class Index:
    """Names → allocated bytes, and an eviction order over them. Thread-safe; never does I/O."""

    def __init__(
        self,
        make_policy: Callable[[int], Policy],
        capacity_bytes: int,
        tenants: TenantShares | None = None,
    ) -> None:
        """Make an empty index.

        Args:
            make_policy: makes the order, for so many entries.
            capacity_bytes: of the store.
            tenants: shares of the tenants that :meth:`own` tells; used by this index alone.
        """
        self._tenants = tenants
        self._make_policy = told_apart(make_policy, tenants)
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Name, int] = OrderedDict()
        """In order of recency whatever the policy, for the snapshot."""
        self._hidden: set[Name] = set()
        self._dropped: set[Name] | None = None
        """Names dropped during the current scan, which may have seen their files before."""
        self._order: KeptOrder | None = None
        self._entries = 0
        """Chunks that fit, as estimated from the first one."""
        self._returns: ReturnOrder | None = None
        """Wraps the policy from the first told return on."""
        self._early_returns, self._hint_share = LatestReturns(), 0.0
        """What was told before the first chunk."""
        self.needed: frozenset[Name] = frozenset()
        """Names that requests wait for, whether they are known or a scan is yet to find them."""
        self._spared: set[Name] = set()
        """Those of them that are out of the policy's order."""
        self._changes = ChangedKeys()
        """Names of the own namespace that appeared or left."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: Name) -> bool:
        # Two look-ups without the lock: each is atomic, and the answer may be wrong anyway.
        return name in self._sizes and name not in self._hidden

    def is_hidden(self, name: Name) -> bool:
        """Return whether a name was declared absent although its file may exist."""
        return name in self._hidden

    def size(self, name: Name) -> int | None:
        """Return the bytes a chunk was counted with; None if it is unknown."""
        return self._sizes.get(name)

    @property
    def has_victims(self) -> bool:
        """Whether any known chunk can be evicted."""
        return self._order is not None and len(self._order) > 0

    @property
    def is_whole(self) -> bool:
        """Whether all known chunks are in the order: none is being evicted, or undeletable."""
        return len(self._sizes) == (0 if self._order is None else len(self._order))

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares: whose chunk is the next victim may change with each drop."""
        return self._tenants is not None

    def begin_scan(self) -> None:
        """Ignore files that leave during the scan although the scan has seen them."""
        with self._lock:
            self._dropped = set()

    def end_scan(self) -> None:
        with self._lock:
            self._dropped = None

    def was_dropped(self, name: Name) -> bool:
        """Return whether a chunk left during the current scan."""
        return self._dropped is not None and name in self._dropped

    def own(self, owned: Iterable[tuple[Name, bytes]]) -> None:
        """Note the tenants of chunks about to be stored, before room is made for them.

        A chunk without this counts for no tenant.
        """
        if (tenants := self._tenants) is not None:
            with self._lock:
                for name, tenant in owned:
                    if name not in self._sizes:
                        tenants.own((name,), tenant)

    def disown(self, names: Iterable[Name]) -> None:
        """Take back :meth:`own` for chunks that were not stored."""
        if (tenants := self._tenants) is not None:
            with self._lock:
                tenants.forget(name for name in names if name not in self._sizes)

    def add(self, names: Sequence[Name], allocated_bytes: int) -> None:
        """Add published chunks of one size as the most recent ones, no longer hidden.

        If it raises, no new one is known.
        """
        with self._lock:
            self._hidden.difference_update(names)
            if self._dropped is not None:
                self._dropped.difference_update(names)
            self._put(dict.fromkeys(names, allocated_bytes))
            for name in names:
                self._note(name)

    def found(
        self, sizes: Iterable[tuple[Name, int]], *, again: bool = True, measure: bool = False
    ) -> None:
        """Add chunks that a scan found, the least recently used first.

        ``again``: known ones move behind those that were named before; else they stay.
        ``measure``: their sizes are corrected, and undeletable ones can be evicted again.
        """
        for some in _slices(sizes):
            with self._lock:
                gone = self._dropped or ()
                part = {name: size for name, size in some if name not in gone}
                new = [name for name in part if name not in self._sizes]
                self._put(part if again else {name: part[name] for name in new})
                if measure:
                    self._sizes.update(part)
                    for name in part:
                        self._put_back(name)
                if self._changes.is_read:
                    for name in new:
                        self._note(name)

    def touch(self, names: Iterable[Name]) -> None:
        """Note a use of these chunks, the last named becomes the most recent."""
        with self._lock:
            known = [name for name in names if name in self._sizes]
            for name in known:
                self._sizes.move_to_end(name)
            if (order := self._order) is not None:
                order.touch(known if self.is_whole else [n for n in known if n in order])

    def reorder(self, names: Sequence[Name]) -> None:
        """Put chunks that were stored together into this order; counts as no use."""
        if len(names) < 2:
            return
        with self._lock:
            self._put({name: self._sizes[name] for name in names if name in self._sizes})

    def drop(self, name: Name) -> bool:
        """Remove a name whose file is gone; return whether it was known."""
        with self._lock:
            self._hidden.discard(name)
            if self._dropped is not None:
                self._dropped.add(name)
            known = self._sizes.pop(name, None) is not None
            if known and self._order is not None:
                if name in self._order:
                    self._order.remove((name,))
                self._spared.discard(name)
                self._forget_tenant(name)
            if known:
                self._note(name)
            return known

    def hide(self, names: Iterable[Name]) -> None:
        """Treat these as absent until they are published again; they still take up space."""
        with self._lock:
            for name in names:
                if name in self._sizes:
                    self._hidden.add(name)
                    self._note(name)

    def victims(self, count: int) -> Sequence[Name]:
        """Take the next names to evict out of the order; they stay known until dropped."""
        with self._lock:
            if (order := self._order) is None:
                return ()
            if self._returns is not None:
                self._returns.capacity = len(self._sizes)  # now it is full
            taken = [*order.victims(count)]
            if len(taken) < count and self._spared:
                self.needed = frozenset()
                self._end_sparing(list(self._spared))
                taken += order.victims(count - len(taken))
            return taken

    def spare(self, names: Iterable[Name]) -> None:
        """Take these names out of the order once they are known; put back those of before."""
        needed = frozenset(names)
        with self._lock:
            self.needed = needed
        for part in _slices([name for name in list(self._spared) if name not in needed]):
            with self._lock:
                self._end_sparing(part)
        for part in _slices(needed):
            with self._lock:
                self._spare(part)

    def _spare(self, names: Iterable[Name]) -> None:
        """Take those of these names out of the order that requests wait for."""
        order, spared, needed = self._order, self._spared, self.needed
        if order is None or not needed:
            return
        new = [name for name in names if name in needed and name not in spared]
        new = [name for name in new if name in order.normal]
        order.keep(new)
        spared.update(new)

    def _end_sparing(self, names: Iterable[Name]) -> None:
        mine = [name for name in names if name in self._spared]
        self._spared.difference_update(mine)
        if self._order is not None and mine:
            self._order.let_go(mine)

    def expect(self, returns: Iterable[ToldReturn], share: float) -> None:
        """Order chunks by when they are needed again; see :meth:`Spares.expect`."""
        for told in returns:
            with self._lock:
                self._hint_share = share
                if self._order is None:
                    self._early_returns.note((told,))
                else:
                    self._expect(self._order, told)

    def _expect(self, order: KeptOrder, told: ToldReturn) -> None:
        if self._returns is None:
            self._returns = ReturnOrder(order.normal, self._entries, self._hint_share)
            order.normal = self._returns
        told.apply(self._returns)

    def put_back(self, name: Name) -> None:
        """Return a victim to the order: another process uses it."""
        with self._lock:
            if name in self._sizes:
                self._put_back(name)

    def sizes(self) -> list[tuple[Name, int]]:
        """Return a copy of all names and sizes, the least recently used first."""
        with self._lock:
            return list(self._sizes.items())

    def own_bytes(self) -> int:
        """Return the bytes of the chunks of the own namespace."""
        return sum(size for name, size in self.sizes() if name.startswith(_OWN))

    # ---- for the reader of changes ----

    @property
    def num_changes(self) -> int:
        """Names that changed and were not taken."""
        return len(self._changes)

    def take_changes(self, limit: int) -> list[Name]:
        """Take names of the own namespace that appeared or left; the first calls list them all."""
        if not self._changes.is_read:
            self.list_again()
        # Without the lock of the index, which a copy of all names may hold for long.
        return self._changes.take(limit)

    def list_again(self) -> None:
        """Note all names of the own namespace as changed."""
        with self._lock:
            self._changes.begin_parts([[n for n in self._sizes if n.startswith(_OWN)]])

    def note(self, names: Iterable[Name]) -> None:
        """Note that chunks became fresh, or expired."""
        if self._changes.is_read:
            for name in names:
                if name in self._sizes:
                    self._note(name)

    def _note(self, name: Name) -> None:
        if name.startswith(_OWN):
            self._changes.note(name)

    def _forget_tenant(self, name: Name) -> None:
        if self._tenants is not None:
            self._tenants.forget((name,))

    def _put_back(self, name: Name) -> None:
        if self._order is not None and name not in self._order:
            self._order.add((name,))
            self._spare((name,))

    def _put(self, sizes: Mapping[Name, int]) -> None:
        """Make names known and evictable, the last one the most recent."""
        if not sizes:
            return
        order = self._order_for(next(iter(sizes.values())))
        known = self._sizes.keys() & sizes.keys()
        # Remove first: a second add would count as a use with some policies.
        order.remove([name for name in sizes if name in known and name in order])
        order.add([*sizes])
        self._spare(sizes)
        self._sizes.update(sizes)
        for name in sizes if known else ():
            self._sizes.move_to_end(name)

    def _order_for(self, allocated_bytes: int) -> KeptOrder:
        """Return the order; the first chunk, of so many bytes, makes it."""
        if self._order is None:
            # A policy takes its capacity in entries, estimated from the size of the first file.
            self._entries = max(1, self._capacity_bytes // max(_LEAST_BYTES, allocated_bytes))
            if self._tenants is not None:
                self._tenants.limit(self._entries)
            self._order = KeptOrder(self._make_policy(self._entries), self._spared)
            early, self._early_returns = self._early_returns, LatestReturns()
            for told in early.to_come():
                self._expect(self._order, told)
        return self._order
