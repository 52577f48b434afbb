"""A backend whose calls an I/O server carries out, so that suites of backends test both ends."""

import asyncio
import os
import time

from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerProcess
from kvoffload.io.protocol import Load, Store
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import opening

SLOT = 128 << 10
NUM_SLOTS = 64


class Answer:
    """The end of one job, as a future of the caller's loop."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self.future = self._loop.create_future()

    def arrived(self, numbers):
        pass

    def ended(self, ok, reason, settled, io_time_s):
        assert settled
        self._loop.call_soon_threadsafe(self.future.set_result, list(map(bool, ok)))

    def released(self):
        raise AssertionError("settled before")


class StoreBehindIO:
    """The five verbs; one job at a time has the slots."""

    def __init__(self, type, options, namespace):
        self._fd = create_shared_memory(NUM_SLOTS * SLOT)
        self._slab = Slab(NUM_SLOTS, SLOT, self._fd)
        wanted = opening([("t", type, options)], SLOT, namespace=namespace)
        self._client = IOClient(lambda: ServerProcess(self._fd), wanted, 30.0, 30.0)
        self._tier = self._client.tiers["t"]
        self._turn = asyncio.Lock()
        self._is_closed = False

    async def contains(self, keys):
        if self._is_closed:
            return [False] * len(keys)
        answers = [self._tier.holds(key) for key in keys]
        while None in answers:
            await asyncio.sleep(0.001)
            answers = [self._tier.holds(key) for key in keys]
        return answers

    async def read(self, keys, into):
        return await self._carry_out(Load, keys, into)

    async def write(self, keys, chunks):
        return await self._carry_out(Store, keys, chunks)

    async def _carry_out(self, kind, keys, memory):
        if len(keys) != len(memory):
            raise ValueError("one piece of memory for each key")
        async with self._turn:
            views = [self._slab.slot(i, each.nbytes) for i, each in enumerate(memory)]
            if kind is Store:
                for view, each in zip(views, memory, strict=True):
                    view[:] = each.cast("B")
            answer, sizes = Answer(), [each.nbytes for each in memory]
            self._client.begin(kind(0, "t", list(keys), list(range(len(keys))), sizes), answer)
            try:
                ok = await asyncio.shield(answer.future)
            except asyncio.CancelledError:
                await answer.future  # the slots are in use until then
                raise
            if kind is Load:
                for view, each, good in zip(views, memory, ok, strict=True):
                    if good:
                        each.cast("B")[:] = view
        return ok

    async def remove(self, keys):
        self._client.remove("t", keys)
        end_s = time.monotonic() + 5
        # Nothing tells when it is done.
        while any(await self.contains(keys)) and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def close(self):
        if not self._is_closed:
            self._is_closed = True
            self._client.close()
            os.close(self._fd)
