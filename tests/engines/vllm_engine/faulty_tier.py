"""Third parties' backends that misbehave by a plan in a file, for engines in other processes.

``faulty`` is a disk store, ``shy`` one that cannot say at once what it holds. The plan is JSON:
``{"tier": [plans of kvoffload.testing.faults], "copy": {"fault": "fail", "every": 3}}``;
``copy`` strikes the copies between the KV cache and host memory in vLLM's processes. ``trickle``
lets chunks come one after the other, those of a later load after those of an earlier one.
"""

import asyncio
import os
from typing import Literal

import msgspec
import numpy as np

from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.testing.faults import FaultyBackend, Plan
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.layout import Moves


class CopyPlan(msgspec.Struct):
    fault: Literal["fail", "raise", "repeat"]
    """``fail``: nothing is copied, and the fence says so. ``raise``: it cannot even begin.
    ``repeat``: a load copies its first chunk into the blocks of all, and the fence says nothing.
    Chunks exchanged with one another would be no fault: keys hold their positions."""
    every: int = 1


class Trickle(msgspec.Struct):
    seconds: float
    """Before each chunk."""
    chunks: int = 1 << 30
    """How many chunks of a load come; then the store hangs."""


class Plans(msgspec.Struct):
    tier: list[Plan] = []
    copy: CopyPlan | None = None
    trickle: Trickle | None = None


class PlanFile:
    """Read again whenever it changes."""

    def __init__(self, path):
        self._path, self._seen, self._plans = path, None, Plans()

    def now(self):
        changed = os.stat(self._path).st_mtime_ns
        if changed != self._seen:
            self._seen = changed
            with open(self._path, "rb") as file:
                self._plans = msgspec.json.decode(file.read(), type=Plans)
        return self._plans


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    root: str
    plan: str


class FaultyTier(FaultyBackend):
    Options = Options

    def __init__(self, options, namespace):
        super().__init__(self._below(options, namespace))
        self._file = PlanFile(options.plan)
        self._turn = asyncio.Lock()
        if hasattr(self, "read_each"):
            self._read_whole, self.read_each = self.read_each, self._read_each

    async def _read_each(self, keys, into, arrived):
        trickle = self._file.now().trickle
        if trickle is None:
            return await self._read_whole(keys, into, arrived)
        answers = [False] * len(keys)
        async with self._turn:
            for i in range(len(keys)):
                await asyncio.sleep(trickle.seconds if i < trickle.chunks else 3600)
                (answers[i],) = await self.inner.read(keys[i : i + 1], into[i : i + 1])
                if answers[i]:
                    arrived(i)
        return answers

    def _below(self, options, namespace):
        return DiskBackend(DiskBackend.Options(root=options.root, min_free=0), namespace)

    def _strike(self, verb, keys):
        self.plans = self._file.now().tier
        return super()._strike(verb, keys)

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class ShyTier(FaultyTier):
    def _below(self, options, namespace):
        return OnlyVerbs(super()._below(options, namespace))


class OnlyVerbs:
    """A backend without any optional protocol."""

    def __init__(self, inner):
        self.contains, self.read, self.write = inner.contains, inner.read, inner.write
        self.remove, self.close = inner.remove, inner.close


def strike_copies():
    """Follow the plan of ``FAULTY_COPIES``; vLLM calls it in each of its processes."""
    FaultyCopies.follow(PlanFile(os.environ["FAULTY_COPIES"]))


class FaultyCopies:
    """Makes the copies of this process fail by plan; what is below is the real copier."""

    real = CpuCopier.launch
    calls = 0
    error = RuntimeError("a copy that fails was planned here")
    copy_time_s = 0.0

    @classmethod
    def follow(cls, file):
        def launch(copier, moves, to_host, after, lent=None):
            plan = file.now().copy
            if plan is not None:
                cls.calls += 1
                if cls.calls % plan.every == 0:
                    if plan.fault == "raise":
                        raise cls.error
                    if plan.fault == "repeat":
                        return cls.real(
                            copier, moves if to_host else repeated(moves), to_host, after, lent
                        )
                    return cls()  # a fence, and nothing has been copied
            return cls.real(copier, moves, to_host, after, lent)

        CpuCopier.launch = launch

    def done(self):
        return True

    def wait(self):
        pass


def repeated(moves):
    """Return moves of the first chunk of each group into the blocks of all its chunks."""
    chunks = moves.chunks.copy()
    slots, groups = chunks[0], chunks[1]
    for group in np.unique(groups):
        slots[groups == group] = slots[groups == group][0]
    return Moves(chunks, moves.block_ids)
