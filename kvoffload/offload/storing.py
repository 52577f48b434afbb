"""Stores: what is admitted, gets room, becomes loadable and goes on to the tiers."""

from collections.abc import Iterable, Sequence

from kvoffload.core.transfers import CPULoadStoreSpec, OffloadKey
from kvoffload.offload.admission import Sightings
from kvoffload.offload.base import PrepareStoreOutput, Reason, ReqContext
from kvoffload.offload.books import Books
from kvoffload.offload.departures import DROPPED
from kvoffload.offload.residence import CPU


class Storing:
    """The manager's half of stores; whole batches in few calls where nothing is unusual.

    Args:
        books: the manager's.
        sightings: decide what is admitted.
    """

    def __init__(self, books: Books, sightings: Sightings) -> None:
        self._books = books
        self._host = books.host
        self.sightings = sightings
        # Chunks being stored for a request that wants them on some tiers only.
        self._only_tiers: dict[OffloadKey, tuple[str, ...]] = {}

    def prepare(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """See :meth:`OffloadingManager.prepare_store`."""
        host = self._host
        new = host.absent(keys)
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
        slots, evicted = self._books.reserve(new, protected)
        if len(slots) < len(new):
            self._books.counters["store_refused"] += len(new) - len(slots)
            self._books.residence.departures.note(new[len(slots) :], DROPPED)
            if not slots:
                return None
        stored = tuple(new[: len(slots)])
        host.incoming.update(zip(stored, slots, strict=True))
        host.prioritise(stored, hints.priority)
        if hints.tiers is not None:
            self._only_tiers.update(dict.fromkeys(stored, hints.tiers))
        return PrepareStoreOutput(stored, CPULoadStoreSpec(slots), tuple(evicted))

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
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """See :meth:`OffloadingManager.complete_store`."""
        keys = stored = list(keys)
        if not (success and settled and self._host.all_ready(stored[::-1])):
            stored = self._complete_one_by_one(stored, success, settled)
        self._books.residence.record(stored, CPU, Reason.STORED)
        only = {key: self._only_tiers.pop(key, None) for key in keys} if self._only_tiers else {}
        for tier in self._books.lookups.tiers if stored else ():
            wanted = stored
            if only:
                wanted = [k for k in stored if (t := only.get(k)) is None or tier.name in t]
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
                    host.give_back(slot, settled)
                    failed.append(key)
            elif host.orphaned(key):
                host.end_use(key, settled)
            else:
                self._books.unexpected("complete_store", key)
        self._books.counters["store_failed"] += len(failed)
        self._books.residence.departures.note(failed, Reason.FAILED)
        stored.reverse()
        return stored

    def clear(self) -> None:
        """Forget what was seen and wished for; stores under way end as usual."""
        self.sightings.clear()
        self._only_tiers.clear()
