"""Host memory for chunks of several sizes: extents go to the size that needs them.

Each size has its own slots and its own eviction order. An extent with nothing in it belongs to no
one. When none is left, a size evicts its own chunks, unless it has less than its share: then it
takes an extent from the size that is furthest above its own. A size's share is its part of the
bytes asked for lately, which is the part it would have if all chunks were in one order.
"""

from collections.abc import Callable, Collection, Sequence
from typing import cast

from kvoffload.messages import OffloadKey
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.priority import SHARE_ABOVE, ByPriority
from kvoffload.policies.base import Policy

STEAL_TRIES = 4
"""Extents looked at when one is to be taken away; one with a chunk in use cannot be."""
DEMAND_MEMORY = 2.0
"""Demand is halved each time this many times the memory has been asked for."""


class _Size:
    """The slots of one size: a power of its own over some extents."""

    def __init__(self, rows: int, per_extent: int, policy: Policy) -> None:
        self.rows = rows
        self.per_extent = per_extent
        self.policy = policy
        self.num_extents = 0
        self.num_free = 0
        self.num_ready = 0
        self.demand = 0.0
        # Extents with free slots, and these.
        self.free: dict[int, list[int]] = {}


class _OrderBySize:
    """The orders of all sizes behind the face of one policy."""

    def __init__(self, size_of: Callable[[bytes], _Size], sizes: Sequence[_Size]) -> None:
        self._size_of = size_of
        self._sizes = sizes

    def add(self, key: bytes) -> None:
        self._size_of(key).policy.add(key)

    def touch(self, key: bytes) -> None:
        self._size_of(key).policy.touch(key)

    def remove(self, key: bytes) -> None:
        self._size_of(key).policy.remove(key)

    def victims(self, count: int) -> Sequence[bytes]:
        """Take victims from the largest order first; the ledger itself asks each size's policy."""
        taken: list[bytes] = []
        for size in sorted(self._sizes, key=lambda size: -len(size.policy)):
            taken.extend(size.policy.victims(count - len(taken)))
        return taken

    def __len__(self) -> int:
        return sum(len(size.policy) for size in self._sizes)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._size_of(key).policy

    def clear(self) -> None:
        for size in self._sizes:
            size.policy.clear()


class ExtentLedger(HostCache):
    """A host ledger for several sizes; a slot's number is that of its first row.

    Args:
        geometry: with extents.
        new_policy: makes the order of a size, given the most chunks of it that could ever fit.
    """

    def __init__(self, geometry: HostGeometry, new_policy: Callable[[int], Policy]) -> None:
        self._extent_rows = extent_rows = geometry.extent_rows
        self._num_extents = geometry.num_extents
        self._by_rows = {
            rows: _Size(
                rows,
                extent_rows // rows,
                new_policy(extent_rows // rows * geometry.num_extents),
            )
            for rows in geometry.sizes
        }
        sizes = list(self._by_rows.values())
        self._sizes = sizes
        self._smallest = sizes[0]
        # By the key's last four bytes, its group.
        self._by_group = {
            group.to_bytes(4, "big"): self._by_rows[rows]
            for group, rows in enumerate(geometry.rows_of_group)
        }
        super().__init__(geometry.num_rows, _OrderBySize(self._size_of, sizes), geometry.row_bytes)
        self._unowned = list(range(geometry.num_extents - 1, -1, -1))
        self._owner: list[_Size | None] = [None] * geometry.num_extents
        # Slot → the loadable chunk in it, so that an extent can be emptied.
        self._key_in: dict[int, OffloadKey] = {}

    def _size_of(self, key: bytes) -> _Size:
        return self._by_group.get(key[-4:], self._smallest)

    # ---- figures ----

    def room_for(self, key: OffloadKey) -> int:
        """See :meth:`HostCache.room_for`; does not count what other sizes would have to give."""
        size = self._size_of(key)
        return size.num_free + len(size.policy) + len(self._unowned) * size.per_extent

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """See :meth:`HostCache.has_room`.

        Extents of nobody are shared among the sizes, and so is what sizes have beyond their needs.
        Of the latter not all can be taken away, if chunks in use are strewn over it.
        """
        if all(map(self.is_ready, keys)):
            return True
        left = {size: size.num_free + len(size.policy) for size in self._sizes}
        for key in keys:
            if key not in self.pinned:  # takes a slot, or is idle and does not make room
                left[self._size_of(key)] -= 1
        lacking = sum(-(count // size.per_extent) for size, count in left.items() if count < 0)
        spare = sum(count // size.per_extent for size, count in left.items() if count > 0)
        return lacking <= len(self._unowned) + spare

    @property
    def busy_slots(self) -> int:
        """See :meth:`HostCache.busy_slots`."""
        return sum(
            size.num_extents * size.per_extent - size.num_free - len(size.policy)
            for size in self._sizes
        )

    def bytes_of(self, key: OffloadKey) -> int:
        """See :meth:`HostCache.bytes_of`."""
        return self._size_of(key).rows * self.slot_bytes

    @property
    def resident_bytes(self) -> int:
        """See :meth:`HostCache.resident_bytes`."""
        return sum(size.num_ready * size.rows for size in self._sizes) * self.slot_bytes

    @property
    def inflight_bytes(self) -> int:
        """See :meth:`HostCache.inflight_bytes`."""
        rows = sum(
            (size.num_extents * size.per_extent - size.num_free - size.num_ready) * size.rows
            for size in self._sizes
        )
        return rows * self.slot_bytes

    # ---- slots ----

    def reserve(
        self, keys: Sequence[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> tuple[list[int], list[OffloadKey]]:
        """See :meth:`HostCache.reserve`."""
        kept = frozenset(protected)
        wanted: dict[_Size, int] = {}
        for key in keys:
            size = self._size_of(key)
            wanted[size] = wanted.get(size, 0) + 1
        evicted: list[OffloadKey] = []
        taken: dict[_Size, list[int]] = {}
        for size, count in wanted.items():
            self._note_demand(size, count)
            self._make_room(size, count, kept, evicted)
            # Taken at once, or the next size might be given the extent they are in.
            taken[size] = [self._take(size) for _ in range(min(count, size.num_free))]
            taken[size].reverse()
        slots: list[int] = []
        for key in keys:
            left = taken[self._size_of(key)]
            if not left:
                break
            slots.append(left.pop())
        for slot in (slot for left in taken.values() for slot in left):
            self._put(slot)
        return slots, evicted

    def _make_room(
        self, size: _Size, count: int, kept: frozenset[OffloadKey], evicted: list[OffloadKey]
    ) -> None:
        while size.num_free < count:
            if self._unowned:
                self._give_extent(size, self._unowned.pop())
            elif self._below_share(size) and self._steal_for(size, kept, evicted):
                pass
            elif gone := self._evict_of(size, count - size.num_free, kept):
                evicted.extend(gone)
            elif not self._steal_for(size, kept, evicted):
                return

    def _evict_of(self, size: _Size, count: int, kept: frozenset[OffloadKey]) -> list[OffloadKey]:
        gone: list[OffloadKey] = []
        spared: list[OffloadKey] = []
        while len(gone) < count:
            victims = cast(Sequence[OffloadKey], size.policy.victims(count - len(gone)))
            if not victims:
                break
            for key in victims:
                (spared if key in kept else gone).append(key)
        for key in gone:
            self._vacate(key)
        for key in spared:
            size.policy.add(key)
        return gone

    def _vacate(self, key: OffloadKey) -> None:
        """An idle chunk, taken out of its order, leaves its slot."""
        slot = self.idle.slots.pop(key)
        self._unready(key, slot)
        self._put(slot)
        self._forget_priorities((key,))

    def _unready(self, key: OffloadKey, slot: int) -> None:
        del self._key_in[slot]
        self._size_of(key).num_ready -= 1

    def _take(self, size: _Size) -> int:
        extent, free = next(iter(size.free.items()))
        slot = free.pop()
        if not free:
            del size.free[extent]
        size.num_free -= 1
        return slot

    def _put(self, slot: int) -> None:
        extent = slot // self._extent_rows
        size = self._owner[extent]
        if size is None:
            raise LookupError(f"host slot {slot} is in an extent that belongs to no size")
        free = size.free.setdefault(extent, [])
        free.append(slot)
        size.num_free += 1
        if len(free) == size.per_extent:
            del size.free[extent]
            size.num_free -= size.per_extent
            size.num_extents -= 1
            self._owner[extent] = None
            self._unowned.append(extent)

    # ---- who gets which extent ----

    def _give_extent(self, size: _Size, extent: int) -> None:
        first = extent * self._extent_rows
        size.free[extent] = [first + i * size.rows for i in range(size.per_extent - 1, -1, -1)]
        size.num_free += size.per_extent
        size.num_extents += 1
        self._owner[extent] = size

    def _note_demand(self, size: _Size, count: int) -> None:
        size.demand += count * size.rows
        if sum(each.demand for each in self._sizes) > DEMAND_MEMORY * self.num_slots:
            for each in self._sizes:
                each.demand /= 2

    def _excess(self, size: _Size) -> float:
        """Extents that a size has beyond its share."""
        demand = sum(each.demand for each in self._sizes)
        return size.num_extents - size.demand / demand * self._num_extents

    def _below_share(self, size: _Size) -> bool:
        # A whole extent below, or two sizes would take the same one from each other for ever.
        return self._excess(size) <= -1

    def _steal_for(
        self, size: _Size, kept: frozenset[OffloadKey], evicted: list[OffloadKey]
    ) -> bool:
        """Empty an extent of another size: the size most above its share that can give one."""
        others = sorted((s for s in self._sizes if s is not size), key=lambda s: -self._excess(s))
        return any(self._empty_an_extent(other, kept, evicted) for other in others)

    def _empty_an_extent(
        self, size: _Size, kept: frozenset[OffloadKey], evicted: list[OffloadKey]
    ) -> bool:
        """Evict what is in the extent of the chunk that leaves next, if nothing there is in use."""
        spared: list[OffloadKey] = []
        try:
            for _ in range(STEAL_TRIES):
                victims = size.policy.victims(1)
                if not victims:
                    return False
                spared.extend(map(OffloadKey, victims))
                extent = self.idle.slots[spared[-1]] // self._extent_rows
                inside = self._idle_in(size, extent, kept)
                if inside is None:
                    continue
                for key in inside:
                    if key in spared:
                        spared.remove(key)
                    else:
                        size.policy.remove(key)
                    self._vacate(key)
                evicted.extend(inside)
                return True
            return False
        finally:
            for left in spared:
                size.policy.add(left)

    def _idle_in(
        self, size: _Size, extent: int, kept: frozenset[OffloadKey]
    ) -> list[OffloadKey] | None:
        """List the chunks in an extent; None if one of its slots is in use or to be kept."""
        first = extent * self._extent_rows
        free = set(size.free.get(extent, ()))
        inside: list[OffloadKey] = []
        for slot in range(first, first + size.per_extent * size.rows, size.rows):
            if slot in free:
                continue
            key = self._key_in.get(slot)
            if key is None or key in self.pinned or key in kept:
                return None
            inside.append(key)
        return inside

    # ---- chunks ----

    def become_ready(self, key: OffloadKey, slot: int) -> None:
        """See :meth:`HostCache.become_ready`."""
        self._key_in[slot] = key
        self._size_of(key).num_ready += 1
        super().become_ready(key, slot)

    def _become_ready_all(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            self.become_ready(key, slot)

    def prioritise(self, keys: Sequence[OffloadKey], priority: int) -> None:
        """See :meth:`HostCache.prioritise`."""
        for size in self._sizes:
            if priority and not isinstance(size.policy, ByPriority):
                size.policy = ByPriority(size.policy)
            if isinstance(size.policy, ByPriority):
                marked = [k for k in keys if self._size_of(k) is size]
                if priority > 0:
                    marked = marked[: self._rows_above_left() // size.rows]
                size.policy.mark(marked, priority)

    def _rows_above_left(self) -> int:
        orders = [(size.rows, size.policy) for size in self._sizes]
        above = sum(rows * it.num_above for rows, it in orders if isinstance(it, ByPriority))
        return max(0, int(self.num_slots * SHARE_ABOVE) - above)

    def _forget_priorities(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            policy = self._size_of(key).policy
            if isinstance(policy, ByPriority):
                policy.forget((key,))

    def _marked(self) -> Collection[bytes]:
        orders = [size.policy for size in self._sizes]
        return {k for order in orders if isinstance(order, ByPriority) for k in order.marked}

    def forget(self, key: OffloadKey) -> None:
        """See :meth:`HostCache.forget`."""
        slot = self.pinned[key] if key in self.pinned else self.idle.slots[key]
        self._unready(key, slot)
        super().forget(key)

    def _free_idle(self) -> None:
        for key, slot in self.idle.slots.items():
            self._unready(key, slot)
            self._put(slot)

    # ---- self-check ----

    def _adds_up(self) -> bool:
        for size in self._sizes:
            if size.num_free != sum(map(len, size.free.values())):
                return False
            if size.num_extents != sum(owner is size for owner in self._owner):
                return False
        free = [slot for size in self._sizes for slots in size.free.values() for slot in slots]
        owned = [
            extent * self._extent_rows + i * owner.rows
            for extent, owner in enumerate(self._owner)
            if owner is not None
            for i in range(owner.per_extent)
        ]
        unowned = [extent for extent, owner in enumerate(self._owner) if owner is None]
        return (
            sorted([*free, *self._taken()]) == sorted(owned)
            and sorted(self._unowned) == unowned
            and self._key_in == {slot: key for key, slot in self.ready()}
        )
