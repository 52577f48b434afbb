"""Host memory without a cache: chunks only pass through it, on their way to the tiers and back.

The ledger is the same. Yet nothing ever becomes ready in it: a chunk just copied from the GPU is
pinned for write-through and forgotten, so that its slot is free after its last write; one that was
loaded leaves its slot to the next chunk of the same load. Stores get as many slots as write-through
may pin (``max_persisting_slots``), a quarter of them while something is loaded; the others are for
loads alone. Nobody waits for a slot while holding one: a load has all it ever needs from the start.
"""

from collections.abc import Collection, Mapping, Sequence

from kvoffload.messages import OffloadKey
from kvoffload.offload.base import ReqContext
from kvoffload.offload.loading import Loading
from kvoffload.offload.lookup import Lookups
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.offload.storing import Storing


class StagingLookups(Lookups):
    """What is on a tier can be loaded, however much it is, as soon as there is a slot for it."""

    def find(self, key: OffloadKey, req_context: ReqContext | None) -> bool | None:
        """See :meth:`Lookups.find`; "ask again" where no slot is free."""
        answer = super().find(key, req_context)
        return None if answer and not self._host.room_for(key) else answer

    def find_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> tuple[int, bool]:
        """See :meth:`Lookups.find_prefix`; "ask again" where no slot is free."""
        if keys and not self._host.room_for(keys[0]) and super().find(keys[0], req_context):
            self._counters["lookup_pending"] += 1
            return 0, True
        return super().find_prefix(keys, req_context)

    def _fits(self, key: OffloadKey, count: int) -> bool:
        return True

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether there is a slot of each size that is needed: chunks take turns in them."""
        return self._host.has_room(list({self._host.bytes_of(key): key for key in keys}.values()))


class StagingLoading(Loading):
    """Chunks of a load take turns in slots, and stay in none."""

    def _slots_for(self, missing: Sequence[OffloadKey]) -> list[int]:
        return self._host.take_turns(missing)

    def _stays(self, key: OffloadKey, slot: int) -> bool:
        return False


class StagingStoring(Storing):
    """Takes what tiers lack, as much of it as they begin to write at once."""

    def _missing(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> list[OffloadKey]:
        tiers = self._books.lookups.tiers_for(req_context)
        enough = all if self._books.promotes else any
        room = self._room_bytes()
        missing: list[OffloadKey] = []
        absent = self._host.absent(keys) if tiers else []
        for i, key in enumerate(absent):
            if room <= 0:  # the others are refused anyway, and not worth a question each
                return [*missing, *absent[i:]]
            if not enough(tier.holds(key) for tier in tiers):
                missing.append(key)
                room -= self._host.bytes_of(key)
        return missing

    def _room_bytes(self) -> int:
        """Bytes that tiers would begin to write now, beside what is being copied for them."""
        coming = sum(map(self._host.bytes_of, self._host.incoming))
        return self._books.write_through.room_bytes() - coming

    def _slots_for(
        self, new: Sequence[OffloadKey], protected: Collection[OffloadKey]
    ) -> tuple[list[int], list[OffloadKey]]:
        room = self._room_bytes()
        count = 0
        for key in new:
            room -= self._host.bytes_of(key)
            # A chunk larger than the limit goes when nothing else does.
            if room < 0 and (count or self._host.inflight_bytes):
                break
            count += 1
        return super()._slots_for(new[:count], protected)

    def _refuse(self, keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
        return tuple(keys)

    def _stored(
        self, keys: Sequence[OffloadKey], only: Mapping[OffloadKey, tuple[str, ...] | None]
    ) -> None:
        self._hand_on(keys, only)
        for key in keys:
            self._host.forget(key)
        self._books.write_through.begin()  # what no tier had room for is dropped


class StagingManager(TieredOffloadingManager):
    """A manager whose host memory only stages chunks: they are resident on tiers alone."""

    lookups_type = StagingLookups
    loading_type = StagingLoading
    storing_type = StagingStoring
