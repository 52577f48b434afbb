"""Stores: what is admitted, gets room, becomes loadable and goes on to the tiers."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvoffload.messages import CPULoadStoreSpec, OffloadKey
from kvoffload.offload.admission import AdmissionFilter
from kvoffload.offload.base import PrepareStoreOutput, Reason, ReqContext
from kvoffload.offload.books import Books
from kvoffload.offload.events import CPU
from kvoffload.offload.miss_reasons import DROPPED
from kvoffload.offload.under_way import UnderWay


class Storing:
    """The manager's half of stores; whole batches in few calls where nothing is unusual.

    Args:
        books: the manager's.
        sightings: decide what is admitted.
    """

    def __init__(self, books: Books, sightings: AdmissionFilter) -> None:
        self._books = books
        self._host = books.host
        self.sightings = sightings
        # Chunks being stored for a request that wants them on some tiers only.
        self._only_tiers: dict[OffloadKey, tuple[str, ...]] = {}
        self._under_way = UnderWay()

    def prepare(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """See :meth:`OffloadingManager.prepare_store`."""
        host = self._host
        new = self._missing(keys, req_context)
        hints = self._books.lookups.hints(req_context)
        if not hints.offload:
            self._books.counters["store_not_wanted"] += len(new)
            self._books.residence.departures.note(new, "not_wanted")
            new = []
        elif self.sightings.threshold > 1:
            new = self._admit(new, req_context)
        if not new:
            return PrepareStoreOutput((), CPULoadStoreSpec(()), ())
        # What is named and not here needs no protection: mostly that is all of it.
        protected = keys if len(new) < len(keys) else ()
        slots, evicted = self._slots_for(new, protected)
        refused = self._refuse(new[len(slots) :])
        if not (slots or refused):
            return None
        stored = tuple(new[: len(slots)])
        host.incoming.update(zip(stored, slots, strict=True))
        host.prioritise(stored, hints.priority)
        self._under_way.begin(stored, req_context)
        if hints.tiers is not None:
            self._only_tiers.update(dict.fromkeys(stored, hints.tiers))
        return PrepareStoreOutput(stored, CPULoadStoreSpec(slots), tuple(evicted), refused)

    def _missing(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> list[OffloadKey]:
        """Return those of these chunks that are to be stored, if they are admitted."""
        return self._host.absent(keys)

    def _slots_for(
        self, new: Sequence[OffloadKey], protected: Collection[OffloadKey]
    ) -> tuple[list[int], list[OffloadKey]]:
        """Take slots for as many leading chunks as possible; return them and whom they evicted."""
        return self._books.reserve(new, protected)

    def _refuse(self, keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Return those of the chunks without a slot that are worth another try."""
        self.drop(keys)
        return ()

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """These are not stored, because there was no room for them."""
        self._books.counters["store_refused"] += len(keys)
        self._books.residence.departures.note(keys, DROPPED)

    def _admit(self, keys: list[OffloadKey], req_context: ReqContext | None) -> list[OffloadKey]:
        admitted = self.sightings.admitted(keys, req_context.req_id if req_context else "")
        if len(admitted) < len(keys):
            here = set(admitted)
            self._books.counters["store_not_admitted"] += len(keys) - len(admitted)
            self._books.residence.departures.note(
                [key for key in keys if key not in here], "not_admitted"
            )
        return admitted

    def complete(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """See :meth:`OffloadingManager.complete_store`."""
        answered = list(keys)
        if not answered:
            return
        known, unknown = self._under_way.end(answered, req_context)
        self._books.unexpected("complete_store", unknown)
        stored = known
        if not (success and settled and self._host.all_ready(known[::-1])):
            stored = self._complete_one_by_one(known, success, settled)
        only = {key: self._only_tiers.pop(key, None) for key in known} if self._only_tiers else {}
        self._stored(stored, only)

    def _stored(
        self, keys: Sequence[OffloadKey], only: Mapping[OffloadKey, tuple[str, ...] | None]
    ) -> None:
        """Chunks are ready in host memory, some of them to be written to certain tiers only."""
        self._books.residence.record(keys, CPU, Reason.STORED)
        self._hand_on(keys, only)

    def _hand_on(
        self, keys: Sequence[OffloadKey], only: Mapping[OffloadKey, tuple[str, ...] | None]
    ) -> None:
        for tier in self._books.lookups.tiers if keys else ():
            wanted = keys
            if only:
                wanted = [k for k in keys if (t := only.get(k)) is None or tier.name in t]
            self._books.write_through.offer(tier, wanted)

    def _complete_one_by_one(
        self, keys: Sequence[OffloadKey], success: bool, settled: bool
    ) -> list[OffloadKey]:
        """Return what is stored now."""
        host = self._host
        stored: list[OffloadKey] = []
        failed: list[OffloadKey] = []
        for key in reversed(keys):
            if key in host.incoming:
                slot = host.incoming.pop(key)
                if success:
                    host.become_ready(key, slot)
                    stored.append(key)
                else:
                    host.give_back(key, slot, settled)
                    failed.append(key)
            else:
                host.end_use(key, settled)  # forgotten by a reset
        self._books.counters["store_failed"] += len(failed)
        self._books.residence.departures.note(failed, Reason.FAILED)
        stored.reverse()
        return stored

    def clear(self) -> None:
        """Forget what was seen and wished for; stores under way end as usual."""
        self.sightings.clear()
        self._only_tiers.clear()
