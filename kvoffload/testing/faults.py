"""A wrapper that injects faults into any backend, by a plan.

Wrap the backend of a test to see how the layers above treat a store that fails. A call raises,
hangs, is slow, answers wrongly, or returns damaged bytes. The inner backend stays whole.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from kvoffload.backends.admin import Purges
from kvoffload.backends.base import (
    Answers,
    Backend,
    LocalIndex,
    Observable,
    ReadsEach,
    Spares,
)

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
        protocols: tuple[Any, ...] = (LocalIndex, Observable, Spares, Purges)
        for protocol in protocols:
            if isinstance(inner, protocol):
                for name in vars(protocol):
                    if not name.startswith("_") and not hasattr(type(self), name):
                        setattr(self, name, getattr(inner, name))
        if isinstance(inner, ReadsEach):
            self.read_each = partial(self._call, "read", inner.read_each)

    def release(self) -> None:
        """End hanging calls; they answer False."""
        self._released.set()

    @property
    def is_complete(self) -> bool:
        """Of the inner backend, which must be a :class:`LocalIndex`; changes while it is open."""
        return bool(self.inner.is_complete)  # type: ignore[attr-defined]

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        answers: list[bool] = await self._call("contains", self.inner.contains, keys)
        return answers

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Answers:
        answers: Answers = await self._call("read", self.inner.read, keys, into)
        return answers

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        answers: list[bool] = await self._call("write", self.inner.write, keys, chunks)
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self._call("remove", self.inner.remove, keys)

    async def _call(
        self, verb: Verb, inner: Callable[..., Awaitable[Any]], keys: Sequence[bytes], *rest: Any
    ) -> Any:
        """Call the inner backend, with a fault where one is due; ``rest`` begins with memory."""
        plan = self._strike(verb, keys)
        if plan is None:
            return await inner(keys, *rest)
        if plan.fault == "lie" and verb in ("contains", "write"):
            return [True] * len(keys)
        if plan.fault == "short" and verb in ("read", "write"):
            half = len(keys) // 2
            done = await inner(keys[:half], rest[0][:half], *rest[1:])
            return [*done, *[False] * (len(keys) - half)]
        if plan.fault == "flip" and verb == "read":
            # Reports no chunk before the fault is done, because a reported chunk is copied at once.
            answers = await self.inner.read(keys, rest[0])
            for target, good in zip(rest[0], answers, strict=True):
                if good:
                    target.cast("B")[target.nbytes // 2] ^= 1
            return answers
        if plan.fault == "raise":
            raise RuntimeError("a fault was planned here")
        if plan.fault == "hang":
            await self._released.wait()
        if plan.fault == "delay":
            await asyncio.sleep(plan.seconds)
            return await inner(keys, *rest)
        return [False] * len(keys)

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
