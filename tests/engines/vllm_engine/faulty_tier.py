"""Third parties' backends that misbehave by a plan in a file, for engines in other processes.

``faulty`` is a disk store, ``shy`` one that cannot say at once what it holds. The plan is JSON:
``{"tier": [plans of kvoffload.testing.faults], "copy": {"fault": "fail" or "raise", "every": 3}}``;
``copy`` strikes the copies between the KV cache and host memory in vLLM's processes.
"""

import os
from typing import Literal

import msgspec

from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.testing.faults import FaultyBackend, Plan
from kvoffload.transfer.cpu.copier import CpuCopier


class CopyPlan(msgspec.Struct):
    fault: Literal["fail", "raise"]
    """``fail``: nothing is copied, and the fence says so. ``raise``: it cannot even begin."""
    every: int = 1


class Plans(msgspec.Struct):
    tier: list[Plan] = []
    copy: CopyPlan | None = None


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
        def launch(copier, moves, to_host, after):
            plan = file.now().copy
            if plan is not None:
                cls.calls += 1
                if cls.calls % plan.every == 0:
                    if plan.fault == "raise":
                        raise cls.error
                    return cls()  # a fence, and nothing has been copied
            return cls.real(copier, moves, to_host, after)

        CpuCopier.launch = launch

    def done(self):
        return True

    def wait(self, timeout_s=None):
        return True
