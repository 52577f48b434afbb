"""The handlers: GPU ↔ host slots, host slots → tier, and loads that begin in a tier.

Each takes jobs on the engine's thread and answers each exactly once. Only those with a backend leg
use the I/O loop; a job crosses to it once.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.backends.base import Backend
from kvoffload.core.transfers import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    StagedLoadStoreSpec,
    TransferResult,
    TransferSpec,
    get_offload_group_idx,
)
from kvoffload.transfer.base import Copier, Fence
from kvoffload.transfer.ioloop import IOLoop
from kvoffload.transfer.layout import ChunkLayout, ChunkMove
from kvoffload.transfer.prober import same_length
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 0.02
"""How long a cancelled backend call may take to let go of its memory before it is unsettled."""
KEYS_PER_CALL = 8
"""Chunks in one backend call of a load: as each call returns, its chunks go on to the GPU."""


@dataclass
class _Job:
    """A transfer on its way; its answer is ready when ``io_done`` and all fences are done."""

    job_id: int
    ok: list[bool]
    num_bytes: int
    started_s: float
    deadline_s: float
    io_done: threading.Event | None = None
    """Set when the backend leg has ended; None if there is none."""
    fences: list[tuple[Fence, list[int]]] = field(default_factory=list)
    """Copies launched, with the positions of the chunks each one moves."""
    settled: bool = True
    reason: str = ""

    def done(self) -> bool:
        """Whether the answer is ready."""
        if self.io_done is not None and not self.io_done.is_set():
            return False
        return all(fence.done() for fence, _ in self.fences)

    def wait(self) -> None:
        """Block until the answer is ready."""
        if self.io_done is not None:
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
        elapsed_s = time.monotonic() - self.started_s
        return TransferResult(
            self.job_id, tuple(self.ok), self.settled, self.num_bytes, elapsed_s, self.reason
        )


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
        gpu, host = spec if self._to_host else spec[::-1]
        assert isinstance(gpu, GPULoadStoreSpec)
        assert isinstance(host, CPULoadStoreSpec)
        moves = self._layout.moves(gpu, host.host_slots.tolist())
        now = time.monotonic()
        job = _Job(job_id, [True] * len(moves), self._layout.bytes_of(moves), now, now)
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
        assert job.io_done is not None
        left: set[asyncio.Task[None]] = set()
        try:
            budget_s = max(0.0, job.deadline_s - time.monotonic())
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
        host, target = spec
        assert isinstance(host, CPULoadStoreSpec)
        assert isinstance(target, BackendLoadStoreSpec)
        backend = self._backends[target.tier]
        views = self._views(target.keys, host.host_slots.tolist())
        now = time.monotonic()
        job = _Job(
            job_id,
            [False] * len(views),
            sum(len(view) for view in views),
            now,
            now + self._timeout_s,
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
    """Tier → host slot → GPU as a pipeline: what is read and verified is copied at once."""

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
        source, gpu = spec
        assert isinstance(source, StagedLoadStoreSpec)
        assert isinstance(gpu, GPULoadStoreSpec)
        moves = self._layout.moves(gpu, source.host_slots.tolist())
        now = time.monotonic()
        fetched = {i for fetch in source.fetches for i in fetch.positions}
        here = [i for i in range(len(moves)) if i not in fetched]
        job = _Job(
            job_id,
            [i not in fetched for i in range(len(moves))],
            self._layout.bytes_of(moves),
            now,
            now + self._timeout_s,
            threading.Event(),
        )
        # Recorded now, on the engine's stream: compute may still use the destination blocks.
        after = self._copier.record_fence()
        if here:
            launched = self._copier.launch([moves[i] for i in here], to_host=False, after=after)
            job.fences.append((launched, here))
        self._jobs[job_id] = job

        async def run() -> None:
            calls = {
                asyncio.ensure_future(
                    self._fetch(
                        job,
                        moves,
                        fetch.tier,
                        fetch.positions[at : at + KEYS_PER_CALL],
                        fetch.keys[at : at + KEYS_PER_CALL],
                        after,
                    )
                )
                for fetch in source.fetches
                for at in range(0, len(fetch.keys), KEYS_PER_CALL)
            }
            await self._bounded(job, calls)

        self._io.start(run)
        return True

    async def _fetch(
        self,
        job: _Job,
        moves: Sequence[ChunkMove],
        tier: str,
        positions: Sequence[int],
        keys: Sequence[bytes],
        after: Fence,
    ) -> None:
        """Read some chunks into their slots and launch the copies of those that arrived."""
        assert job.io_done is not None
        views = self._views(keys, [moves[i].host_slot for i in positions])
        try:
            ok = same_length(await self._backends[tier].read(keys, views), keys)
        except Exception as error:
            log.warning("%s: read of %d chunks failed: %s", tier, len(keys), error)
            job.reason = "error"
            return
        if job.io_done.is_set():
            return  # answered already: nothing of a late read may reach the GPU
        good = [i for i, fine in zip(positions, ok, strict=True) if fine]
        if len(good) < len(ok):
            job.reason = "missing"
        if good:
            try:
                fence = self._copier.launch([moves[i] for i in good], to_host=False, after=after)
            except Exception as error:  # the job was accepted long ago: this is its answer
                log.warning("copies of %d chunks were refused: %s", len(good), error)
                job.reason = "refused_transfer"
                return
            job.fences.append((fence, good))
            for i in good:
                job.ok[i] = True
