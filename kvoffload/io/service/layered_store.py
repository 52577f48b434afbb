"""Stores one above the other, as one backend: the nearest answers first."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from kvoffload.backends.admin import Purges
from kvoffload.backends.base import (
    Backend,
    Described,
    LocalIndex,
    Observable,
    ReadResult,
    ReadsEach,
    Removal,
    Spares,
    Usage,
    WriteResult,
    Written,
    check_lengths,
)
from kvoffload.backends.log_rate import Throttle
from kvoffload.errors import ConfigError
from kvoffload.io.open_stores import call_for
from kvoffload.io.service.turns import NoTurnError
from kvoffload.policies.told_return import ToldReturn

T = TypeVar("T")
_failures = Throttle(logging.getLogger(__name__))


@runtime_checkable
class HoldsMany(Protocol):
    """An index that answers for many keys faster than for each."""

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is here."""
        ...


class Caller(Protocol):
    """Makes the calls of layers, each once the session that asks has a turn at the layer."""

    def __call__(
        self, kind: str, store: str, chunks: int, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> Coroutine[Any, Any, T]:
        """Return what a call of so many chunks returns."""
        ...


async def at_once(
    kind: str, store: str, chunks: int, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Make a call of no session."""
    return await work()


class Layers(Observable, ReadsEach, Spares):
    """Stores of one namespace, the nearest first.

    A store goes to all of them, and succeeds if one has taken the chunk. A load asks them in turn;
    what a farther one brings is stored in the nearer ones as well.

    Args:
        layers: open stores by their names; closed with this one.
    """

    def __init__(self, layers: Mapping[str, Backend]) -> None:
        self._take(layers)

    def _take(self, layers: Mapping[str, Backend]) -> None:
        self.layers = layers
        # Asked once: each question to a protocol takes some 10 µs, and each job would ask ten.
        self._observed = [
            (name, one) for name, one in layers.items() if isinstance(one, Observable)
        ]
        self._indexes = [one for one in layers.values() if isinstance(one, LocalIndex)]
        self._sparing = [one for one in layers.values() if isinstance(one, Spares)]

    def add(self, name: str, layer: Backend, order: Sequence[str]) -> bool:
        """Add a store that has opened late; return whether that can be.

        Args:
            name: of the new one.
            layer: the store, closed with this one from now on.
            order: all names, the nearest first.
        """
        layers = {**self.layers, name: layer}
        self._take({each: layers[each] for each in order if each in layers})
        return True

    async def contains(
        self, keys: Sequence[bytes], call: Caller = at_once, timeout_s: float | None = None
    ) -> list[bool]:
        """Return for each chunk whether a layer has it; one that has not answered has none.

        A call that hangs goes on, and ends by itself: it uses no memory of the caller.
        """
        answers = [False] * len(keys)
        asking = asyncio.create_task(self._ask(keys, answers, call))
        try:
            await asyncio.wait([asking], timeout=timeout_s)
        finally:
            asking.cancel()
        if asking.done():
            asking.result()
        return answers

    async def _ask(self, keys: Sequence[bytes], answers: list[bool], call: Caller) -> None:
        for name, layer in self.layers.items():
            if unknown := [i for i, there in enumerate(answers) if not there]:
                ask = partial(layer.contains, [keys[i] for i in unknown])
                for found in await _together([call("ask", name, len(unknown), ask)]):
                    for i, there in zip(unknown, found, strict=True):
                        answers[i] = there

    async def read(
        self, keys: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[bool | ReadResult]:
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
        tenants: Sequence[bytes] = (),
        call: Caller = at_once,
    ) -> list[bool | ReadResult]:
        """See :meth:`ReadsEach.read_each`; ``tenants``: for whom each chunk is copied nearer."""
        check_lengths(keys, into)
        answers: list[bool | ReadResult] = [ReadResult.MISSING] * len(keys)
        nearer: dict[str, Backend] = {}

        def came(i: int) -> None:
            answers[i] = True  # whatever becomes of the call: its slot is copied from now on
            arrived(i)

        for name, layer in self.layers.items():
            wanted = [i for i, answer in enumerate(answers) if not answer]
            if isinstance(layer, LocalIndex):
                wanted = [i for i in wanted if layer.holds(keys[i])]
            if wanted:
                read = partial(_read, layer, keys, into, wanted, came)
                for found in await _together([call("read", name, len(wanted), read)]):
                    for i, answer in zip(wanted, found, strict=True):
                        answers[i] = answers[i] or answer
                brought = [i for i in wanted if answers[i]]
                if brought and nearer:  # the slots are the caller's until this returns
                    some = [keys[i] for i in brought], [into[i] for i in brought]
                    whose = [tenants[i] for i in brought] if tenants else ()
                    await _together(_writes(nearer, *some, whose, call))
            nearer[name] = layer
        return answers

    async def write(
        self,
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        tenants: Sequence[bytes] = (),
        call: Caller = at_once,
    ) -> list[Written]:
        check_lengths(keys, chunks)
        answers = await _together(_writes(self.layers, keys, chunks, tenants, call))
        return list(map(_best, zip([False] * len(keys), *answers, strict=True)))

    async def remove(self, keys: Sequence[bytes], call: Caller = at_once) -> None:
        await _together(
            call("write", name, len(keys), partial(layer.remove, keys))
            for name, layer in self.layers.items()
        )

    async def close(self) -> None:
        await _together(layer.close() for layer in self.layers.values())

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces from all layers.

        Raises:
            OSError: a layer cannot do it.
        """
        removed = 0
        for name, layer in self.layers.items():
            if not isinstance(layer, Purges):
                raise OSError(f"{name} cannot remove a namespace")
            removed += await layer.purge(namespaces)
        return removed

    def spare(self, keys: Collection[bytes]) -> None:
        self._hint(lambda layer: layer.spare(keys))

    def expect(self, returns: Sequence[ToldReturn], share: float) -> None:
        self._hint(lambda layer: layer.expect(returns, share))

    def _hint(self, tell: Callable[[Spares], None]) -> None:
        """Tell each layer, whatever a plug-in's does: the end of a session must not fail here."""
        for layer in self._sparing:
            try:
                tell(layer)
            except Exception as error:
                _failures.warning("a layer takes no hint: %r", error)

    # ---- figures ----

    def observed(self) -> Sequence[tuple[str, Observable]]:
        """Return the layers that tell figures."""
        return self._observed

    def usage(self) -> Usage:
        """Return what all layers have together; each one's bytes are gauges."""
        usages = {name: layer.usage() for name, layer in self._observed}
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
        for _, layer in self._observed:
            total.update(layer.counters())
        return total

    def take_removals(self) -> list[Removal]:
        """Return the chunks that have left, and are in no other layer with an index."""
        left = [each for _, layer in self._observed for each in layer.take_removals()]
        return [each for each in left if not any(index.holds(each.key) for index in self._indexes)]

    async def describe(self, facts: Mapping[str, str]) -> None:
        await _together(layer.describe(facts) for _, layer in self._observed)

    async def described(self) -> Sequence[Described]:
        lists = await _together(layer.described() for _, layer in self._observed)
        return [each for described in lists for each in described]

    def check_fit(self, chunk_bytes: int) -> None:
        for name, layer in self._observed:
            try:
                layer.check_fit(chunk_bytes)
            except ConfigError as error:
                raise ConfigError(f"{name}.{error.field}", error.value, error.remedy) from error


class IndexedLayers(Layers, LocalIndex):
    """Layers that all have an index."""

    def _take(self, layers: Mapping[str, Backend]) -> None:
        super()._take(layers)
        self._held = [_held_by(index) for index in self._indexes]

    def add(self, name: str, layer: Backend, order: Sequence[str]) -> bool:
        return isinstance(layer, LocalIndex) and super().add(name, layer, order)

    def holds(self, key: bytes) -> bool:
        for layer in self._indexes:  # noqa: SIM110, a generator costs twice as much for each key
            if layer.holds(key):
                return True
        return False

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a layer holds it."""
        nearest, *farther = self._held
        answers = list(nearest(keys))
        for held in farther:
            left = [i for i, there in enumerate(answers) if not there]
            for i, there in zip(left, held([keys[i] for i in left]), strict=True):
                answers[i] = there
        return answers

    def forget(self, keys: Sequence[bytes]) -> None:
        for layer in self._indexes:
            layer.forget(keys)

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        changed: dict[bytes, bool] = {}  # each once
        for layer in self._indexes:
            changed.update(layer.take_changes(limit - len(changed)))
        gone = [key for key, is_there in changed.items() if not is_there]  # from one of them
        changed.update(zip(gone, self.held(gone), strict=True))
        return list(changed.items())

    @property
    def is_complete(self) -> bool:
        return all(layer.is_complete for layer in self._indexes)


def layered(layers: Mapping[str, Backend], *, late_have_index: bool = True) -> Layers:
    """Return stores as one; with an index if all of them have one, and those to be added later."""
    is_indexed = all(isinstance(layer, LocalIndex) for layer in layers.values())
    return IndexedLayers(layers) if is_indexed and late_have_index else Layers(layers)


def _held_by(index: LocalIndex) -> Callable[[Sequence[bytes]], Iterable[bool]]:
    return index.held if isinstance(index, HoldsMany) else partial(map, index.holds)


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


def _writes(
    layers: Mapping[str, Backend],
    keys: Sequence[bytes],
    chunks: Sequence[memoryview],
    tenants: Sequence[bytes],
    call: Caller,
) -> Iterator[Coroutine[Any, Any, Sequence[Written]]]:
    for name, layer in layers.items():
        work = partial(call_for, tenants, layer.write, keys, chunks)
        yield call("write", name, len(keys), work)


async def _read(
    layer: Backend,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    wanted: Sequence[int],
    arrived: Callable[[int], None],
) -> Sequence[bool | ReadResult]:
    some, slots = [keys[i] for i in wanted], [into[i] for i in wanted]
    if isinstance(layer, ReadsEach):
        return await layer.read_each(some, slots, lambda at: arrived(wanted[at]))
    answers = await layer.read(some, slots)
    for i, answer in zip(wanted, answers, strict=True):
        if answer:
            arrived(i)
    return answers
