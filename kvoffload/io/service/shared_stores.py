"""The stores of a server that several engines use: one a namespace, with a view for each session.

A view is a backend: a session uses it as one that it has opened itself. What the store says of its
chunks is told to each view, because an index has one reader.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress

from kvoffload import registry
from kvoffload.backends.admin import Purges
from kvoffload.backends.base import (
    Answers,
    Backend,
    Described,
    LocalIndex,
    Observable,
    Removal,
    Spares,
    Usage,
    Written,
)
from kvoffload.backends.changes import ChangedKeys
from kvoffload.errors import ConfigError
from kvoffload.identity import short
from kvoffload.io.loans import Lends
from kvoffload.io.open_stores import CLOSE_S, KEYS_PER_MESSAGE, OpenStore, close_stores, open_tier
from kvoffload.io.protocol import Open, TierSettings
from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.key_parts import new_parts
from kvoffload.io.service.layered_store import IndexedLayers, Layers, layered
from kvoffload.io.service.turns import NoTurnError, Turns
from kvoffload.metrics.names import CAPACITY_BYTES, NAMESPACE_BYTES, RESIDENT_BYTES, TIER_EVENTS
from kvoffload.metrics.samples import Sample
from kvoffload.policies.told_return import ToldReturn

log = logging.getLogger(__name__)

MEMORY = "memory"
"""The name of the server's memory among its layers."""
LONGEST_NAMESPACE = 256
PATIENT_S = 5.0
"""How long the memory waits for the backends below it to open; later ones are added."""
TRY_AGAIN_S, LONGEST_S = 0.5, 30.0
"""Time before a backend that could not be opened is tried again; it doubles up to the second."""
PART = 0.5
"""The part of an engine's patience after which it learns what nearer layers have."""
_MAX_REMOVALS = 1 << 16
"""Removals kept for a session that may never ask; older ones are lost to it."""


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
            shared.store.check_fit(wanted.chunk_bytes)
            view = shared.new_view(PART * wanted.lookup_timeout_s)
            return OpenStore(wanted.tiers[i].name, view)
        finally:
            self._opening[namespace] -= 1
            self._close_unused(namespace)

    async def _open(self, namespace: str) -> "SharedStore":
        if closing := self._closing.get(namespace):
            await asyncio.wait([closing])
        memory = HostStore(self._memory, namespace)
        layers: dict[str, Backend] = {MEMORY: memory}
        backends = self.backends
        opening = [asyncio.create_task(open_tier(tier, namespace)) for tier in backends]
        try:
            if opening:
                await asyncio.wait(opening, timeout=PATIENT_S)
            late = []
            for tier, task in zip(backends, opening, strict=True):
                if task.done() and not task.exception():
                    layers[tier.name] = task.result()
                else:
                    late.append((tier, task))
            late_have_index = all(_has_index(tier) for tier, _ in late)
            store = layered(layers, late_have_index=late_have_index)
        except BaseException:
            await _end_opening(opening)
            await memory.close()
            raise
        shared = SharedStore(store, memory, lambda: self._close_unused(namespace))
        names = [MEMORY, *(each.name for each in backends)]
        for tier, task in late:
            work = self._open_late(shared, tier, task, namespace, names)
            shared.late[tier.name] = asyncio.create_task(work)
        return shared

    async def _open_late(
        self,
        shared: "SharedStore",
        tier: TierSettings,
        opening: "asyncio.Task[Backend]",
        namespace: str,
        order: Sequence[str],
    ) -> None:
        """Try to open a backend until it is open; the layers above it serve meanwhile."""
        pause_s = TRY_AGAIN_S
        while True:
            try:
                layer = await opening
                break
            except asyncio.CancelledError:
                await _end_opening([opening])
                raise
            except Exception as error:  # also one that has no thread for it
                log.error("%s cannot be opened yet: %s", tier.name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_S, 2 * pause_s)
            opening = asyncio.create_task(open_tier(tier, namespace))
        if not await shared.add(tier.name, layer, order):
            log.error("%s lists no chunks and came late: restart the server", tier.name)
            await close_stores([OpenStore(tier.name, layer)], CLOSE_S)

    def _close_unused(self, namespace: str) -> None:
        """Close the store of a namespace if no session uses it or waits for it."""
        opening = self._shared.get(namespace)
        if opening is None or not opening.done() or self._opening[namespace]:
            return
        if opening.cancelled() or opening.exception() is not None:
            del self._shared[namespace]
        elif not opening.result().views:
            del self._shared[namespace], self._opening[namespace]
            closing = asyncio.create_task(self._close(namespace, opening.result()))
            self._closing[namespace] = closing

    async def _close(self, namespace: str, shared: "SharedStore") -> None:
        for task in shared.late.values():
            task.cancel()
        if shared.late:
            await asyncio.wait(shared.late.values())
        try:
            self._last |= _used(shared.store)  # of an engine that leaves, the last look is too old
        except Exception as error:  # a plug-in's
            log.warning("the last figures of a store cannot be read: %r", error)
        await close_stores([OpenStore(namespace, shared.store)], CLOSE_S)
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
                store = opening.result().store
                for name, layer in store.observed():
                    events.update({(name, why): n for why, n in layer.counters().items()})
                for figure, value in _used(store).items():
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


def _used(store: Layers) -> dict[tuple[str, str], int]:
    """Return how full the backends of a store are; a root tells of all its namespaces together."""
    used = dict[tuple[str, str], int]()
    for name, layer in store.observed():
        if name != MEMORY:
            usage = layer.usage()
            if usage.resident_bytes is not None:
                used[RESIDENT_BYTES, name] = usage.resident_bytes
            if usage.capacity_bytes is not None:
                used[CAPACITY_BYTES, name] = usage.capacity_bytes
    return used


async def _end_opening(opening: Sequence["asyncio.Task[Backend]"]) -> None:
    """Open none of these backends any more, and close those that have opened meanwhile."""
    for task in opening:
        task.cancel()
    ended = await asyncio.gather(*opening, return_exceptions=True)
    layers = [each for each in ended if not isinstance(each, BaseException)]
    await close_stores([OpenStore("a backend", layer) for layer in layers], CLOSE_S)


def _has_index(tier: TierSettings) -> bool:
    """Return whether a backend lists its chunks, before it is open."""
    return hasattr(registry.load(registry.BACKENDS, tier.type), "take_changes")


class SharedStore:
    """The store of one namespace.

    Args:
        store: opened for this; closed by the one who made it.
        memory: its first layer.
        unused: called when the last view is closed.
    """

    def __init__(self, store: Layers, memory: HostStore, unused: Callable[[], None]) -> None:
        self.store = store
        self.memory = memory
        self.views: list[StoreView] = []
        self._present = new_parts(set[bytes])
        """What the index has told so far, but for what is in memory, which has tables of it."""
        self._unused = unused
        self._facts: Mapping[str, str] = {}
        """Those behind the namespace."""
        self.late: dict[str, asyncio.Task[None]] = {}
        """Backend that could not be opened at once → what opens it."""

    def new_view(self, lookup_s: float | None = None) -> "StoreView":
        """Return a view for one session, which closes it; ``lookup_s``: how long it asks layers."""
        store = self.store
        view = StoreView(self)
        if isinstance(store, IndexedLayers):
            view = IndexedView(self, store)
        view.lookup_s = lookup_s
        self.views.append(view)
        return view

    def end(self, view: "StoreView") -> None:
        """Take in that a view is closed."""
        self.views.remove(view)
        self.spare()
        if not self.views:
            self._unused()

    def parts(self) -> list[Collection[bytes]]:
        """Return what the index has told so far, in parts that change as it does."""
        # What is told from now on is a change: a part that is empty yet would list it once more.
        return list(filter(None, [*self.memory.tables(), *self._present.values()]))

    def pump(self) -> None:
        """Tell all views what has changed in the index."""
        if isinstance(self.store, IndexedLayers):
            changes = self.store.take_changes(KEYS_PER_MESSAGE)
            keys, present = [key for key, _ in changes], self._present
            for (key, is_there), is_near in zip(changes, self.memory.held(keys), strict=True):
                if is_there and not is_near:
                    present[key[:1]].add(key)
                else:
                    present[key[:1]].discard(key)
            for view in self.views:
                view.changed(keys)

    def tell_removals(self) -> None:
        """Tell all views which chunks have left."""
        for removal in self.store.take_removals():
            for view in self.views:
                view.removals.append(removal)

    def written(self, keys: Sequence[bytes]) -> None:
        """Take in that these were stored: what a view has forgotten counts again."""
        for view in self.views:
            view.remembered(keys)

    def spare(self) -> None:
        """Tell the store what the queues of all its engines need."""
        self.store.spare(frozenset[bytes]().union(*(view.spared for view in self.views)))

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Let the store keep the facts behind the namespace."""
        self._facts = facts
        await self.store.describe(facts)

    async def add(self, name: str, layer: Backend, order: Sequence[str]) -> bool:
        """Add a backend that has opened late, as :meth:`Layers.add`, and tell it what it missed."""
        if is_added := self.store.add(name, layer, order):
            self.spare()
            await self.store.describe(self._facts)
        return is_added

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces from all layers.

        Raises:
            OSError: a layer cannot do it, or is not open yet.
        """
        closed = self.late.keys() - self.store.layers.keys()
        removed = await self.store.purge(namespaces)
        if closed:  # also if one has opened meanwhile
            raise OSError(f"{', '.join(sorted(closed))} cannot be opened yet")
        return removed


class StoreView(Observable, Lends, Spares, Purges):
    """What one session sees of a shared store; made by :meth:`SharedStore.new_view`."""

    def __init__(self, shared: SharedStore) -> None:
        self._shared = shared
        self._store = shared.store
        self._turns = Turns()
        self._is_closed = False
        self.removals: deque[Removal] = deque(maxlen=_MAX_REMOVALS)
        self.spared: Collection[bytes] = ()
        """What this session's engine needs next."""
        self.is_shared = True
        self.lookup_s: float | None = None
        """How long layers are asked for chunks."""

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._store.contains(keys, self._turns.call, self.lookup_s)

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Answers:
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
        tenants: Sequence[bytes] = (),
    ) -> Answers:
        return await self._store.read_each(keys, into, arrived, tenants, self._turns.call)

    async def verify(self, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        check = partial(self._shared.memory.verify, keys, sizes)
        with contextlib.suppress(NoTurnError):
            await self._turns.call("verify", MEMORY, len(keys), check)

    def lend(
        self, keys: Sequence[bytes], sizes: Sequence[int]
    ) -> tuple[list[int], Callable[[], None]]:
        if self._is_closed:
            return [-1] * len(keys), lambda: None
        return self._shared.memory.lend(keys, sizes)

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> Sequence[Written]:
        answers = await self._store.write(keys, chunks, tenants, self._turns.call)
        self._shared.written([key for key, good in zip(keys, answers, strict=True) if good])
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._store.remove(keys, self._turns.call)

    async def close(self) -> None:
        """Leave the store; return once none of its calls is in progress."""
        if not self._is_closed:
            self._is_closed = True
            self.spared = ()
            self.emptied()
            self._shared.end(self)
        await self._turns.end()

    async def purge(self, namespaces: Sequence[str]) -> int:
        return await self._shared.purge(namespaces)

    def changed(self, keys: Sequence[bytes]) -> None:
        """Take in that the presence of chunks may have changed."""

    def remembered(self, keys: Sequence[bytes]) -> None:
        """Take in that these were stored."""

    def emptied(self) -> None:
        """Take in that none of the chunks can be read any more."""

    def spare(self, keys: Collection[bytes]) -> None:
        self.spared = keys
        self._shared.spare()

    def expect(self, returns: Sequence[ToldReturn], share: float) -> None:
        self._store.expect(returns, share)

    def usage(self) -> Usage:
        return self._store.usage()

    def counters(self) -> Mapping[str, int]:
        return self._store.counters()

    def take_removals(self) -> list[Removal]:
        self._shared.tell_removals()
        return [self.removals.popleft() for _ in range(len(self.removals))]

    async def describe(self, facts: Mapping[str, str]) -> None:
        await self._shared.describe(facts)

    async def described(self) -> Sequence[Described]:
        return await self._store.described()


class IndexedView(StoreView, LocalIndex):
    """A view of a store with an index.

    What one engine could not load is absent for this engine alone: it may have been too slow.
    """

    def __init__(self, shared: SharedStore, index: IndexedLayers) -> None:
        super().__init__(shared)
        self._index = index
        self._changes = ChangedKeys()
        self._changes.begin_parts(shared.parts())
        self._forgotten: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key not in self._forgotten and not self._is_closed and self._index.holds(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        # One that has left as well is no longer told of: it would stay forgotten when it returns.
        self._forgotten.update(compress(keys, self._index.held(keys)))
        self._changes.note_all(keys)

    def remembered(self, keys: Sequence[bytes]) -> None:
        for key in self._forgotten.intersection(keys):
            self._forgotten.discard(key)
            self._changes.note(key)

    def changed(self, keys: Sequence[bytes]) -> None:
        if self._forgotten:
            self._forgotten -= {
                key for key in self._forgotten.intersection(keys) if not self._index.holds(key)
            }
        self._changes.note_all(keys)

    def emptied(self) -> None:
        self._changes.begin_parts(self._shared.parts())

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        if not self._is_closed:
            self._shared.pump()
        keys = self._changes.take(limit)
        held = [False] * len(keys) if self._is_closed else self._index.held(keys)
        forgotten = self._forgotten
        return [(k, there and k not in forgotten) for k, there in zip(keys, held, strict=True)]

    @property
    def is_complete(self) -> bool:
        return not self._changes and self._index.is_complete
