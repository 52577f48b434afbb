"""A store whose faults a file plans: also in an I/O process, which a test cannot reach into.

Register it with :func:`installed`, and set the plan with :meth:`Planned.set`. Beside the faults of
:mod:`kvoffload.testing.faults` the plan knows ``stop`` and ``kill`` of the process, ``hung_open``,
``kill_open``, ``queue``: reads sleep one after the other, and ``stubborn``: a read ignores its
cancellation and writes to its memory at the end, which is when the plan is another, or its time is
over. ``slow_purge``, ``kill_purge`` and
``failed_purge`` strike a purge.
"""

import asyncio
import os
import signal
import time

import msgspec

from kvoffload import open_backend, registry
from kvoffload.backends.blocking_pool import undisturbed
from kvoffload.errors import ConfigError
from kvoffload.testing.faults import FaultyBackend, Plan


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    plan: str
    root: str = ""
    """Of a disk store; empty: chunks are in memory."""


class Process(msgspec.Struct):
    fault: str
    seconds: float = 0.0


class Plans(msgspec.Struct):
    store: list[Plan] = []
    process: Process | None = None
    refuse: str = ""


class PlannedStore(FaultyBackend):
    Options = Options

    def __init__(self, options, namespace):
        self._file = options.plan
        if refuse := self._plans().refuse:
            raise ConfigError("root", refuse, "must be better")
        if (plan := self._plans().process) and plan.fault == "hung_open":
            time.sleep(plan.seconds)
        if plan and plan.fault == "kill_open":
            os.kill(os.getpid(), signal.SIGKILL)
        kind, wanted = "memory", {"capacity": "64MiB"}
        if options.root:
            wanted = {"root": options.root, "capacity": "64MiB", "min_free": 0}
            # A read of the page cache is another system call.
            kind, wanted = "disk", {**wanted, "io": "direct"}
        super().__init__(open_backend(kind, wanted, namespace))
        self._turn = asyncio.Lock()

    def _plans(self):
        with open(self._file, "rb") as file:
            return msgspec.json.decode(file.read(), type=Plans)

    def _strike(self, verb, keys):
        self.plans = self._plans().store
        return super()._strike(verb, keys)

    async def read(self, keys, into):
        plan = self._plans().process
        if plan is not None and await self._process(plan, into):
            return [False] * len(keys)
        return await super().read(keys, into)

    async def write(self, keys, chunks):
        plan = self._plans().process
        if plan is not None and plan.fault == "stubborn_write":
            await self._outlast(plan)
            return [False] * len(keys)
        return await super().write(keys, chunks)

    async def purge(self, namespaces):
        plan = self._plans().process
        if plan is not None and plan.fault == "failed_purge":
            raise ConnectionError("nobody is there")
        if plan is not None and plan.fault == "slow_purge":
            await asyncio.sleep(plan.seconds)
        removed = await self.inner.purge(namespaces)
        if plan is not None and plan.fault == "kill_purge":
            os.kill(os.getpid(), signal.SIGKILL)
        return removed

    async def _process(self, plan, into):
        if plan.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif plan.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif plan.fault == "queue":
            async with self._turn:
                await asyncio.sleep(plan.seconds)
        elif plan.fault == "stubborn":
            await self._outlast(plan)
            into[0][:] = b"\xee" * len(into[0])
            return True
        return False

    async def _outlast(self, plan):
        """Wait for a thread, whatever is cancelled meanwhile."""
        end_s = time.monotonic() + plan.seconds

        def sleep():
            while self._plans().process == plan and time.monotonic() < end_s:
                time.sleep(0.01)

        thread = asyncio.get_running_loop().run_in_executor(None, sleep)
        await undisturbed(thread)


class ShyStore(PlannedStore):
    """One that cannot say at once what it has: a backend without any optional protocol."""

    purge = None

    def __init__(self, options, namespace):
        super().__init__(options, namespace)
        whole, self.inner = self.inner, OnlyVerbs()
        for verb in ("contains", "read", "write", "remove", "close"):
            setattr(self.inner, verb, getattr(whole, verb))
        for name in ("holds", "forget", "take_changes", "usage", "counters", "take_removals"):
            delattr(self, name)


class OnlyVerbs:
    pass


class Planned:
    """A registered planned store: its options, and its plan."""

    def __init__(self, folder):
        self._file = folder / "plan.json"
        self.set()

    @property
    def options(self):
        return {"plan": str(self._file)}

    def set(self, *store, process=None, refuse=""):
        """Plan faults; without arguments, all is well."""
        partial = self._file.with_suffix(".tmp")
        partial.write_bytes(msgspec.json.encode(Plans(list(store), process, refuse)))
        partial.replace(self._file)


def installed(folder, monkeypatch):
    """Register the store as ``planned`` here, and in the I/O processes started from here."""
    here = "tests.support.planned_store"
    entries = f"planned = {here}:PlannedStore\nshy = {here}:ShyStore\n"
    register(folder, monkeypatch, f"[kvoffload.backends]\n{entries}")
    return Planned(folder)


def register(folder, monkeypatch, entry_points):
    """Let this process, and those started from here, find these plug-ins."""
    info = folder / "site" / "of_tests-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder / "site"))
    registry._named.cache_clear()
