"""The transfer engine: one job in, one answer out, for copies and for reads and writes of tiers.

The engine's thread submits and polls. A job that reads or writes a tier crosses to the I/O loop
once. A load from a tier is a pipeline: a chunk is copied to the GPU when it is read and verified.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvoffload.backends.base import Backend, ReadsEach, reason_of
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    StagedLoadStoreSpec,
    TransferResult,
    TransferSpec,
)
from kvoffload.transfer.base import Copier, CopyFence
from kvoffload.transfer.io_loop import IOLoop, same_length
from kvoffload.transfer.layout import ChunkLayout, Moves, check_moves
from kvoffload.transfer.read_calls import ArrivalBatches, ReadCall, read_calls
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 0.02
"""How long a cancelled backend call may take to release its memory before it is unsettled."""
ROUTES: tuple[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], ...] = (
    (GPULoadStoreSpec, CPULoadStoreSpec),
    (CPULoadStoreSpec, GPULoadStoreSpec),
    (CPULoadStoreSpec, BackendLoadStoreSpec),
    (StagedLoadStoreSpec, GPULoadStoreSpec),
)
"""The source and destination types that the engine serves."""
TierCall = Callable[[], Coroutine[Any, Any, None]]

_NO_IO = threading.Event()
"""The ``io_done`` of jobs that use no tier."""
_NO_IO.set()


@dataclass(eq=False)
class EngineJob:
    """A transfer in flight; its answer is ready when ``io_done`` is set and all fences are done."""

    job_id: int
    ok: list[bool]
    num_bytes: int = 0
    reason: str = ""
    deadline_s: float = 0.0
    io_done: threading.Event = _NO_IO
    """Set when the tier calls have ended."""
    io_time_s: float = 0.0
    """Seconds that the tier calls took."""
    fences: list[tuple[CopyFence, Sequence[int]]] = field(default_factory=list)
    """Launched copies, each with the positions of its chunks."""
    settled: bool = True

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
        """Seconds of the job's own work. All copies but the last run in parallel to the reads."""
        copies_s = [fence.copy_time_s for fence, _ in self.fences] or [0.0]
        return max(sum(copies_s), self.io_time_s + copies_s[-1])


class TransferEngine(OffloadingHandler):
    """Carries out transfers and answers each exactly once; used on the engine's thread only.

    Args:
        io: the loop that all backends run on.
        backends: the open stores by tier name; looked up for each job.
        slab: host memory.
        layout: of chunks in slots.
        copier: copies between GPU blocks and slots.
        load_timeout_s: the deadline of a job that reads tiers.
        store_timeout_s: the deadline of a job that writes a tier.
    """

    def __init__(
        self,
        io: IOLoop,
        backends: Mapping[str, Backend],
        slab: Slab,
        layout: ChunkLayout,
        copier: Copier,
        load_timeout_s: float,
        store_timeout_s: float,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """Chunks that failed, by reason."""
        self._io = io
        self._backends = backends
        self._slab = slab
        self._layout = layout
        self._copier = copier
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self._jobs: dict[int, EngineJob] = {}
        self._settled: deque[int] = deque()

    def submit(self, job_id: int, spec: TransferSpec, num_chunks: int) -> None:
        """Begin a transfer of ``num_chunks`` chunks.

        A transfer that cannot begin is answered too: as failed, with a log line. Nothing raises.
        """
        try:
            if self.transfer_async(job_id, spec):
                return
            log.error("no transfer from %s to %s", type(spec[0]).__name__, type(spec[1]).__name__)
        except Exception:
            log.exception("transfer %d from %s to %s could not begin", job_id, *spec)
        self._jobs[job_id] = EngineJob(job_id, [False] * num_chunks, reason="refused_transfer")

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        match spec:
            case (GPULoadStoreSpec() as gpu, CPULoadStoreSpec() as host):
                self._copy(job_id, gpu, host, to_host=True)
            case (StagedLoadStoreSpec() as host, GPULoadStoreSpec() as gpu):
                self._load(job_id, host, gpu)
            case (CPULoadStoreSpec() as host, GPULoadStoreSpec() as gpu):
                self._copy(job_id, gpu, host, to_host=False)
            case (CPULoadStoreSpec() as host, BackendLoadStoreSpec() as target):
                self._write_through(job_id, host, target)
            case _:
                return False
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job for job in self._jobs.values() if job.done()]
        results = [self._jobs.pop(job.job_id).result() for job in done]
        for result in results:
            if result.reason:
                self.counters[f"failed_{result.reason}"] += result.ok.count(False)
        return results

    def get_settled(self) -> list[int]:
        return [self._settled.popleft() for _ in range(len(self._settled))]

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            if job := self._jobs.get(job_id):
                job.wait()

    # ---- the three kinds of jobs ----

    def _copy(
        self, job_id: int, gpu: GPULoadStoreSpec, host: CPULoadStoreSpec, to_host: bool
    ) -> None:
        moves = self._moves(gpu, host, to_host)
        job = EngineJob(job_id, [True] * len(moves), self._layout.bytes_of(gpu))
        # The forward pass may still use these blocks: the copies wait for this fence.
        after = self._copier.record_fence()
        fence = self._copier.launch(moves, to_host, after)
        job.fences.append((fence, range(len(moves))))
        self._jobs[job_id] = job

    def _load(self, job_id: int, host: StagedLoadStoreSpec, gpu: GPULoadStoreSpec) -> None:
        moves = self._moves(gpu, host, to_host=False)
        fetched = {i for fetch in host.fetches for i in fetch.positions}
        ok = [i not in fetched for i in range(len(moves))]
        calls = list(read_calls(host.fetches, moves, self._backends))
        job = EngineJob(job_id, ok, self._layout.bytes_of(gpu))
        after = self._copier.record_fence()

        def copy(positions: list[int]) -> CopyFence:
            return self._copier.launch(moves.take(positions), to_host=False, after=after)

        if here := [i for i, is_here in enumerate(ok) if is_here]:
            job.fences.append((copy(here), here))
        if calls:
            reads = [partial(self._read, job, call, copy) for call in calls]
            self._start(job, self._load_timeout_s, reads)
        self._jobs[job_id] = job

    def _write_through(
        self, job_id: int, host: CPULoadStoreSpec, target: BackendLoadStoreSpec
    ) -> None:
        backend = self._backends[target.tier]
        views = self._layout.views(self._slab, target.keys, host.host_slots.tolist())
        job = EngineJob(job_id, [False] * len(views), sum(len(view) for view in views))

        async def write() -> None:
            try:
                job.ok[:] = same_length(await backend.write(target.keys, views), target.keys)
                job.reason = "" if all(job.ok) else "refused"
            except Exception as error:
                log.warning("%s: write of %d chunks failed: %s", target.tier, len(views), error)
                job.reason = "error"

        self._start(job, self._store_timeout_s, [write])
        self._jobs[job_id] = job

    def _moves(self, gpu: GPULoadStoreSpec, host: CPULoadStoreSpec, to_host: bool) -> Moves:
        """Cut the blocks into chunks and check all of them before anything is copied or read."""
        moves = self._layout.moves(gpu, host.host_slots)
        check_moves(moves, to_host, self._layout, self._slab)
        return moves

    # ---- on the I/O loop ----

    def _start(self, job: EngineJob, timeout_s: float, calls: Sequence[TierCall]) -> None:
        """Run tier calls on the I/O loop until the deadline."""
        job.deadline_s = time.monotonic() + timeout_s
        job.io_done = threading.Event()
        self._io.start(lambda: self._bounded(job, calls))

    async def _bounded(self, job: EngineJob, calls: Sequence[TierCall]) -> None:
        """Let tier calls run until the job's deadline; then cancel them and answer."""
        tasks = {asyncio.create_task(call()) for call in calls}
        left: set[asyncio.Task[None]] = set()
        begun_s = time.monotonic()
        try:
            budget_s = max(0.0, job.deadline_s - begun_s)
            _, left = await asyncio.wait(tasks, timeout=budget_s)
            if left:
                job.reason = "deadline"
                for task in left:
                    task.cancel()
                _, left = await asyncio.wait(left, timeout=CANCEL_GRACE_S)
        except asyncio.CancelledError:
            # Shutdown: the chunks are answered as failed, and the slots as still in use.
            job.reason, left = "shutdown", {task for task in tasks if not task.done()}
            for task in left:
                task.cancel()
        job.settled = not left
        job.io_time_s = time.monotonic() - begun_s
        job.io_done.set()
        if left:
            # A call that ignores cancellation (a hung disk) uses its slots until it ends.
            await asyncio.wait(left)
            self._settled.append(job.job_id)

    async def _read(
        self, job: EngineJob, call: ReadCall, copy: Callable[[list[int]], CopyFence]
    ) -> None:
        """Read chunks into their slots; launch the copy of each chunk as it arrives."""

        def arrived(numbers: Sequence[int]) -> None:
            self._launch(job, call, numbers, copy)

        keys, backend = call.keys, call.backend
        try:
            for earlier in call.before:
                await earlier.released()
            views = self._layout.views(self._slab, keys, call.slots)
            if isinstance(backend, ReadsEach):
                answers = await backend.read_each(keys, views, ArrivalBatches(arrived).add)
            else:
                answers = await backend.read(keys, views)
            ok = same_length(answers, keys)
        except Exception as error:
            log.warning("%s: read of %d chunks failed: %s", call.tier, len(keys), error)
            job.reason = "error"
        else:
            if not all(ok) and not job.io_done.is_set():
                job.reason = reason_of(ok)
            arrived([n for n, fine in enumerate(ok) if fine])
        finally:
            call.ended.set()

    def _launch(
        self,
        job: EngineJob,
        call: ReadCall,
        arrived: Sequence[int],
        copy: Callable[[list[int]], CopyFence],
    ) -> None:
        """Launch the copies of arrived chunks, but for those launched before."""
        if job.io_done.is_set():
            return  # The job is answered: no chunk of a late read may reach the GPU.
        good = [call.positions[n] for n in arrived if n not in call.copied]
        call.copied.update(arrived)
        if not good:
            return
        try:
            fence = copy(good)
        except Exception as error:
            log.warning("copies of %d chunks were refused: %s", len(good), error)
            job.reason = "refused_transfer"
            return
        job.fences.append((fence, good))
        call.fences.append(fence)
        for i in good:
            job.ok[i] = True
