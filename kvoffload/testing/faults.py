"""A wrapper that injects faults into any backend, by a plan.

Wrap the backend of a test to see how the layers above treat a store that fails. A call raises,
hangs, is slow, answers wrongly, or returns damaged bytes. The inner backend stays whole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from kvoffload.backends.base import (
    Answers,
    Backend,
    ListedIndex,
    LocalIndex,
    Observable,
    ReadsEach,
)

T = TypeVar("T")
Verb = Literal["contains", "read", "write", "remove"]
Fault = Literal["raise", "hang", "delay", "flip", "lie", "miss", "short"]


class Plan(msgspec.Struct, frozen=True):
    """One fault, and the calls it affects."""

    fault: Fault
    """The effect.

    ``raise``: RuntimeError instead of an answer. ``hang``: no answer until :meth:`release` or a
    cancellation. ``delay``: the answer comes ``seconds`` later. ``flip``: a read succeeds with one
    bit turned. ``lie``: ``contains`` answers True, a write answers True without storing.
    ``miss``: False for every key. ``short``: only the first half of a batch is done.
    """
    verbs: frozenset[Verb] = frozenset({"contains", "read", "write", "remove"})
    """The calls it affects."""
    every: int = 1
    """Affect each n-th of these calls; 1: all."""
    seconds: float = 0.0
    """For ``delay``."""
    keys: frozenset[bytes] | None = None
    """Affect only calls with one of these keys; None: all."""


class FaultyBackend:
    """A backend around an inner one, whose optional protocols it passes through."""

    def __init__(self, inner: Backend, *plans: Plan) -> None:
        self.inner = inner
        self.plans = list(plans)
        """May be changed at any time; ``[]`` ends all faults."""
        self.struck = 0
        """Number of calls with a fault."""
        self._calls: dict[tuple[int, str], int] = {}
        self._released = asyncio.Event()
        # From Python 3.12 on, isinstance() of a protocol finds attributes but no __getattr__.
        protocols: tuple[Any, ...] = (LocalIndex, ListedIndex, Observable)
        for protocol in protocols:
            if isinstance(inner, protocol):
                for name in vars(protocol):
                    if not name.startswith("_") and name not in vars(FaultyBackend):
                        setattr(self, name, getattr(inner, name))
        if isinstance(inner, ReadsEach):
            self.read_each = partial(self._read, inner.read_each)

    def release(self) -> None:
        """End hanging calls; they answer False."""
        self._released.set()

    @property
    def is_complete(self) -> bool:
        """Of the inner backend, which must be a :class:`ListedIndex`; changes while it is open."""
        return bool(self.inner.is_complete)  # type: ignore[attr-defined]

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        plan = self._strike("contains", keys)
        if plan is None:
            return await self.inner.contains(keys)
        if plan.fault == "lie":
            return [True] * len(keys)
        return await self._answered(plan, len(keys), lambda: self.inner.contains(keys))

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Answers:
        return await self._read(self.inner.read, keys, into)

    async def _read(
        self,
        inner: Callable[..., Awaitable[Answers]],
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        *arrived: Callable[[int], None],
    ) -> Answers:
        plan = self._strike("read", keys)
        if plan is None:
            return await inner(keys, into, *arrived)
        if plan.fault == "short":
            half = len(keys) // 2
            done = await inner(keys[:half], into[:half], *arrived)
            return [*done, *[False] * (len(keys) - half)]
        if plan.fault == "flip":
            # Reports no chunk before the fault is done, because a reported chunk is copied at once.
            answers = await self.inner.read(keys, into)
            for target, good in zip(into, answers, strict=True):
                if good:
                    target.cast("B")[target.nbytes // 2] ^= 1
            return answers
        return await self._answered(plan, len(keys), lambda: inner(keys, into, *arrived))

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        plan = self._strike("write", keys)
        if plan is None:
            return await self.inner.write(keys, chunks)
        if plan.fault == "lie":
            return [True] * len(keys)
        if plan.fault == "short":
            half = len(keys) // 2
            done = await self.inner.write(keys[:half], chunks[:half])
            return done + [False] * (len(keys) - half)
        return await self._answered(plan, len(keys), lambda: self.inner.write(keys, chunks))

    async def remove(self, keys: Sequence[bytes]) -> None:
        plan = self._strike("remove", keys)
        if plan is None:
            await self.inner.remove(keys)
        elif plan.fault in ("raise", "hang", "delay"):
            await self._strike_down(plan)
            if plan.fault == "delay":
                await self.inner.remove(keys)

    async def close(self) -> None:
        self.release()
        await self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _strike(self, verb: Verb, keys: Sequence[bytes]) -> Plan | None:
        for number, plan in enumerate(self.plans):
            if verb not in plan.verbs or (plan.keys is not None and not plan.keys & set(keys)):
                continue
            calls = self._calls[number, verb] = self._calls.get((number, verb), 0) + 1
            if calls % plan.every == 0:
                self.struck += 1
                return plan
        return None

    async def _answered(
        self, plan: Plan, count: int, inner: Callable[[], Awaitable[T]]
    ) -> T | list[bool]:
        await self._strike_down(plan)
        return await inner() if plan.fault == "delay" else [False] * count

    async def _strike_down(self, plan: Plan) -> None:
        if plan.fault == "raise":
            raise RuntimeError("a fault was planned here")
        if plan.fault == "hang":
            await self._released.wait()
        if plan.fault == "delay":
            await asyncio.sleep(plan.seconds)
