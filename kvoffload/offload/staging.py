"""Transfers that are not plain: chunks that tiers must fetch first, chunks that fail."""

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from kvoffload.messages import CPULoadStoreSpec, Fetch, OffloadKey
from kvoffload.offload.base import EarlyRead, LoadJob
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import Tier, first_holder


class LoadEnd(NamedTuple):
    """The chunks of an answered load whose place has changed, from head to tail."""

    arrived: list[OffloadKey]
    """Loadable from host memory now."""
    lost: list[OffloadKey]
    """Not loadable from host memory any more."""
    missed: list[OffloadKey]
    """Forgotten by the tier that they should have come from."""


class Staging:
    """Takes slots for loads of chunks that are not all idle; ends transfers chunk by chunk.

    Args:
        host: host memory.
        take_slots: takes slots for as many leading chunks as possible; returns them first.
        caching: whether a fetched chunk stays in host memory.
    """

    def __init__(
        self,
        host: HostCache,
        take_slots: Callable[[Sequence[OffloadKey]], tuple[list[int], object]],
        caching: bool,
    ) -> None:
        self._host = host
        self._take_slots = take_slots
        self._caching = caching

    def plan(
        self, keys: Sequence[OffloadKey], tiers: Sequence[Tier]
    ) -> tuple[CPULoadStoreSpec, dict[OffloadKey, Tier]]:
        """Pin or reserve slots of the leading loadable chunks; name what tiers must fetch."""
        host = self._host
        sources = self._find_sources(keys, tiers)
        named = list(zip(keys, sources, strict=False))
        # Pin resident chunks before making room for the rest, or they might be evicted for it.
        here = [key for key, tier in named if tier is None]
        pinned = (host.pin_all(here) or map(host.pin, here)) if here else ()
        slots = dict(zip(here, pinned, strict=True))
        fetched = {key: tier for key, tier in named if tier is not None}
        free = self._take_slots(list(fetched))[0] if fetched else []
        if len(free) < len(fetched):
            covered = keys.index(list(fetched)[len(free)])
            for key, tier in named[covered:]:
                if tier is None:
                    host.end_use(key)
            del named[covered:]
            fetched = dict(islice(fetched.items(), len(free)))
        reserved = dict(zip(fetched, free, strict=True))
        host.fetching.update(reserved)
        slots.update(reserved)
        parts = []
        for tier in dict.fromkeys(fetched.values()):
            at = [i for i, (_, source) in enumerate(named) if source is tier]
            some = [keys[i] for i in at]
            parts.append(Fetch(tier.name, tuple(at), tuple(some), tuple(host.tenants_of(some))))
        return CPULoadStoreSpec([slots[key] for key, _ in named], parts), fetched

    def _find_sources(self, keys: Sequence[OffloadKey], tiers: Sequence[Tier]) -> list[Tier | None]:
        """Return for the leading loadable keys the tier to fetch from; None for host memory."""
        host = self._host
        here = host.num_leading(keys)
        rest = keys[here:]
        if tiers and len(host.absent(rest)) == len(rest) == tiers[0].num_leading(rest):
            return [*[None] * here, *[tiers[0]] * len(rest)]
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

    def end_load(self, job: LoadJob | EarlyRead, ok: Sequence[bool], settled: bool) -> LoadEnd:
        """End a load of chunks, from tail to head: the tail of a prompt leaves first."""
        host, keys, held, ended = self._host, job.keys, job.held, LoadEnd([], [], [])
        if settled and self._caching and all(ok):
            for is_fetched, run in groupby(held[::-1], host.fetching.__contains__):
                names = list(run)
                if is_fetched:
                    host.make_evictable(names, list(map(host.fetching.pop, names)))
                    ended.arrived.extend(names)
                elif not host.unpin_all(names):
                    for name in names:
                        host.end_use(name)
            ended.arrived.reverse()
            return ended
        sources = job.sources
        for key, name, fine in zip(keys[::-1], held[::-1], reversed(ok), strict=True):
            source = sources.get(key)
            if source and not fine:
                ended.missed.append(key)
                if not job.stale:
                    source.forget((key,))
            if name in host.fetching:
                slot = host.fetching.pop(name)
                if fine and self._caching:
                    host.fill(key, slot, settled)
                    ended.arrived.append(key)
                else:
                    host.give_back(key, slot, settled)
            else:
                if not fine and name in host.pinned:
                    host.forget(name)
                    ended.lost.append(name)
                host.end_use(name, settled)
        for moved in ended:
            moved.reverse()
        return ended

    def end_store(
        self, keys: Sequence[OffloadKey], ok: Sequence[bool], settled: bool
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """End a store of chunks, from tail to head; return those that are stored, and the failed.

        Chunks that a reset forgot are neither.
        """
        host = self._host
        stored: list[OffloadKey] = []
        failed: list[OffloadKey] = []
        for key, fine in zip(reversed(keys), reversed(ok), strict=True):
            if key not in host.incoming:
                host.end_use(key, settled)
                continue
            slot = host.incoming.pop(key)
            if fine:
                host.fill(key, slot, settled)
                stored.append(key)
            else:
                host.give_back(key, slot, settled)
                failed.append(key)
        return stored[::-1], failed
