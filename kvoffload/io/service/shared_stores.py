"""The stores of a server that several engines use: one a namespace, open while a session has it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from kvoffload import registry
from kvoffload.errors import ConfigError
from kvoffload.identity import short
from kvoffload.io.open_stores import CLOSE_S, OpenStore, close_stores, open_tier, until_open
from kvoffload.io.protocol import Open, TierSettings
from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.layered_store import MEMORY, SharedStore
from kvoffload.metrics.names import CAPACITY_BYTES, NAMESPACE_BYTES, RESIDENT_BYTES, TIER_EVENTS
from kvoffload.metrics.samples import Sample

log = logging.getLogger(__name__)

LONGEST_NAMESPACE = 256
PATIENT_S = 5.0
"""How long the memory waits for the backends below it to open; later ones are added."""
PART = 0.5
"""The part of an engine's patience after which it learns what nearer layers have."""


class SharedStores:
    """Opens the store of each namespace once, for as long as a session has a view of it.

    Args:
        memory: above the backends.
        backends: opened for each namespace.
    """

    def __init__(self, memory: HostMemory, backends: Sequence[TierSettings]) -> None:
        self._memory = memory
        self.backends = backends
        """Those of stores that are opened from now on."""
        self._last: dict[tuple[str, str], int] = {}
        """Bytes of each backend, as they were when a store of it was last open."""
        self._shared: dict[str, asyncio.Task[SharedStore]] = {}
        self._opening = Counter[str]()
        """Namespace → sessions that wait for its store."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        """Namespace → what closes its store; another one is opened once that has ended."""

    async def open(self, wanted: Open, i: int, _: dict[str, int]) -> OpenStore:
        """Return a view of the wanted namespace as an open store.

        Raises:
            ConfigError: the namespace is none, or a chunk is too large; or it is a further tier.
        """
        if i:  # each would be told of all chunks
            raise ConfigError("backends", wanted.tiers[i].name, "a session has one tier")
        namespace = wanted.namespace
        if not 0 < len(namespace) <= LONGEST_NAMESPACE:
            raise ConfigError("namespace", namespace, f"has 1 to {LONGEST_NAMESPACE} characters")
        opening = self._shared.get(namespace)
        if opening is None:
            opening = asyncio.create_task(self._open(namespace))
            opening.add_done_callback(lambda _: self._close_unused(namespace))
            self._shared[namespace] = opening
        self._opening[namespace] += 1
        try:
            shared = await asyncio.shield(opening)
            shared.check_fit(wanted.chunk_bytes)
            view = shared.new_view(PART * wanted.lookup_timeout_s)
            return OpenStore(wanted.tiers[i].name, view)
        finally:
            self._opening[namespace] -= 1
            self._close_unused(namespace)

    async def _open(self, namespace: str) -> SharedStore:
        if closing := self._closing.get(namespace):
            await asyncio.wait([closing])
        memory, tiers = HostStore(self._memory, namespace), self.backends
        unused = partial(self._close_unused, namespace)
        names = [tier.name for tier in tiers]
        shared = SharedStore(memory, names, unused, self._closing)
        tries = [asyncio.get_running_loop().create_future() for _ in tiers]
        for tier, tried in zip(tiers, tries, strict=True):
            work = _open_layer(shared, tier, namespace, tried)
            shared.opening[tier.name] = asyncio.create_task(work)
        try:
            if tries:
                await asyncio.wait(tries, timeout=PATIENT_S)
            late = [tier for tier in tiers if tier.name not in shared.layers]
            shared.settle(late_have_index=all(map(_has_index, late)))
        except BaseException:
            await shared.close()
            raise
        return shared

    def _close_unused(self, namespace: str) -> None:
        """Close the store of a namespace if no session uses it or waits for it."""
        opening = self._shared.get(namespace)
        if opening is None or not opening.done() or self._opening[namespace]:
            return
        if opening.cancelled() or opening.exception() is not None:
            del self._shared[namespace], self._opening[namespace]
        elif not opening.result().views:
            del self._shared[namespace], self._opening[namespace]
            closing = asyncio.create_task(self._close(namespace, opening.result()))
            self._closing[namespace] = closing

    async def _close(self, namespace: str, shared: SharedStore) -> None:
        try:
            self._last |= _used(shared)  # of an engine that leaves, the last look is too old
        except Exception as error:  # a plug-in's
            log.warning("the last figures of a store cannot be read: %r", error)
        await shared.close()
        if self._closing.get(namespace) is asyncio.current_task():
            del self._closing[namespace]

    def samples(self) -> Iterator[Sample]:
        """Yield the figures of all layers; on the loop."""
        memory = self._memory
        yield RESIDENT_BYTES, (MEMORY,), memory.resident_bytes
        yield CAPACITY_BYTES, (MEMORY,), memory.capacity_bytes
        events, now = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for namespace, opening in self._shared.items():
            if (used_bytes := memory.bytes_of(namespace)) is not None:
                yield NAMESPACE_BYTES, (short(namespace),), used_bytes
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                shared = opening.result()
                for name, layer in shared.observed:
                    events.update({(name, why): n for why, n in layer.counters().items()})
                for figure, value in _used(shared).items():
                    now[figure] = max(now[figure], value)
        names = {tier.name for tier in self.backends}
        self._last = {of: n for of, n in (self._last | now).items() if of[1] in names}
        for (metric, name), value in self._last.items():
            yield metric, (name,), value
        for labels, count in events.items():
            yield TIER_EVENTS, labels, count

    async def close(self) -> None:
        """Close all stores; the sessions have ended."""
        for namespace in list(self._shared):
            self._close_unused(namespace)
        if self._closing:
            await asyncio.wait(self._closing.values())


def _used(shared: SharedStore) -> dict[tuple[str, str], int]:
    """Return how full the backends of a store are; a root tells of all its namespaces together."""
    used = dict[tuple[str, str], int]()
    for name, layer in shared.observed:
        if name != MEMORY:
            usage = layer.usage()
            if usage.resident_bytes is not None:
                used[RESIDENT_BYTES, name] = usage.resident_bytes
            if usage.capacity_bytes is not None:
                used[CAPACITY_BYTES, name] = usage.capacity_bytes
    return used


async def _open_layer(
    shared: SharedStore, tier: TierSettings, namespace: str, tried: "asyncio.Future[None]"
) -> None:
    """Open a backend, in as many tries as it takes; the layers above it serve meanwhile."""

    def refused(error: Exception) -> None:
        log.error("%s cannot be opened yet: %s", tier.name, error)
        _is_over(tried)

    backend = await until_open(tier.name, partial(open_tier, tier, namespace), refused)
    layer = OpenStore(tier.name, backend)
    if not await shared.add(layer):
        log.error("%s lists no chunks and came late: restart the server", tier.name)
        await close_stores([layer], CLOSE_S)
    _is_over(tried)


def _is_over(tried: "asyncio.Future[None]") -> None:
    """Tell that the first try to open a backend has ended."""
    if not tried.done():
        tried.set_result(None)


def _has_index(tier: TierSettings) -> bool:
    """Return whether a backend lists its chunks, before it is open."""
    return hasattr(registry.load(registry.BACKENDS, tier.type), "take_changes")
