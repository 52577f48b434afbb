"""Host memory as a ledger: which chunk is in which slot, who uses it, which slots are free.

This one is for slots of one size; :mod:`kvoffload.offload.extents` adds several.

A slot is in exactly one place: free; under a chunk that is *ready* (loadable), *incoming* (being
stored) or *fetching* (being brought from a tier); under an *orphan* (a chunk forgotten while
transfers still use its slot); or in *limbo* (its transfer was given up, yet something may still
touch the memory). Idle ready chunks, and only these, are in the policy's order.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvoffload.core.transfers import OffloadKey
from kvoffload.errors import UsageError
from kvoffload.offload.policies.base import Policy


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
        self.policy = policy
        self.slot_bytes = slot_bytes
        self.ready: dict[OffloadKey, int] = {}
        self.incoming: dict[OffloadKey, int] = {}
        self.fetching: dict[OffloadKey, int] = {}
        self.pins: dict[OffloadKey, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._orphans: dict[OffloadKey, _Orphan] = {}
        self._limbo: dict[int, list[OffloadKey | None]] = {}

    # ---- what is here ----

    def moving(self, key: OffloadKey) -> bool:
        """Whether a chunk's slot is written, or still used though the chunk was forgotten."""
        return key in self.incoming or key in self.fetching or key in self._orphans

    def orphaned(self, key: OffloadKey) -> bool:
        """Whether a chunk was forgotten while transfers still use its slot."""
        return key in self._orphans

    def room_for(self, key: OffloadKey) -> int:
        """Slots that could be reserved now for chunks of this one's size."""
        return len(self._free) + len(self.policy)

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
        return [self._free.pop() for _ in range(min(count, len(self._free)))], evicted

    def _evict(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey]:
        spared: list[OffloadKey] = []
        gone: list[OffloadKey] = []
        kept = set(protected)
        while len(gone) < count:
            victims = self.policy.victims(count - len(gone))
            if not victims:
                break
            for victim in victims:
                key = OffloadKey(victim)
                if key in kept:
                    spared.append(key)
                else:
                    self._free.append(self.ready.pop(key))
                    gone.append(key)
        for key in spared:
            self.policy.add(key)
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
