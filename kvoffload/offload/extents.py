"""Host memory for chunks of several sizes: extents go to the size that needs them.

Each size has its own slots and its own eviction order. An empty extent belongs to no size. When
none is left, a size evicts its own chunks. A size below its share takes an extent from the size
that is furthest above its share. A size's share is its part of the bytes requested lately. With one
order for all chunks, it would have the same part.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from kvoffload.messages import OffloadKey
from kvoffload.offload.eviction_order import EvictionOrder
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.orders_by_size import OrdersBySize
from kvoffload.policies.base import Policy

STEAL_TRIES = 4
"""Extents tried when one is to be taken away; one with a chunk in use cannot be taken."""
DEMAND_MEMORY = 2.0
"""Halve the demand counters after reserving this many times the memory's size."""


class _Size:
    """The slots of one size, in some of the extents."""

    def __init__(self, rows: int, per_extent: int, order: EvictionOrder) -> None:
        self.rows = rows
        self.per_extent = per_extent
        self.order = order
        self.num_extents = 0
        self.num_free = 0
        self.num_ready = 0
        self.demand = 0.0
        # Extents with free slots, and these.
        self.free: dict[int, list[int]] = {}


class ExtentCache(HostCache):
    """A host cache for several sizes; a slot's number is that of its first row.

    Args:
        geometry: with extents.
        new_policy: makes the order of a size, given the most chunks of it that could ever fit.
        first_row: the first row that may be used.
    """

    def __init__(
        self, geometry: HostGeometry, new_policy: Callable[[int], Policy], first_row: int = 0
    ) -> None:
        self._extent_rows = extent_rows = geometry.extent_rows
        self._first_extent = -(-first_row // extent_rows)
        self._num_extents = max(0, geometry.num_extents - self._first_extent)
        by_rows, claims = {}, dict[OffloadKey, Any]()
        for rows in geometry.sizes:
            per_extent = extent_rows // rows
            most = per_extent * self._num_extents
            order = EvictionOrder(new_policy(most), most, claims)
            by_rows[rows] = _Size(rows, per_extent, order)
        self._sizes = list(by_rows.values())
        self._smallest = self._sizes[0]
        # By the key's last four bytes, its group.
        self._by_group = {
            group.to_bytes(4, "big"): by_rows[rows]
            for group, rows in enumerate(geometry.rows_of_group)
        }
        rows_of = {size.order: size.rows for size in self._sizes}
        orders = OrdersBySize(lambda key: self._size_of(key).order, rows_of, geometry.num_rows)
        super().__init__(geometry.num_rows, orders, geometry.row_bytes)
        self.order, self.claims = orders, claims
        self._unowned = list(range(geometry.num_extents - 1, self._first_extent - 1, -1))
        self._owner: list[_Size | None] = [None] * geometry.num_extents
        # Slot → the ready chunk in it, so that an extent can be emptied.
        self._key_in: dict[int, OffloadKey] = {}

    def _size_of(self, key: bytes) -> _Size:
        return self._by_group.get(key[-4:], self._smallest)

    # ---- figures ----

    def room_for(self, key: OffloadKey) -> int:
        """See :meth:`HostCache.room_for`; leaves out slots that other sizes would have to give."""
        size = self._size_of(key)
        return size.num_free + len(size.order) + len(self._unowned) * size.per_extent

    def least_room(self, keys: Sequence[OffloadKey]) -> int:
        return min(map(self.room_for, {key[-4:]: key for key in keys}.values()))

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """See :meth:`HostCache.has_room`.

        Unowned extents are shared among the sizes, and so are extents beyond a size's needs. An
        extent with a pinned chunk cannot be taken away, which this estimate ignores.
        """
        if all(map(self.is_ready, keys)):
            return True
        left = {size: size.num_free + len(size.order) for size in self._sizes}
        for key in keys:
            if key not in self.pinned:  # takes a slot, or is evictable but makes no room
                left[self._size_of(key)] -= 1
        lacking = sum(-(count // size.per_extent) for size, count in left.items() if count < 0)
        spare = sum(count // size.per_extent for size, count in left.items() if count > 0)
        return lacking <= len(self._unowned) + spare

    @property
    def busy_slots(self) -> int:
        """See :meth:`HostCache.busy_slots`; in rows."""
        return sum(
            (size.num_extents * size.per_extent - size.num_free - len(size.order)) * size.rows
            for size in self._sizes
        )

    def bytes_of(self, key: OffloadKey) -> int:
        return self._size_of(key).rows * self.slot_bytes

    def bytes_of_all(self, keys: Sequence[OffloadKey]) -> int:
        return sum(map(self.bytes_of, keys))

    @property
    def resident_bytes(self) -> int:
        return sum(size.num_ready * size.rows for size in self._sizes) * self.slot_bytes

    @property
    def inflight_bytes(self) -> int:
        rows = sum(
            (size.num_extents * size.per_extent - size.num_free - size.num_ready) * size.rows
            for size in self._sizes
        )
        return rows * self.slot_bytes

    # ---- slots ----

    def reserve(
        self, keys: Sequence[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> tuple[list[int], list[OffloadKey]]:
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
        if evicted:
            self.on_evicted(evicted)
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
            elif self._steal_for(size, kept, evicted):
                pass
            elif not self.give_way(count - size.num_free):
                return

    def _evict_of(self, size: _Size, count: int, kept: frozenset[OffloadKey]) -> list[OffloadKey]:
        gone: list[OffloadKey] = []
        spared: list[OffloadKey] = []
        while len(gone) < count:
            victims = cast(Sequence[OffloadKey], size.order.victims(count - len(gone)))
            if not victims:
                break
            for key in victims:
                (spared if key in kept else gone).append(key)
        self._vacate(gone)
        size.order.add(spared)
        return gone

    def _vacate(self, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of evicted chunks."""
        for key in keys:
            slot = self.evictable.pop(key)
            self._unready(key, slot)
            self._put(slot)
        self._left(keys)

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

    # ---- owners of extents ----

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
        # A whole extent below: otherwise two sizes would take one extent from each other for ever.
        return self._excess(size) <= -1

    def _steal_for(
        self, size: _Size, kept: frozenset[OffloadKey], evicted: list[OffloadKey]
    ) -> bool:
        """Empty an extent of another size: the size most above its share that can give one."""
        donors = sorted((s for s in self._sizes if s is not size), key=lambda s: -self._excess(s))
        return any(self._empty_an_extent(donor, kept, evicted) for donor in donors)

    def _empty_an_extent(
        self, size: _Size, kept: frozenset[OffloadKey], evicted: list[OffloadKey]
    ) -> bool:
        """Evict the chunks in the extent of the next victim, if none of them is in use."""
        spared: list[OffloadKey] = []
        try:
            for _ in range(STEAL_TRIES):
                victims = cast(Sequence[OffloadKey], size.order.victims(1))
                if not victims:
                    return False
                spared.extend(victims)
                extent = self.evictable[victims[0]] // self._extent_rows
                inside = self._evictable_in(size, extent, kept)
                if inside is None:
                    continue
                size.order.remove([key for key in inside if key not in spared])
                spared = [key for key in spared if key not in inside]
                self._vacate(inside)
                evicted.extend(inside)
                return True
            return False
        finally:
            size.order.add(spared)

    def _evictable_in(
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
            if key is None or key in self.pinned or key in kept or key in self.claims:
                return None
            inside.append(key)
        return inside

    # ---- chunks ----

    def make_evictable(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            if slot not in self._key_in:  # ready from now on, not just unpinned
                self._key_in[slot] = key
                self._size_of(key).num_ready += 1
        super().make_evictable(keys, slots)

    # ---- claims ----

    def fitting(self, keys: Sequence[OffloadKey], num_bytes: int) -> int:
        for count, key in enumerate(keys):
            num_bytes -= self.bytes_of(key)
            if num_bytes < 0:
                return count
        return len(keys)

    def forget(self, key: OffloadKey) -> None:
        place = self.pinned if key in self.pinned else self.evictable
        self._unready(key, place[key])
        super().forget(key)

    def _free_evictable(self) -> None:
        for key, slot in self.evictable.items():
            self._unready(key, slot)
            self._put(slot)
