"""The handlers: GPU ↔ host slots, host slots → tier, and loads that begin in a tier.

Each takes jobs on the engine's thread and answers each exactly once. Only those with a backend leg
use the I/O loop; a job crosses to it once. The worker routes by the types of a transfer's two ends,
so that a handler gets those it is registered for and no others.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvoffload.backends.base import Backend, ReadsEach
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    OffloadingHandler,
    StagedLoadStoreSpec,
    TransferResult,
    TransferSpec,
    get_offload_group_idx,
)
from kvoffload.transfer.arrivals import Arrivals
from kvoffload.transfer.base import Copier, CopyFence, Fence
from kvoffload.transfer.io_loop import IOLoop
from kvoffload.transfer.layout import ChunkLayout, ChunkMove
from kvoffload.transfer.presence import same_length
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 0.02
"""How long a cancelled backend call may take to let go of its memory before it is unsettled."""
KEYS_PER_CALL = 8
"""Chunks in one backend call of a load from a store that does not tell of each as it arrives: as
the call returns, they go on to the GPU."""
_NO_IO = threading.Event()
"""Of jobs without a backend leg."""
_NO_IO.set()


@dataclass
class _Job:
    """A transfer on its way; its answer is ready when ``io_done`` and all fences are done."""

    job_id: int
    ok: list[bool]
    num_bytes: int
    deadline_s: float = 0.0
    io_done: threading.Event = _NO_IO
    """Set when the backend leg has ended."""
    io_time_s: float = 0.0
    """Seconds that the backend leg took."""
    fences: list[tuple[CopyFence, list[int]]] = field(default_factory=list)
    """Copies launched, with the positions of the chunks each one moves."""
    settled: bool = True
    reason: str = ""

    def done(self) -> bool:
        """Whether the answer is ready."""
        return self.io_done.is_set() and all(fence.done() for fence, _ in self.fences)

    def wait(self) -> None:
        """Block until the answer is ready."""
        self.io_done.wait()
        for fence, _ in self.fences:
            fence.wait()

    def result(self) -> TransferResult:
        """Compose the one answer."""
        for fence, positions in self.fences:
            if fence.error is not None:
                log.warning("copy of job %d failed: %s", self.job_id, fence.error)
                self.reason = self.reason or "copy_error"
                for i in positions:
                    self.ok[i] = False
        return TransferResult(
            self.job_id, tuple(self.ok), self.settled, self.num_bytes, self._time_s(), self.reason
        )

    def _time_s(self) -> float:
        """Seconds of its own work: copies run beside the reads, but for those of the last one."""
        copies_s = [fence.copy_time_s for fence, _ in self.fences] or [0.0]
        return max(sum(copies_s), self.io_time_s + copies_s[-1])


class _JobHandler(OffloadingHandler):
    """Keeps jobs from submission to answer."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._settled: deque[int] = deque()

    def get_finished(self) -> list[TransferResult]:
        """See :meth:`OffloadingHandler.get_finished`."""
        done = [job for job in self._jobs.values() if job.done()]
        return [self._jobs.pop(job.job_id).result() for job in done]

    def wait(self, job_ids: Collection[int]) -> None:
        """See :meth:`OffloadingHandler.wait`."""
        for job_id in job_ids:
            if job := self._jobs.get(job_id):
                job.wait()

    def get_settled(self) -> list[int]:
        """See :meth:`OffloadingHandler.get_settled`."""
        return [self._settled.popleft() for _ in range(len(self._settled))]


class CopyHandler(_JobHandler):
    """GPU → CPU and CPU → GPU: one per direction, no I/O loop involved."""

    def __init__(self, copier: Copier, layout: ChunkLayout, to_host: bool) -> None:
        super().__init__()
        self._copier = copier
        self._layout = layout
        self._to_host = to_host

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Launch the copies behind a fence on the engine's stream."""
        ends = spec if self._to_host else spec[::-1]
        gpu, host = cast("tuple[GPULoadStoreSpec, CPULoadStoreSpec]", ends)
        moves = self._layout.moves(gpu, host.host_slots.tolist())
        job = _Job(job_id, [True] * len(moves), self._layout.bytes_of(gpu))
        # As of now: what compute has queued so far may still write, or read, these blocks.
        fence = self._copier.launch(moves, self._to_host, after=self._copier.record_fence())
        job.fences.append((fence, list(range(len(moves)))))
        self._jobs[job_id] = job
        return True


class _TierHandler(_JobHandler):
    """What jobs with a backend leg share: bounded calls on the I/O loop."""

    def __init__(
        self, io: IOLoop, backends: Mapping[str, Backend], slab: Slab, layout: ChunkLayout
    ) -> None:
        super().__init__()
        self._io = io
        self._backends = backends
        self._slab = slab
        self._layout = layout

    def _views(self, keys: Sequence[bytes], host_slots: Sequence[int]) -> list[memoryview]:
        sizes = self._layout.payload_bytes
        return [
            self._slab.slot(slot, sizes[get_offload_group_idx(key)])  # type: ignore[arg-type]
            for key, slot in zip(keys, host_slots, strict=True)
        ]

    async def _bounded(self, job: _Job, calls: "set[asyncio.Task[None]]") -> None:
        """Let backend calls run until the job's deadline; then cancel them and answer."""
        left: set[asyncio.Task[None]] = set()
        begun_s = time.monotonic()
        try:
            budget_s = max(0.0, job.deadline_s - begun_s)
            _, left = await asyncio.wait(calls, timeout=budget_s)
            if left:
                job.reason = "deadline"
                for call in left:
                    call.cancel()
                _, left = await asyncio.wait(left, timeout=CANCEL_GRACE_S)
        except asyncio.CancelledError:
            # Shutdown: answered as not done, and the memory counts as in use.
            job.reason, left = "shutdown", {call for call in calls if not call.done()}
            for call in left:
                call.cancel()
        job.settled = not left
        job.io_time_s = time.monotonic() - begun_s
        job.io_done.set()
        if left:
            # Whoever ignores cancellation (a hung disk) still touches its slots: say when it ends.
            await asyncio.wait(left)
            self._settled.append(job.job_id)


class PersistHandler(_TierHandler):
    """CPU → tier: write-through of host slots."""

    def __init__(
        self,
        io: IOLoop,
        backends: Mapping[str, Backend],
        slab: Slab,
        layout: ChunkLayout,
        timeout_s: float,
    ) -> None:
        super().__init__(io, backends, slab, layout)
        self._timeout_s = timeout_s

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin writing the slots under the keys of the destination."""
        host, target = cast("tuple[CPULoadStoreSpec, BackendLoadStoreSpec]", spec)
        backend = self._backends[target.tier]
        views = self._views(target.keys, host.host_slots.tolist())
        job = _Job(
            job_id,
            [False] * len(views),
            sum(len(view) for view in views),
            time.monotonic() + self._timeout_s,
            threading.Event(),
        )
        self._jobs[job_id] = job

        async def write() -> None:
            try:
                job.ok[:] = same_length(await backend.write(target.keys, views), target.keys)
                job.reason = "" if all(job.ok) else "refused"
            except Exception as error:
                log.warning("%s: write of %d chunks failed: %s", target.tier, len(views), error)
                job.reason = "error"

        async def run() -> None:
            await self._bounded(job, {asyncio.ensure_future(write())})

        self._io.start(run)
        return True


class StagedLoadHandler(_TierHandler):
    """Tier → host slot → GPU as a pipeline: each chunk is copied when it is read and verified."""

    def __init__(
        self,
        io: IOLoop,
        backends: Mapping[str, Backend],
        slab: Slab,
        layout: ChunkLayout,
        copier: Copier,
        timeout_s: float,
    ) -> None:
        super().__init__(io, backends, slab, layout)
        self._copier = copier
        self._timeout_s = timeout_s

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin reading what is missing and copying what is here."""
        source, gpu = cast("tuple[StagedLoadStoreSpec, GPULoadStoreSpec]", spec)
        moves = self._layout.moves(gpu, source.host_slots.tolist())
        # All of it: a part that is wrong, or parts at odds, would show only after some were copied.
        self._copier.check(moves, to_host=False)
        fetched = {i for fetch in source.fetches for i in fetch.positions}
        here = [i for i in range(len(moves)) if i not in fetched]
        job = _Job(
            job_id,
            [i not in fetched for i in range(len(moves))],
            self._layout.bytes_of(gpu),
            time.monotonic() + self._timeout_s,
            threading.Event(),
        )
        # Recorded now, on the engine's stream: compute may still use the destination blocks.
        after = self._copier.record_fence()
        if here:
            launched = self._copier.launch([moves[i] for i in here], to_host=False, after=after)
            job.fences.append((launched, here))
        self._jobs[job_id] = job

        async def run() -> None:
            await self._bounded(job, self._calls(_Load(job, moves, after), source.fetches))

        self._io.start(run)
        return True

    def _calls(self, load: "_Load", fetches: Sequence[Fetch]) -> "set[asyncio.Task[None]]":
        """Begin a task for each backend call; each waits for those that use its slots before it."""
        calls = []
        last: dict[int, _Call] = {}
        for fetch in fetches:
            backend = self._backends[fetch.tier]
            limit = len(fetch.keys) if isinstance(backend, ReadsEach) else KEYS_PER_CALL
            for start, end in portions([load.moves[i].host_slot for i in fetch.positions], limit):
                call = _Call(fetch.tier, fetch.positions[start:end], fetch.keys[start:end])
                slots = [load.moves[i].host_slot for i in call.positions]
                before = [last[slot] for slot in slots if slot in last]
                last.update(dict.fromkeys(slots, call))
                call.task = asyncio.ensure_future(self._fetch(load, call, before))
                calls.append(call.task)
        return set(calls)

    async def _fetch(self, load: "_Load", call: "_Call", before: "Sequence[_Call]") -> None:
        """Read some chunks into their slots; launch the copy of each as it arrives."""
        job, keys = load.job, call.keys
        for other in dict.fromkeys(before):
            # What it brought must have left the slots before something else is read into them.
            await other.left()
        views = self._views(keys, [load.moves[i].host_slot for i in call.positions])
        backend = self._backends[call.tier]
        arrivals = Arrivals(lambda new: self._copy(load, call, new))
        try:
            if isinstance(backend, ReadsEach):
                answers = await backend.read_each(keys, views, arrivals.add)
            else:
                answers = await backend.read(keys, views)
            ok = same_length(answers, keys)
        except Exception as error:
            log.warning("%s: read of %d chunks failed: %s", call.tier, len(keys), error)
            job.reason = "error"
            return
        if not all(ok) and not job.io_done.is_set():
            job.reason = "missing"
        self._copy(load, call, [n for n, fine in enumerate(ok) if fine])

    def _copy(self, load: "_Load", call: "_Call", arrived: Sequence[int]) -> None:
        """Launch the copies of those of a call's chunks for which that was not done before."""
        job = load.job
        if job.io_done.is_set():
            return  # answered already: nothing of a late read may reach the GPU
        good = [call.positions[n] for n in arrived if n not in call.copied]
        call.copied.update(arrived)
        if not good:
            return
        try:
            moves = [load.moves[i] for i in good]
            fence = self._copier.launch(moves, to_host=False, after=load.after)
        except Exception as error:  # the job was accepted long ago: this is its answer
            log.warning("copies of %d chunks were refused: %s", len(good), error)
            job.reason = "refused_transfer"
            return
        job.fences.append((fence, good))
        call.fences.append(fence)
        for i in good:
            job.ok[i] = True


@dataclass(frozen=True)
class _Load:
    """What all calls of a load share."""

    job: _Job
    moves: Sequence[ChunkMove]
    after: Fence


@dataclass(eq=False)
class _Call:
    """One backend call of a load, and the copies of what it brought."""

    tier: str
    positions: Sequence[int]
    keys: Sequence[bytes]
    task: "asyncio.Task[None] | None" = None
    copied: set[int] = field(default_factory=set)
    fences: list[Fence] = field(default_factory=list)

    async def left(self) -> None:
        """Wait until nothing reads or writes the call's slots any more."""
        assert self.task is not None
        # Not awaited itself, or being cancelled here would have to wait for a hung read there.
        await asyncio.wait([self.task])
        for fence in self.fences:
            if not fence.done():
                await asyncio.get_running_loop().run_in_executor(None, fence.wait)


def portions(slots: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut a load into calls: (start, end) of each; none is longer than ``limit`` or repeats a slot.

    Where chunks take turns in the slots, a call has a half of them: while it is read, what the call
    before brought is copied out of the others.
    """
    distinct = len(set(slots))
    if distinct < len(slots):
        limit = min(limit, max(1, distinct // 2))
    taken: set[int] = set()
    start = 0
    for i, slot in enumerate(slots):
        if len(taken) == limit or slot in taken:
            yield start, i
            start, taken = i, set()
        taken.add(slot)
    if taken:
        yield start, len(slots)
