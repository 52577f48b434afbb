"""Loads: what is pinned, brought from a tier and let go of again."""

from collections.abc import Iterable, Sequence

from kvoffload.messages import CPULoadStoreSpec, Fetch, OffloadKey, StagedLoadStoreSpec
from kvoffload.offload.base import Reason, ReqContext
from kvoffload.offload.books import Books
from kvoffload.offload.events import CPU
from kvoffload.offload.tiers import Tier, first_holder
from kvoffload.offload.under_way import UnderWay


class Loading:
    """The manager's half of loads; whole batches in few calls where nothing is unusual.

    Args:
        books: the manager's.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._host = books.host
        self._fetch_tier: dict[OffloadKey, Tier] = {}
        self._under_way = UnderWay()

    def prepare(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> CPULoadStoreSpec:
        """See :meth:`OffloadingManager.prepare_load`."""
        slots = self._host.pin_all(keys)
        if slots is not None:
            self._under_way.begin(keys, req_context)
            return CPULoadStoreSpec(slots)
        spec = self._prepare_staged(keys, self._books.lookups.tiers_for(req_context))
        self._under_way.begin(keys[: len(spec.host_slots)], req_context)
        return spec

    def _prepare_staged(
        self, keys: Sequence[OffloadKey], tiers: tuple[Tier, ...]
    ) -> CPULoadStoreSpec:
        host = self._host
        sources = self._sources(keys, tiers)
        # Pin what is here before making room for the rest, or it might be what is evicted.
        here = {i: host.pin(keys[i]) for i, tier in enumerate(sources) if tier is None}
        missing = [key for key, tier in zip(keys, sources, strict=False) if tier]
        slots = self._slots_for(missing) if missing else []
        slots.reverse()
        host_slots: list[int] = []
        fetches: dict[Tier, list[int]] = {}
        for i, tier in enumerate(sources):
            if tier is None:
                host_slots.append(here[i])
            elif slots:
                host.fetching[keys[i]] = slot = slots.pop()
                self._fetch_tier[keys[i]] = tier
                host_slots.append(slot)
                fetches.setdefault(tier, []).append(i)
            else:
                break
        for i in range(len(host_slots), len(sources)):
            if sources[i] is None:
                host.end_use(keys[i])
        self._books.counters["load_refused"] += len(keys) - len(host_slots)
        if not fetches:
            return CPULoadStoreSpec(host_slots)
        return StagedLoadStoreSpec(
            host_slots,
            [Fetch(t.name, tuple(at), tuple(keys[i] for i in at)) for t, at in fetches.items()],
        )

    def _slots_for(self, missing: Sequence[OffloadKey]) -> list[int]:
        """Take slots for as many leading chunks as possible."""
        return self._books.reserve(missing)[0]

    def _stays(self, key: OffloadKey, slot: int) -> bool:
        """A chunk arrived: whether it stays in its slot, loadable from there."""
        self._host.become_ready(key, slot)
        return True

    def _sources(self, keys: Sequence[OffloadKey], tiers: tuple[Tier, ...]) -> list[Tier | None]:
        """For the leading keys that can be had: None (in host memory) or the tier to fetch from."""
        host = self._host
        sources: list[Tier | None] = []
        named: set[OffloadKey] = set()
        for key in keys:
            tier = None
            if not host.is_ready(key):
                if host.moving(key) or key in named:
                    break
                tier = first_holder(key, tiers)[0]
                if tier is None:
                    break
                named.add(key)
            sources.append(tier)
        return sources

    def complete(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
        reason: str = "",
    ) -> None:
        """See :meth:`OffloadingManager.complete_load`."""
        answered = list(keys)
        if not answered:
            return
        known, unknown = self._under_way.end(answered, req_context)
        self._books.unexpected("complete_load", unknown)
        # From tail to head, so that of one prompt the tail is the older and leaves first.
        backwards = known[::-1]
        if success and settled and not self._host.fetching and self._host.unpin_all(backwards):
            return
        host = self._host
        arrived: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        missed: list[OffloadKey] = []
        promotions: dict[Tier, list[OffloadKey]] = {}
        for key in backwards:
            source = self._fetch_tier.pop(key, None)
            if source and not success:
                source.forget(key)
                missed.append(key)
            if key in host.fetching:
                slot = host.fetching.pop(key)
                if success and self._stays(key, slot):
                    arrived.append(key)
                    if source and self._books.promotes:
                        promotions.setdefault(source, []).append(key)
                else:
                    host.give_back(key, slot, settled)
            else:
                if not success and key in host.pinned:
                    host.forget(key)
                    lost.append(key)
                host.end_use(key, settled)
        self._books.residence.departures.note([*lost, *missed], reason or Reason.FAILED)
        self._books.residence.record(lost[::-1], CPU, Reason.FAILED)
        self._books.residence.record(arrived[::-1], CPU, Reason.STORED)
        for source, fetched in promotions.items():
            self._promote(source, fetched[::-1], req_context)
        self._books.write_through.begin()

    def _promote(
        self, source: Tier, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> None:
        """What came from a tier goes to the nearer ones, too: next time it is faster from there."""
        for tier in self._books.lookups.tiers_for(req_context):
            if tier is source:
                return
            self._books.write_through.offer(tier, keys)
