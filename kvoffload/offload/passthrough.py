"""Stores without a cache in host memory: chunks only pass through it, to the tiers and back.

No chunk becomes loadable in host memory. A stored chunk is pinned for write-through and forgotten,
so its slot is free after its last write. A loaded chunk leaves its slot to the next chunk of the
same load. Stores get as many slots as write-through may pin (``max_persisting_slots``), and a
quarter of them while a load from a tier is in flight. The other slots are for loads alone. A load
reserves all its slots at its beginning, so no load waits for a slot while it has one.
"""

from collections.abc import Sequence
from itertools import chain, cycle

from kvoffload.messages import OffloadKey
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import Tier, WriteThrough


class PassThrough:
    """Chooses the chunks to store: those that tiers lack, as many as write-through begins at once.

    Loads take slots from it.

    Args:
        host: the memory that chunks pass through.
        write_through: bounds the bytes in flight to the tiers.
        promote: whether a chunk that one of its tiers lacks is stored again.
    """

    def __init__(self, host: HostCache, write_through: WriteThrough, promote: bool) -> None:
        self._host = host
        self._write_through = write_through
        self._promote = promote

    def missing(self, keys: Sequence[OffloadKey], tiers: Sequence[Tier]) -> list[OffloadKey]:
        """Return the chunks that the tiers lack.

        Chunks beyond the room for stores are returned unasked: they are refused anyway.
        """
        enough = all if self._promote else any
        room = self._room_bytes()
        missing: list[OffloadKey] = []
        absent = self._host.absent(keys) if tiers else []
        for i, key in enumerate(absent):
            if room <= 0:
                return [*missing, *absent[i:]]
            if not enough(tier.holds(key) for tier in tiers):
                missing.append(key)
                room -= self._host.bytes_of(key)
        return missing

    def fitting(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the leading chunks that write-through has room for."""
        room = self._room_bytes()
        for count, key in enumerate(keys):
            room -= self._host.bytes_of(key)
            # A chunk larger than the limit is stored when nothing else is in flight.
            if room < 0 and (count or self._host.inflight_bytes):
                return keys[:count]
        return keys

    def take_turns(self, keys: Sequence[OffloadKey]) -> tuple[list[int], list[OffloadKey]]:
        """Take slots that chunks use one after the other, fewer slots than chunks if need be.

        Takes at most half of the free slots, so that the next load finds some as well. A slot is
        free again when the last of its chunks has ended. No slots if a size has none. No chunk is
        evicted: the second list is empty.
        """
        host = self._host
        by_size: dict[int, list[OffloadKey]] = {}
        for key in keys:
            by_size.setdefault(host.bytes_of(key), []).append(key)
        slots = {
            size: host.reserve(mine[: -(-host.room_for(mine[0]) // 2)])[0]
            for size, mine in by_size.items()
        }
        if not all(slots.values()):
            for slot in chain(*slots.values()):
                host.free(slot)
            return [], []
        next_of = {size: cycle(mine).__next__ for size, mine in slots.items()}
        taken = [next_of[host.bytes_of(key)]() for key in keys]
        host.turns.update(taken)
        return taken, []

    def _room_bytes(self) -> int:
        """Return the bytes that tiers would begin to write now, less those of stores in flight."""
        incoming = sum(map(self._host.bytes_of, self._host.incoming))
        return self._write_through.room_bytes() - incoming
