"""Host memory as a ledger: which chunk is in which slot, who uses it, which slots are free.

This one is for slots of one size; :mod:`kvoffload.offload.extents` adds several.

A slot is in exactly one place: free; under a chunk that is *ready* (loadable), *incoming* (being
stored) or *fetching* (being brought from a tier); under an *orphan* (a chunk forgotten while
transfers still use its slot); or in *limbo* (its transfer was given up, yet something may still
touch the memory). Idle ready chunks, and only these, are in the policy's order.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat

from kvoffload.errors import UsageError
from kvoffload.messages import OffloadKey
from kvoffload.offload.idle import Idle, idle_in
from kvoffload.offload.priority import SHARE_ABOVE, ByPriority
from kvoffload.policies.base import Policy


@dataclass
class _Orphan:
    slot: int
    users: int


class HostCache:
    """Slots, pins and the eviction order of one host tier; used by the manager alone.

    Args:
        num_slots: chunks that fit.
        policy: orders idle chunks; made for this ledger alone.
        slot_bytes: bytes of a slot, for figures in bytes.
    """

    def __init__(self, num_slots: int, policy: Policy, slot_bytes: int = 1) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.policy = policy
        self.idle: Idle = idle_in(policy)
        self.pinned: dict[OffloadKey, int] = {}
        self.incoming: dict[OffloadKey, int] = {}
        self.fetching: dict[OffloadKey, int] = {}
        # Pinned chunks with several users: how many beyond the first.
        self._more_users: dict[OffloadKey, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._orphans: dict[OffloadKey, _Orphan] = {}
        self._limbo: dict[int, list[OffloadKey | None]] = {}
        # Slots that chunks of a load use one after the other: how many have not ended.
        self._turns: Counter[int] = Counter()

    # ---- what is here ----

    def absent(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those chunks, once each, that are neither here nor on their way."""
        wanted = dict.fromkeys(keys)
        places = (self.idle.slots, self.pinned, self.incoming, self.fetching, self._orphans)
        if all(not place or place.keys().isdisjoint(wanted) for place in places):
            return list(wanted)
        return [key for key in wanted if not self.is_ready(key) and not self.moving(key)]

    def is_ready(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded from here."""
        return key in self.idle.slots or key in self.pinned

    @property
    def num_ready(self) -> int:
        """Chunks that can be loaded from here."""
        return len(self.idle.slots) + len(self.pinned)

    def ready(self) -> Iterable[tuple[OffloadKey, int]]:
        """List the chunks that can be loaded from here, with their slots; O(slots)."""
        return chain(self.idle.slots.items(), self.pinned.items())

    def moving(self, key: OffloadKey) -> bool:
        """Whether a chunk's slot is written, or still used though the chunk was forgotten."""
        return key in self.incoming or key in self.fetching or key in self._orphans

    def orphaned(self, key: OffloadKey) -> bool:
        """Whether a chunk was forgotten while transfers still use its slot."""
        return key in self._orphans

    def room_for(self, key: OffloadKey) -> int:
        """Slots that could be reserved now for chunks of this one's size."""
        return len(self._free) + len(self.idle.slots)

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether all these chunks could be here at once: those that are not yet need slots."""
        idle = sum(map(self.idle.slots.__contains__, keys))
        needed = len(keys) - idle - sum(map(self.pinned.__contains__, keys))
        # Idle chunks among them are not what makes room for the rest.
        return not needed or needed <= len(self._free) + len(self.idle.slots) - idle

    @property
    def busy_slots(self) -> int:
        """Slots that a transfer uses, or that wait for one to let go."""
        return self.num_slots - len(self._free) - len(self.idle.slots)

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
        return self.num_ready * self.slot_bytes

    @property
    def inflight_bytes(self) -> int:
        """Bytes of slots in use that hold no loadable chunk: written now, or not let go of yet."""
        return (self.num_slots - len(self._free) - self.num_ready) * self.slot_bytes

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
        kept = frozenset(protected)
        gone: list[OffloadKey] = []
        spared: list[tuple[OffloadKey, int]] = []
        while len(gone) < count:
            keys, slots = self.idle.victims(count - len(gone))
            if not keys:
                break
            if kept.isdisjoint(keys):
                gone += keys
                self._free += slots
                continue
            for key, slot in zip(keys, slots, strict=True):
                if key in kept:
                    spared.append((key, slot))
                else:
                    gone.append(key)
                    self._free.append(slot)
        for key, slot in spared:
            self.idle.put(key, slot)
        self._forget_priorities(gone)
        return gone

    def take_turns(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Take slots for chunks that use them one after the other, where there are fewer slots.

        Half of those that are free at most, so that whoever comes next finds some as well. A slot
        is free again when the last of its chunks has ended. Empty, if there is none for some size.
        """
        by_size: dict[int, list[OffloadKey]] = {}
        for key in keys:
            by_size.setdefault(self.bytes_of(key), []).append(key)
        slots = {
            size: self.reserve(mine[: -(-self.room_for(mine[0]) // 2)])[0]
            for size, mine in by_size.items()
        }
        if not all(slots.values()):
            for slot in chain(*slots.values()):
                self._put(slot)
            return []
        next_of = {size: cycle(mine).__next__ for size, mine in slots.items()}
        taken = [next_of[self.bytes_of(key)]() for key in keys]
        self._turns.update(taken)
        return taken

    def _let_go(self, slot: int) -> None:
        """A chunk does not use a slot any more: it is free, unless others have their turn."""
        if self._turns[slot] > 1:
            self._turns[slot] -= 1
        else:
            del self._turns[slot]
            self._put(slot)

    def _put(self, slot: int) -> None:
        """A slot is free again."""
        self._free.append(slot)

    def give_back(self, key: OffloadKey, slot: int, settled: bool) -> None:
        """A chunk will never be ready in the slot it was to have."""
        self._forget_priorities((key,))
        if settled:
            self._let_go(slot)
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
            self._let_go(slot)
        else:
            self.end_use(key)
        return True

    # ---- uses ----

    def pin_all(self, keys: Sequence[OffloadKey]) -> list[int] | None:
        """Begin the first use of idle chunks and return their slots.

        None, and nothing is done, if not all are idle or one is named twice.
        """
        try:
            slots = list(map(self.idle.slots.__getitem__, keys))
        except KeyError:
            return None
        uses = dict(zip(keys, slots, strict=True))
        if len(uses) < len(keys):
            return None
        self.idle.take_all(keys)
        if self.pinned:
            self.pinned.update(uses)
        else:
            self.pinned = uses
        return slots

    def unpin_all(self, keys: Sequence[OffloadKey]) -> bool:
        """End the last use of chunks; False, and nothing is done, if others use one of them.

        They become idle in the order given.
        """
        if self._more_users and not self._more_users.keys().isdisjoint(keys):
            return False
        slots = list(map(self.pinned.pop, keys, repeat(-1)))
        if -1 not in slots:
            self.idle.put_all(keys, slots)
            return True
        self.pinned.update((k, slot) for k, slot in zip(keys, slots, strict=True) if slot >= 0)
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
        self.idle.put_all(keys, slots)

    def become_ready(self, key: OffloadKey, slot: int) -> None:
        """A chunk is wholly in its slot: loadable, idle, evictable."""
        self.idle.put(key, slot)

    def pin(self, key: OffloadKey) -> int:
        """Begin a use of a ready chunk, which leaves the order with its first user; its slot."""
        if key in self.pinned:
            self._more_users[key] = self._more_users.get(key, 0) + 1
        else:
            self.pinned[key] = self.idle.take(key)
        return self.pinned[key]

    def end_use(self, key: OffloadKey, settled: bool = True) -> None:
        """End one use of a pinned or orphaned chunk.

        Unsettled, the use goes on until the slot is :meth:`release`-d.
        """
        orphan = self._orphans.get(key)
        if not settled:
            slot = orphan.slot if orphan else self.pinned[key]
            self._limbo.setdefault(slot, []).append(key)
        elif orphan:
            orphan.users -= 1
            if not orphan.users:
                del self._orphans[key]
                self._let_go(orphan.slot)
        elif key in self._more_users:
            self._more_users[key] -= 1
            if not self._more_users[key]:
                del self._more_users[key]
        else:
            self.idle.put(key, self.pinned.pop(key))

    def prioritise(self, keys: Sequence[OffloadKey], priority: int) -> None:
        """Chunks about to be stored are of this priority from now on; see :class:`ByPriority`.

        Those above :data:`SHARE_ABOVE` of the slots stay normal.
        """
        order = self.policy
        if not isinstance(order, ByPriority):
            if not priority:
                return
            # Once in a ledger's life: from the first priority on, slots are kept beside the order.
            self.policy = order = ByPriority(order)
            self.idle = idle_in(order, self.idle.slots)
        if priority > 0:
            keys = keys[: max(0, int(self.num_slots * SHARE_ABOVE) - order.num_above)]
        order.mark(keys, priority)

    def _forget_priorities(self, keys: Sequence[OffloadKey]) -> None:
        """Chunks are here no more: stored again, they are of the priority they get then."""
        if isinstance(self.policy, ByPriority):
            self.policy.forget(keys)

    def _marked(self) -> Collection[bytes]:
        return self.policy.marked if isinstance(self.policy, ByPriority) else ()

    def forget(self, key: OffloadKey) -> None:
        """Make a ready chunk invisible at once; its slot is freed after its last user."""
        if key in self.pinned:
            users = 1 + self._more_users.pop(key, 0)
            self._orphans[key] = _Orphan(self.pinned.pop(key), users)
        else:
            self._put(self.idle.take(key))
        self._forget_priorities((key,))

    def forget_all(self) -> tuple[OffloadKey, ...]:
        """Make every chunk invisible; return those that were ready."""
        gone = tuple(key for key, _ in self.ready())
        self._free_idle()
        self.idle.clear()
        for key in list(self.pinned):
            self.forget(key)
        for moving in (self.incoming, self.fetching):
            for key, slot in moving.items():
                self._orphans[key] = _Orphan(slot, 1)
            moving.clear()
        return gone

    def _free_idle(self) -> None:
        self._free.extend(self.idle.slots.values())

    # ---- self-check ----

    def check(self) -> None:
        """Raise UsageError if the ledger contradicts itself; for tests, O(slots)."""
        idle = self.idle.slots
        for broken, what in (
            (not self._adds_up(), "every slot is in exactly one place"),
            (len(self.policy) != len(idle), "the policy orders exactly the idle chunks"),
            (any(key not in self.policy for key in idle), "idle chunks are in the order"),
            (not self.pinned.keys().isdisjoint(idle), "a pinned chunk is not idle"),
            (not self._more_users.keys() <= self.pinned.keys(), "chunks in use are pinned"),
            (
                any(
                    k not in self.incoming and not self.is_ready(OffloadKey(k))
                    for k in self._marked()
                ),
                "only chunks that are here have a priority",
            ),
            (not self._turns_add_up(), "only chunks that take turns share a slot"),
        ):
            if broken:
                raise UsageError(f"the host ledger is inconsistent: not true that {what}")

    def _turns_add_up(self) -> bool:
        uses = Counter(self._uses())
        return self._turns <= uses and all(uses[i] == max(1, self._turns[i]) for i in uses)

    def _taken(self) -> set[int]:
        """The slots that are not free."""
        return set(self._uses())

    def _uses(self) -> list[int]:
        """List the slots of all chunks, from all places they may be in."""
        places: list[Iterable[int]] = [
            self.idle.slots.values(),
            self.pinned.values(),
            self.incoming.values(),
            self.fetching.values(),
            (orphan.slot for orphan in self._orphans.values()),
            (slot for slot, uses in self._limbo.items() for key in uses if key is None),
        ]
        return [slot for place in places for slot in place]

    def _adds_up(self) -> bool:
        return sorted([*self._free, *self._taken()]) == list(range(self.num_slots))
