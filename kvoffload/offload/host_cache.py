"""The cache in host memory: the slot of each chunk, its pins, and the free slots.

This cache has slots of one size; :mod:`kvoffload.offload.extents` adds several.

A slot is free, or under a chunk: *ready* (loadable), *incoming* (being stored) or *fetching* (being
read from a tier). An *orphan* is a chunk that was forgotten while transfers still use its slot; a
reset gives it another name. The transfer of an *abandoned* slot was given up, but may still access
the memory.
The policy orders the *evictable* chunks: those that are ready and not pinned.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, repeat
from operator import indexOf
from typing import Any, cast

from kvoffload.messages import OffloadKey
from kvoffload.offload.eviction_order import EvictionOrder
from kvoffload.offload.job import forgotten
from kvoffload.offload.orders_by_size import OrdersBySize
from kvoffload.policies.base import Policy
from kvoffload.policies.ordered_queue import compact
from kvoffload.policies.return_order import ExpectedReturns
from kvoffload.policies.tenant_order import TenantShares


@dataclass
class _Orphan:
    slot: int
    users: int
    reset: int = 0
    """The number of the reset that renamed it; 0: it was forgotten alone."""


class HostCache:
    """Slots, pins and the eviction order of one host tier; used by the manager alone.

    Args:
        num_slots: chunks that fit.
        policy: orders the evictable chunks; made for this cache alone.
        slot_bytes: bytes of a slot, for figures in bytes.
        first_slot: the number of the first of these slots.
    """

    hint_share = 0.5
    """The part of the slots that chunks under claims hold at most while other chunks need room."""
    now_s: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self, num_slots: int, policy: Policy, slot_bytes: int = 1, first_slot: int = 0
    ) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.evictable: dict[OffloadKey, int] = {}
        """The slot of each ready chunk that no transfer uses."""
        self.pinned: dict[OffloadKey, int] = {}
        """The slot of each ready chunk that transfers use."""
        # How many transfers beyond the first use a pinned chunk.
        self._more_uses: dict[OffloadKey, int] = {}
        self.incoming: dict[OffloadKey, int] = {}
        self.fetching: dict[OffloadKey, int] = {}
        self._slots = range(first_slot, first_slot + num_slots)
        self._free = list(reversed(self._slots))
        self._orphans: dict[OffloadKey, _Orphan] = {}
        # Abandoned slot → for each use: the pinned or orphaned chunk, or None.
        self._abandoned: dict[int, list[OffloadKey | None]] = {}
        self.turns: Counter[int] = Counter()
        """Slots that chunks of a load use one after the other: how many chunks have not ended."""
        self.claims: dict[OffloadKey, Any] = {}
        """Chunks that are kept for requests in the queue, here or once they are; see
        :meth:`claim`. The value is the claimant's."""
        self.order: EvictionOrder | OrdersBySize = EvictionOrder(policy, num_slots, self.claims)
        """The order of the evictable chunks."""
        self.give_way: Callable[[int], bool] = lambda count: False
        """Asked for room when no chunk without a claim is left: ends the claims of so many chunks,
        or of all that there are; False if there is none."""
        self.on_evicted: Callable[[Sequence[OffloadKey]], None] = lambda keys: None
        """Called with the chunks that :meth:`reserve` has evicted."""
        self._tenants: TenantShares | None = None

    # ---- lookup ----

    def absent(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks, once each, that are neither ready nor in flight."""
        wanted = dict.fromkeys(keys)
        for place in (self.evictable, self.pinned, self.incoming, self.fetching, self._orphans):
            if place and not place.keys().isdisjoint(wanted.keys()):
                return [key for key in wanted if not self.is_ready(key) and not self.moving(key)]
        return list(wanted)

    def is_ready(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded from host memory."""
        return key in self.evictable or key in self.pinned

    def num_leading(self, keys: Sequence[OffloadKey]) -> int:
        """Count the leading chunks that can be loaded from host memory."""
        idle = map(self.evictable.__contains__, keys)
        here = indexOf(chain(idle, (False,)), False)
        while self.pinned and here < len(keys) and self.is_ready(keys[here]):
            here += 1
        return here

    @property
    def num_ready(self) -> int:
        """Chunks that can be loaded from host memory."""
        return len(self.evictable) + len(self.pinned)

    def ready(self) -> Iterable[tuple[OffloadKey, int]]:
        """List the ready chunks with their slots; O(slots)."""
        return chain(self.evictable.items(), self.pinned.items())

    def is_coming(self, key: OffloadKey) -> bool:
        """Whether a chunk is being stored, or read from a tier."""
        return key in self.incoming or key in self.fetching

    def moving(self, key: OffloadKey) -> bool:
        """Whether a chunk's slot is written, or still used though the chunk was forgotten."""
        return self.is_coming(key) or key in self._orphans

    def room_for(self, key: OffloadKey) -> int:
        """Slots that could be reserved now for chunks of the key's size."""
        return len(self._free) + len(self.evictable)

    def least_room(self, keys: Sequence[OffloadKey]) -> int:
        """The least room for any of these chunks, of which there is one at least."""
        return self.room_for(keys[0])

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether all chunks could be in host memory at once."""
        evictable = sum(map(self.evictable.__contains__, keys))
        absent = len(keys) - evictable - sum(map(self.pinned.__contains__, keys))
        # Evictable chunks of the batch make no room for the rest of it.
        return not absent or absent <= len(self._free) + len(self.evictable) - evictable

    @property
    def busy_slots(self) -> int:
        """Slots that are neither free nor evictable: transfers use them."""
        return self.num_slots - len(self._free) - len(self.evictable)

    # ---- figures ----

    def bytes_of(self, key: OffloadKey) -> int:
        """Bytes of the slot that a chunk takes."""
        return self.slot_bytes

    def bytes_of_all(self, keys: Sequence[OffloadKey]) -> int:
        """Bytes of the slots that chunks take."""
        return self.slot_bytes * len(keys)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots of ready chunks."""
        return self.num_ready * self.slot_bytes

    @property
    def inflight_bytes(self) -> int:
        """Bytes of used slots without a ready chunk: being written, or not released yet."""
        return (self.num_slots - len(self._free) - self.num_ready) * self.slot_bytes

    # ---- slots ----

    def reserve(
        self, keys: Sequence[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> tuple[list[int], list[OffloadKey]]:
        """Take slots for as many leading chunks as possible; return slots and evicted chunks.

        Chunks are evicted in the policy's order, ``protected`` ones never.
        """
        count = len(keys)
        short = count - len(self._free)
        evicted = self._evict(short, protected) if short > 0 else []
        count = min(count, len(self._free))
        slots = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        slots.reverse()
        return slots, evicted

    def _evict(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey]:
        kept = frozenset(protected)
        gone: list[OffloadKey] = []
        spared: dict[OffloadKey, int] = {}
        while len(gone) < count:
            victims = cast(Sequence[OffloadKey], self.order.victims(count - len(gone)))
            if not victims:
                if self.give_way(count - len(gone)):
                    continue
                break
            if kept and not kept.isdisjoint(victims):
                spared.update((key, self.evictable.pop(key)) for key in victims if key in kept)
                victims = [key for key in victims if key not in kept]
            self._free += map(self.evictable.pop, victims)
            gone += victims
        compact(self.evictable)
        if spared:
            self.make_evictable(list(spared), list(spared.values()))
        self._left(gone)
        self.on_evicted(gone)
        return gone

    def free(self, slot: int) -> None:
        """Free a slot that a chunk no longer uses, unless it is shared with further chunks."""
        if self.turns[slot] > 1:
            self.turns[slot] -= 1
        else:
            del self.turns[slot]
            self._put(slot)

    def _put(self, slot: int) -> None:
        self._free.append(slot)

    def fill(self, key: OffloadKey, slot: int, settled: bool) -> None:
        """End the transfer that filled a chunk's slot; unsettled, it goes on to use the slot."""
        self.make_evictable((key,), (slot,))
        if not settled:
            self.pin(key)
            self.end_use(key, settled)

    def give_back(self, key: OffloadKey, slot: int, settled: bool) -> None:
        """End the transfer that was to fill a chunk's slot, without success."""
        self._left((key,))
        if settled:
            self.free(slot)
        else:
            # A late read could still write to the slot: reused now, it would corrupt another chunk.
            self._abandoned.setdefault(slot, []).append(None)

    def release(self, slot: int) -> tuple[OffloadKey, ...] | None:
        """End one use of an abandoned slot, and of a chunk in it, which is returned.

        None if the slot is not abandoned.
        """
        uses = self._abandoned.get(slot)
        if not uses:
            return None
        key = uses.pop()
        if not uses:
            del self._abandoned[slot]
        if key is None:
            self.free(slot)
            return ()
        self.end_use(key)
        return (key,)

    # ---- ready chunks, pins ----

    def all_ready(self, keys: Sequence[OffloadKey], place: dict[OffloadKey, int]) -> bool:
        """Make incoming or pinned chunks evictable, in the order given.

        False, without a change, if one of them is not there.
        """
        slots = list(map(place.pop, keys, repeat(-1)))
        if -1 in slots:
            pairs = zip(keys, slots, strict=True)
            place.update((key, slot) for key, slot in pairs if slot >= 0)
            return False
        self.make_evictable(keys, slots)
        return True

    def make_evictable(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Make chunks that are wholly in their slots loadable, the last one the most recent."""
        self.order.add(keys)
        self.evictable.update(zip(keys, slots, strict=True))

    def pin_all(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """Pin evictable chunks and return their slots.

        None, without a change, if a chunk is not evictable or named twice.
        """
        try:
            slots = list(map(self.evictable.__getitem__, keys))
        except KeyError:
            return None
        pins = dict(zip(keys, slots, strict=True))
        if len(pins) < len(keys):
            return None
        self.order.remove(keys)
        deque(map(self.evictable.pop, keys), maxlen=0)
        if self.pinned:
            self.pinned.update(pins)
        else:
            self.pinned = pins
        return slots

    def unpin_all(self, keys: Sequence[OffloadKey]) -> bool:
        """End the last use of chunks, which become evictable in the order given.

        False, without a change, if a chunk has further uses.
        """
        if self._more_uses and not self._more_uses.keys().isdisjoint(keys):
            return False
        return self.all_ready(keys, self.pinned)

    def pin(self, key: OffloadKey) -> int:
        """Begin a use of a ready chunk and return its slot."""
        if key in self.pinned:
            self._more_uses[key] = self._more_uses.get(key, 0) + 1
        else:
            self.order.remove((key,))
            self.pinned[key] = self.evictable.pop(key)
        return self.pinned[key]

    def end_use(self, key: OffloadKey, settled: bool = True) -> None:
        """End one use of a pinned or orphaned chunk.

        Unsettled, the use goes on until the slot is :meth:`release`-d.
        """
        orphan = self._orphans.get(key)
        if not settled:
            slot = orphan.slot if orphan else self.pinned[key]
            self._abandoned.setdefault(slot, []).append(key)
        elif orphan:
            orphan.users -= 1
            if not orphan.users:
                del self._orphans[key]
                self.free(orphan.slot)
        elif more := self._more_uses.pop(key, 0):
            if more > 1:
                self._more_uses[key] = more - 1
        else:
            self.make_evictable((key,), (self.pinned.pop(key),))

    # ---- order ----

    def put_in_order(self, keys: Iterable[OffloadKey]) -> None:
        """Move evictable chunks to the recent end, in the order given, without counting a use."""
        here = list(filter(self.evictable.__contains__, dict.fromkeys(keys)))
        self.order.remove(here)
        self.order.add(here)

    @property
    def returns(self) -> ExpectedReturns:
        """The claims on chunks by when they are needed again; see :class:`ReturnOrder`."""
        return self.order.returns(self.hint_share, self.now_s)

    def _left(self, keys: Sequence[OffloadKey]) -> None:
        """Drop the priorities and tenants of chunks that left: stored again, they get new ones."""
        self.order.forget(keys)
        if self._tenants is not None:
            self._tenants.forget(keys)

    # ---- tenants ----

    def tell_tenants_apart(self, shares: TenantShares) -> None:
        """Note whose each chunk is, before the first one; the order of this cache has shares."""
        self._tenants = shares
        shares.use(self.capacity_bytes, self.bytes_of)

    def own(self, keys: Iterable[OffloadKey], tenant: bytes) -> None:
        """Note the tenant of chunks that are about to come, before room is made for them."""
        if self._tenants is not None:
            self._tenants.own(keys, tenant)

    def disown(self, keys: Iterable[OffloadKey]) -> None:
        """Take back :meth:`own` for chunks that did not come, and are not here."""
        if self._tenants is not None:
            here = (self.evictable, self.pinned, self.incoming, self.fetching)
            self._tenants.forget(key for key in keys if all(key not in place for place in here))

    def tenants_of(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        """Return the tenant of each chunk; nothing where tenants are not told apart."""
        shares = self._tenants
        return [] if shares is None else [shares.of.get(key, b"") for key in keys]

    # ---- claims ----

    def claim(self, keys: Sequence[OffloadKey], claimant: object) -> None:
        """Keep chunks, here or once they are, out of the eviction order; none has a claim yet."""
        here = list(filter(self.evictable.__contains__, keys))
        self.order.keep(here)
        self.claims.update(dict.fromkeys(keys, claimant))

    def end_claims(self, keys: Sequence[OffloadKey], gone: Collection[OffloadKey]) -> list[Any]:
        """Put chunks back into the eviction order, the last one the most recent.

        Args:
            keys: the chunks, which have claims.
            gone: those that have left host memory, or have not come.

        Returns:
            The claimant of each.
        """
        claimants = list(map(self.claims.pop, keys))
        idle: Iterable[OffloadKey] = keys
        for place in (self.pinned, self.incoming, self.fetching, gone):
            if place:  # these are small: to ask for each chunk in the table of idle ones takes long
                idle = filterfalse(place.__contains__, idle)
        if here := list(idle):
            self.order.let_go(here)
        return claimants

    def fitting(self, keys: Sequence[OffloadKey], num_bytes: int) -> int:
        """Count the leading chunks whose slots take no more than so many bytes."""
        return min(len(keys), max(0, num_bytes) // self.slot_bytes)

    # ---- forgetting ----

    def forget(self, key: OffloadKey) -> None:
        """Make a ready chunk invisible at once; its slot is freed after its last use."""
        if key in self.pinned:
            users = 1 + self._more_uses.pop(key, 0)
            self._orphans[key] = _Orphan(self.pinned.pop(key), users)
        else:
            self.order.remove((key,))
            self._put(self.evictable.pop(key))
        self._left((key,))

    def forget_all(self, reset: int) -> tuple[OffloadKey, ...]:
        """Make every chunk invisible; return those that were ready.

        Those in use get the names that :func:`forgotten` gives for a reset of this number, and are
        absent under their own.
        """
        gone = tuple(key for key, _ in self.ready())
        for key in tuple(self.pinned):
            self.forget(key)
        self._free_evictable()
        self.evictable.clear()
        self.order.clear()
        self.claims.clear()
        if self._tenants is not None:
            self._tenants.clear()
        for moving in (self.incoming, self.fetching):
            for key, slot in moving.items():
                self._orphans[key] = _Orphan(slot, 1)
            moving.clear()
        self._rename_orphans(reset)
        return gone

    def _rename_orphans(self, reset: int) -> None:
        names = {k: forgotten(k, reset) for k, orphan in self._orphans.items() if not orphan.reset}
        for key, name in names.items():
            self._orphans[name] = orphan = self._orphans.pop(key)
            orphan.reset = reset
        for uses in self._abandoned.values():
            uses[:] = [key and names.get(key, key) for key in uses]

    def _free_evictable(self) -> None:
        self._free.extend(self.evictable.values())
