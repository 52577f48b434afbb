"""Host memory as a ledger: which chunk is in which slot, who uses it, which slots are free.

This one is for slots of one size; :mod:`kvoffload.offload.extents` adds several.

A slot is in exactly one place: free; under a chunk that is *ready* (loadable), *incoming* (being
stored) or *fetching* (being brought from a tier); under an *orphan* (a chunk forgotten while
transfers still use its slot); or in *limbo* (its transfer was given up, yet something may still
touch the memory). Idle ready chunks, and only these, are in the policy's order.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import cast

from kvoffload.core.transfers import OffloadKey
from kvoffload.errors import UsageError
from kvoffload.offload.bulk import add_all, remove_all
from kvoffload.offload.policies.base import Policy
from kvoffload.offload.priority import ByPriority


def idle_victims(
    policy: Policy, count: int, kept: frozenset[OffloadKey]
) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """Take victims out of an order: ``count`` to evict, and those met on the way that stay."""
    gone: list[OffloadKey] = []
    spared: list[OffloadKey] = []
    while len(gone) < count:
        victims = cast(Sequence[OffloadKey], policy.victims(count - len(gone)))
        if not victims:
            break
        if kept.isdisjoint(victims):
            gone.extend(victims)
        else:
            gone.extend(key for key in victims if key not in kept)
            spared.extend(key for key in victims if key in kept)
    return gone, spared


@dataclass
class _Orphan:
    slot: int
    users: int


class HostLedger:
    """Slots, pins and the eviction order of one host tier; used by the manager alone.

    Args:
        num_slots: chunks that fit.
        policy: orders idle chunks; made for this ledger alone.
        slot_bytes: bytes of a slot, for figures in bytes.
    """

    def __init__(self, num_slots: int, policy: Policy, slot_bytes: int = 1) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.ready: dict[OffloadKey, int] = {}
        self.incoming: dict[OffloadKey, int] = {}
        self.fetching: dict[OffloadKey, int] = {}
        self.pins: dict[OffloadKey, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._orphans: dict[OffloadKey, _Orphan] = {}
        self._limbo: dict[int, list[OffloadKey | None]] = {}
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        self.policy = policy
        self._add_all, self._remove_all = add_all(policy), remove_all(policy)

    # ---- what is here ----

    def absent(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those chunks, once each, that are neither here nor on their way."""
        wanted = dict.fromkeys(keys)
        places = (self.ready, self.incoming, self.fetching, self._orphans)
        if all(not place or place.keys().isdisjoint(wanted) for place in places):
            return list(wanted)
        return [key for key in wanted if key not in self.ready and not self.moving(key)]

    def moving(self, key: OffloadKey) -> bool:
        """Whether a chunk's slot is written, or still used though the chunk was forgotten."""
        return key in self.incoming or key in self.fetching or key in self._orphans

    def orphaned(self, key: OffloadKey) -> bool:
        """Whether a chunk was forgotten while transfers still use its slot."""
        return key in self._orphans

    def room_for(self, key: OffloadKey) -> int:
        """Slots that could be reserved now for chunks of this one's size."""
        return len(self._free) + len(self.policy)

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether all these chunks could be here at once: those that are not yet need slots."""
        needed = len(keys) - sum(map(self.ready.__contains__, keys))
        # Idle chunks among them are not what makes room for the rest.
        idle = sum(key in self.ready and key not in self.pins for key in keys) if needed else 0
        return needed <= len(self._free) + len(self.policy) - idle

    @property
    def busy_slots(self) -> int:
        """Slots that a transfer uses, or that wait for one to let go."""
        return self.num_slots - len(self._free) - len(self.policy)

    # ---- figures ----

    def bytes_of(self, key: OffloadKey) -> int:
        """Bytes of the slot that a chunk takes."""
        return self.slot_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots of loadable chunks."""
        return len(self.ready) * self.slot_bytes

    @property
    def inflight_bytes(self) -> int:
        """Bytes of slots in use that hold no loadable chunk: written now, or not let go of yet."""
        return (self.num_slots - len(self._free) - len(self.ready)) * self.slot_bytes

    # ---- slots ----

    def reserve(
        self, keys: Sequence[OffloadKey], protected: Collection[OffloadKey] = ()
    ) -> tuple[list[int], list[OffloadKey]]:
        """Take slots for as many leading chunks as possible; return them and whom they evicted.

        Idle chunks leave in the policy's order, never one that is ``protected``.
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
        gone, spared = idle_victims(self.policy, count, frozenset(protected))
        self._free.extend(map(self.ready.pop, gone))
        self._add_all(spared)
        return gone

    def _put(self, slot: int) -> None:
        """A slot is free again."""
        self._free.append(slot)

    def give_back(self, slot: int, settled: bool) -> None:
        """A slot whose chunk never became ready is no longer wanted."""
        if settled:
            self._put(slot)
        else:
            # A late read could still write here: reused now, it would corrupt another chunk.
            self._limbo.setdefault(slot, []).append(None)

    def release(self, slot: int) -> bool:
        """Nothing touches an unsettled slot any more; False if it was not in limbo."""
        uses = self._limbo.get(slot)
        if not uses:
            return False
        key = uses.pop()
        if not uses:
            del self._limbo[slot]
        if key is None:
            self._put(slot)
        else:
            self.end_use(key)
        return True

    # ---- uses ----

    def pin_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Begin the first use of ready chunks; False, and nothing is done, if not all are idle."""
        uses = dict.fromkeys(keys, 1)
        if len(uses) < len(keys) or (self.pins and not self.pins.keys().isdisjoint(uses)):
            return False
        self._remove_all(keys)
        if self.pins:
            self.pins.update(uses)
        else:
            self.pins = uses
        return True

    def unpin_all(self, keys: Sequence[OffloadKey]) -> bool:
        """End the last use of chunks; False, and nothing is done, if others use one of them.

        They become idle in the order given.
        """
        uses = list(map(self.pins.pop, keys, repeat(0)))
        if uses.count(1) == len(keys):
            self._add_all(keys)
            return True
        self.pins.update((key, count) for key, count in zip(keys, uses, strict=True) if count)
        return False

    def all_ready(self, keys: Sequence[OffloadKey]) -> bool:
        """Incoming chunks are ready, in the order given; False, and nothing is done, if not all."""
        slots = list(map(self.incoming.pop, keys, repeat(-1)))
        if -1 in slots:
            for key, slot in zip(keys, slots, strict=True):
                if slot >= 0:
                    self.incoming[key] = slot
            return False
        self._become_ready_all(keys, slots)
        return True

    def _become_ready_all(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self.ready.update(zip(keys, slots, strict=True))
        self._add_all(keys)

    def become_ready(self, key: OffloadKey, slot: int) -> None:
        """A chunk is wholly in its slot: loadable, idle, evictable."""
        self.ready[key] = slot
        self.policy.add(key)

    def pin(self, key: OffloadKey) -> None:
        """Begin a use of a ready chunk: it leaves the order with its first user."""
        pins = self.pins.get(key, 0)
        if not pins:
            self.policy.remove(key)
        self.pins[key] = pins + 1

    def end_use(self, key: OffloadKey, settled: bool = True) -> None:
        """End one use of a pinned or orphaned chunk.

        Unsettled, the use goes on until the slot is :meth:`release`-d.
        """
        orphan = self._orphans.get(key)
        if not settled:
            slot = orphan.slot if orphan else self.ready[key]
            self._limbo.setdefault(slot, []).append(key)
        elif orphan:
            orphan.users -= 1
            if not orphan.users:
                del self._orphans[key]
                self._put(orphan.slot)
        elif self.pins[key] > 1:
            self.pins[key] -= 1
        else:
            del self.pins[key]
            self.policy.add(key)

    def prioritise(self, keys: Sequence[OffloadKey], priority: int) -> None:
        """Chunks about to be stored are of this priority from now on; see :class:`ByPriority`."""
        if not isinstance(self.policy, ByPriority):
            if not priority:
                return
            self._use(ByPriority(self.policy, self.num_slots))
        assert isinstance(self.policy, ByPriority)
        self.policy.mark(keys, priority)

    def forget(self, key: OffloadKey) -> None:
        """Make a ready chunk invisible at once; its slot is freed after its last user."""
        slot = self.ready.pop(key)
        users = self.pins.pop(key, 0)
        if users:
            self._orphans[key] = _Orphan(slot, users)
        else:
            self.policy.remove(key)
            self._put(slot)

    def forget_all(self) -> tuple[OffloadKey, ...]:
        """Make every chunk invisible; return those that were ready."""
        gone = tuple(self.ready)
        for key, slot in self.ready.items():
            if users := self.pins.get(key, 0):
                self._orphans[key] = _Orphan(slot, users)
            else:
                self._put(slot)
        for moving in (self.incoming, self.fetching):
            for key, slot in moving.items():
                self._orphans[key] = _Orphan(slot, 1)
            moving.clear()
        self.ready.clear()
        self.pins.clear()
        self.policy.clear()
        return gone

    # ---- self-check ----

    def check(self) -> None:
        """Raise UsageError if the ledger contradicts itself; for tests, O(slots)."""
        idle = [key for key in self.ready if key not in self.pins]
        for broken, what in (
            (not self._adds_up(), "every slot is in exactly one place"),
            (len(self.policy) != len(idle), "the policy orders exactly the idle chunks"),
            (any(key not in self.policy for key in idle), "idle chunks are in the order"),
            (not self.pins.keys() <= self.ready.keys(), "only ready chunks are pinned"),
        ):
            if broken:
                raise UsageError(f"the host ledger is inconsistent: not true that {what}")

    def _taken(self) -> list[int]:
        """List the slots that are not free, from all places they may be in."""
        places: list[Iterable[int]] = [
            self.ready.values(),
            self.incoming.values(),
            self.fetching.values(),
            (orphan.slot for orphan in self._orphans.values()),
            (slot for slot, uses in self._limbo.items() if None in uses),
        ]
        return [slot for place in places for slot in place]

    def _adds_up(self) -> bool:
        return sorted([*self._free, *self._taken()]) == list(range(self.num_slots))
