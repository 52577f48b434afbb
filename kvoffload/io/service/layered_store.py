"""The store of one namespace: stores one above the other, and a view of them for each session.

A view is a backend: a session uses it as one that it has opened itself. What the layers say of
their chunks is told to each view, because an index has one reader.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeVar

from kvoffload.backends.admin import Purges
from kvoffload.backends.base import (
    Answers,
    Described,
    LocalIndex,
    Observable,
    ReadResult,
    Removal,
    Spares,
    Usage,
    WriteResult,
    Written,
    check_lengths,
)
from kvoffload.backends.changes import ChangedKeys
from kvoffload.backends.counted import Counts
from kvoffload.backends.log_rate import Throttle
from kvoffload.errors import ConfigError
from kvoffload.io.loans import Lends
from kvoffload.io.open_stores import CLOSE_S, OpenStore, call_for, close_stores
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.key_parts import new_parts
from kvoffload.io.service.turns import NoTurnError, Turns
from kvoffload.policies.told_return import ToldReturn

T = TypeVar("T")
_failures = Throttle(logging.getLogger(__name__))

MEMORY = "memory"
"""The name of the server's memory among the layers."""


class SharedStore:
    """Stores of one namespace, the nearest first, and the views that sessions have of them.

    Args:
        memory: the nearest one.
        order: the names of all, the nearest first.
        unused: called when the last view is closed.
        closing: namespaces whose stores are being closed, with what does that.
    """

    def __init__(
        self,
        memory: HostStore,
        order: Sequence[str],
        unused: Callable[[], None],
        closing: Mapping[str, asyncio.Task[None]],
    ) -> None:
        self.memory = memory
        self._order = MEMORY, *order
        self._unused, self._closing = unused, closing
        self.views: list[StoreView] = []
        self._present = new_parts(set[bytes])
        """What the index has told so far, but for what is in memory, which has tables of it."""
        self._facts: Mapping[str, str] = {}
        """Those behind the namespace."""
        self.opening: dict[str, asyncio.Task[None]] = {}
        """Layer below the memory → what opens it."""
        self.is_indexed = False
        """Whether all layers have an index, and so the views."""
        self._take([OpenStore(MEMORY, memory)])

    def _take(self, layers: Sequence[OpenStore]) -> None:
        self.layers = {each.name: each for each in layers}
        self._indexes = [each.index for each in layers if each.index is not None]
        below = [each.index for each in layers if each.name != MEMORY]
        self._farther = [index for index in below if index is not None]

    @property
    def observed(self) -> list[tuple[str, Observable]]:
        """The layers that tell figures."""
        layers = self.layers.values()
        return [(each.name, each.observable) for each in layers if each.observable is not None]

    # ---- its layers ----

    def settle(self, *, late_have_index: bool) -> None:
        """Choose whether views have an index, before the first one, by what is open by then."""
        self.is_indexed = late_have_index and len(self._indexes) == len(self.layers)

    async def add(self, layer: OpenStore) -> bool:
        """Add a store that has opened, and tell it what it missed; return whether that can be."""
        if self.is_indexed and layer.index is None:
            return False
        layers = {**self.layers, layer.name: layer}
        self._take([layers[each] for each in self._order if each in layers])
        self.spare()
        if self._facts:
            await self.describe(self._facts)
        return True

    def check_fit(self, chunk_bytes: int) -> None:
        """Refuse a chunk that a layer has no room for; raises ConfigError."""
        for name, layer in self.observed:
            try:
                layer.check_fit(chunk_bytes)
            except ConfigError as error:
                raise ConfigError(f"{name}.{error.field}", error.value, error.remedy) from error

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Let the layers keep the facts behind the namespace."""
        self._facts = facts
        await _together(layer.describe(facts) for _, layer in self.observed)

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces from all layers.

        Raises:
            OSError: a layer cannot do it, or is not open yet.
        """
        # A disk writes what it knows as it closes: removed before, a namespace would be back.
        if closing := [self._closing[each] for each in namespaces if each in self._closing]:
            await asyncio.wait(closing)
        closed, removed = self.opening.keys() - self.layers.keys(), 0
        for name, layer in self.layers.items():
            if not isinstance(layer.backend, Purges):
                raise OSError(f"{name} cannot remove a namespace")
            removed += await layer.backend.purge(namespaces)
        if closed:  # also if one has opened meanwhile
            raise OSError(f"{', '.join(sorted(closed))} cannot be opened yet")
        return removed

    def spare(self) -> None:
        """Tell the layers what the queues of all engines need."""
        keys = frozenset[bytes]().union(*(view.spared for view in self.views))
        for layer in self.layers.values():
            layer.spare(keys)

    async def close(self) -> None:
        """Close all layers, those that are being opened as well."""
        for task in self.opening.values():
            task.cancel()
        if self.opening:
            await asyncio.wait(self.opening.values())
        await close_stores(list(self.layers.values()), CLOSE_S)

    # ---- its views ----

    def new_view(self, lookup_s: float | None = None) -> "StoreView":
        """Return a view for one session, which closes it; ``lookup_s``: how long it asks layers."""
        view = (IndexedView if self.is_indexed else StoreView)(self, lookup_s)
        self.views.append(view)
        return view

    def end(self, view: "StoreView") -> None:
        """Take in that a view is closed."""
        self.views.remove(view)
        self.spare()
        if not self.views:
            self._unused()

    def tell_removals(self) -> None:
        """Tell all views which chunks have left, and are in no other layer with an index."""
        left = [each for layer in self.layers.values() for each in layer.removals()]
        for key, reason in left:
            if not self.holds(key):
                for view in self.views:
                    view.note_removal(key, reason)

    def written(self, keys: Sequence[bytes]) -> None:
        """Take in that these were stored: what a view has forgotten counts again."""
        for view in self.views:
            view.remembered(keys)

    # ---- its index ----

    def holds(self, key: bytes) -> bool:
        """Return whether a layer with an index has a chunk."""
        for layer in self._indexes:  # noqa: SIM110, a generator costs twice as much for each key
            if layer.holds(key):
                return True
        return False

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a layer with an index holds it."""
        answers = self.memory.held(keys)
        for layer in self._farther:
            pairs = zip(keys, answers, strict=True)
            answers = [there or layer.holds(key) for key, there in pairs]
        return answers

    def parts(self) -> list[Collection[bytes]]:
        """Return what the index has told so far, in parts that change as it does."""
        # What is told from now on is a change: a part that is empty yet would list it once more.
        return list(filter(None, [*self.memory.tables(), *self._present.values()]))

    def pump(self) -> None:
        """Tell all views what has changed in the index."""
        changed: dict[bytes, bool] = {}  # each once
        for layer in self.layers.values():
            if told := layer.changes():
                changed.update(dict.fromkeys(told.added, True))
                changed.update(dict.fromkeys(told.removed, False))
        gone = [key for key, is_there in changed.items() if not is_there]  # from one of them
        changed.update(zip(gone, self.held(gone), strict=True))
        keys, present = list(changed), self._present
        for (key, is_there), is_near in zip(changed.items(), self.memory.held(keys), strict=True):
            if is_there and not is_near:
                present[key[:1]].add(key)
            else:
                present[key[:1]].discard(key)
        for view in self.views:
            view.changed(keys)

    @property
    def is_complete(self) -> bool:
        """Whether each layer has told of all that was stored in it earlier."""
        return all(layer.is_told for layer in self.layers.values())


class StoreView(Counts, Observable, Lends, Spares, Purges):
    """What one session sees of a shared store; made by :meth:`SharedStore.new_view`.

    A store goes to all layers, and succeeds if one has taken the chunk. A load asks them in turn;
    what a farther one brings is stored in the nearer ones as well.
    """

    is_shared = True

    def __init__(self, shared: SharedStore, lookup_s: float | None) -> None:
        super().__init__()
        self._shared = shared
        self._lookup_s = lookup_s
        self._turns = Turns()
        self._is_closed = False
        self.spared: Collection[bytes] = ()
        """What this session's engine needs next."""

    # ---- chunks ----

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each chunk whether a layer has it; one that has not answered has none.

        A call that hangs goes on, and ends by itself: it uses no memory of the caller.
        """
        answers = [False] * len(keys)
        asking = asyncio.create_task(self._ask(keys, answers))
        try:
            await asyncio.wait([asking], timeout=self._lookup_s)
        finally:
            asking.cancel()
        if asking.done():
            asking.result()
        return answers

    async def _ask(self, keys: Sequence[bytes], answers: list[bool]) -> None:
        for name, layer in self._shared.layers.items():
            if unknown := [i for i, there in enumerate(answers) if not there]:
                ask = partial(layer.backend.contains, [keys[i] for i in unknown])
                for found in await _together([self._turns.call("ask", name, len(unknown), ask)]):
                    for i, there in zip(unknown, found, strict=True):
                        answers[i] = there

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Answers:
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
        tenants: Sequence[bytes] = (),
    ) -> Answers:
        """See :meth:`ReadsEach.read_each`; ``tenants``: for whom each chunk is copied nearer."""
        check_lengths(keys, into)
        answers: list[bool | ReadResult] = [ReadResult.MISSING] * len(keys)
        nearer: list[OpenStore] = []

        def came(i: int) -> None:
            answers[i] = True  # whatever becomes of the call: its slot is copied from now on
            arrived(i)

        for name, layer in self._shared.layers.items():
            wanted = [i for i, answer in enumerate(answers) if not answer]
            if (index := layer.index) is not None:
                wanted = [i for i in wanted if index.holds(keys[i])]
            if wanted:
                read = partial(_read, layer, keys, into, wanted, came)
                for found in await _together([self._turns.call("read", name, len(wanted), read)]):
                    for i, answer in zip(wanted, found, strict=True):
                        answers[i] = answers[i] or answer
                brought = [i for i in wanted if answers[i]]
                if brought and nearer:  # the slots are the caller's until this returns
                    some = [keys[i] for i in brought], [into[i] for i in brought]
                    whose = [tenants[i] for i in brought] if tenants else ()
                    await _together(self._writes(nearer, *some, whose))
            nearer.append(layer)
        return answers

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> Sequence[Written]:
        check_lengths(keys, chunks)
        layers = self._shared.layers.values()
        answered = await _together(self._writes(layers, keys, chunks, tenants))
        answers = list(map(_best, zip([False] * len(keys), *answered, strict=True)))
        self._shared.written([key for key, good in zip(keys, answers, strict=True) if good])
        return answers

    def _writes(
        self,
        layers: Iterable[OpenStore],
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        tenants: Sequence[bytes],
    ) -> Iterator[Coroutine[Any, Any, Sequence[Written]]]:
        for layer in layers:
            work = partial(call_for, tenants, layer.backend.write, keys, chunks)
            yield self._turns.call("write", layer.name, len(keys), work)

    async def remove(self, keys: Sequence[bytes]) -> None:
        await _together(
            self._turns.call("write", name, len(keys), partial(layer.backend.remove, keys))
            for name, layer in self._shared.layers.items()
        )

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

    # ---- what it is told by the store, and tells it ----

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
        for layer in self._shared.layers.values():
            layer.expect(returns, share)

    # ---- figures ----

    def usage(self) -> Usage:
        """Return what all layers have together; each one's bytes are gauges."""
        usages = {name: layer.usage() for name, layer in self._shared.observed}
        gauges = dict[str, int]()
        for name, usage in usages.items():
            if usage.resident_bytes is not None:
                gauges[f"{name}_bytes"] = usage.resident_bytes
            gauges |= {f"{name}_{gauge}": value for gauge, value in usage.gauges.items()}
        return Usage(
            _total([usage.resident_bytes for usage in usages.values()]),
            _total([usage.capacity_bytes for usage in usages.values()]),
            _total([usage.chunks for usage in usages.values()]),
            gauges,
        )

    def counters(self) -> Mapping[str, int]:
        total = Counter[str]()
        for _, layer in self._shared.observed:
            total.update(layer.counters())
        return total

    def take_removals(self) -> list[Removal]:
        self._shared.tell_removals()
        return super().take_removals()

    async def describe(self, facts: Mapping[str, str]) -> None:
        await self._shared.describe(facts)

    async def described(self) -> Sequence[Described]:
        lists = await _together(layer.described() for _, layer in self._shared.observed)
        return [each for described in lists for each in described]


class IndexedView(StoreView, LocalIndex):
    """A view of layers that all have an index.

    What one engine could not load is absent for this engine alone: it may have been too slow.
    """

    def __init__(self, shared: SharedStore, lookup_s: float | None) -> None:
        super().__init__(shared, lookup_s)
        self._changes = ChangedKeys()
        self._changes.begin_parts(shared.parts())
        self._forgotten: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key not in self._forgotten and not self._is_closed and self._shared.holds(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        # One that has left as well is no longer told of: it would stay forgotten when it returns.
        self._forgotten.update(compress(keys, self._shared.held(keys)))
        self._changes.note_all(keys)

    def remembered(self, keys: Sequence[bytes]) -> None:
        for key in self._forgotten.intersection(keys):
            self._forgotten.discard(key)
            self._changes.note(key)

    def changed(self, keys: Sequence[bytes]) -> None:
        if self._forgotten:
            self._forgotten -= {
                key for key in self._forgotten.intersection(keys) if not self._shared.holds(key)
            }
        self._changes.note_all(keys)

    def emptied(self) -> None:
        self._changes.begin_parts(self._shared.parts())

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        if not self._is_closed:
            self._shared.pump()
        keys = self._changes.take(limit)
        held = [False] * len(keys) if self._is_closed else self._shared.held(keys)
        forgotten = self._forgotten
        return [(k, there and k not in forgotten) for k, there in zip(keys, held, strict=True)]

    @property
    def is_complete(self) -> bool:
        return not self._changes and self._shared.is_complete


def _best(answers: Sequence[Written]) -> Written:
    """Return the answer of a layer that stored the chunk, or else of one that had it."""
    is_new = any(answer and answer is not WriteResult.PRESENT for answer in answers)
    return is_new or (any(answers) and WriteResult.PRESENT)


def _total(figures: Sequence[int | None]) -> int | None:
    known = [each for each in figures if each is not None]
    return sum(known) if len(known) == len(figures) else None


async def _together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await calls of several layers; return what those that did not fail have answered.

    A cancellation ends all of them, and is raised once none uses the caller's memory any more.
    """
    answers = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, NoTurnError):
            continue
        if isinstance(answer, BaseException):
            _failures.warning("a layer's call failed: %r", answer)
        else:
            answers.append(answer)
    return answers


async def _read(
    layer: OpenStore,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    wanted: Sequence[int],
    arrived: Callable[[int], None],
) -> Sequence[bool | ReadResult]:
    some, slots = [keys[i] for i in wanted], [into[i] for i in wanted]
    if layer.reads_each is not None:
        return await layer.reads_each.read_each(some, slots, lambda at: arrived(wanted[at]))
    answers = await layer.backend.read(some, slots)
    for i, answer in zip(wanted, answers, strict=True):
        if answer:
            arrived(i)
    return answers
