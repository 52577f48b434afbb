"""The transfer engine: one job in, one answer out, for copies and for reads and writes of tiers.

The engine's thread submits and polls. A job that reads or writes a tier crosses to the I/O server.
A load from a tier is a pipeline: a chunk is copied to the GPU when it is read and verified.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvoffload.errors import UsageError
from kvoffload.io.client import IOClient
from kvoffload.io.deadlines import Listener
from kvoffload.io.protocol import Load, Store
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadKey,
    TransferResult,
    TransferSpec,
)
from kvoffload.metrics.names import HOST, TRANSFER_FAILURES
from kvoffload.metrics.samples import LOADS, STORES, Registry, Traffic
from kvoffload.transfer.base import Copier, CopyFence
from kvoffload.transfer.layout import ChunkLayout, Moves, check_moves
from kvoffload.transfer.slab import Slab
from kvoffload.transfer.tier_load import TierLoad

log = logging.getLogger(__name__)

ROUTES: tuple[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], ...] = (
    (GPULoadStoreSpec, CPULoadStoreSpec),
    (CPULoadStoreSpec, GPULoadStoreSpec),
    (CPULoadStoreSpec, BackendLoadStoreSpec),
    (BackendLoadStoreSpec, CPULoadStoreSpec),
)
"""The source and destination types that the engine serves."""
_NO_IO = threading.Event()
"""The ``io_done`` of jobs that use no tier."""
_NO_IO.set()
_LOOK_S = 1.0
"""Between two looks at the last copy of a load that a thread waits for."""
FAILURES = ("missing", "corrupt", "late", "unavailable", "deadline", "io_died", "error")
"""Reasons of failed transfers whose counters begin at 0."""


@dataclass(eq=False)
class EngineJob(Listener):
    """A transfer in flight; its answer is ready when ``io_done`` is set and all fences are done.

    It listens to a write to a tier or an early read. The parts of a load report to it.
    """

    job_id: int
    ok: list[bool]
    on_settled: Callable[[int], None]
    """Called with the job's id when a job answered as unsettled is settled."""
    num_bytes: int = 0
    reason: str = ""
    parts_left: int = 0
    """Reads and writes of tiers that have not ended."""
    unsettled: int = 0
    """Ended reads and writes that may still touch their slots."""
    io_done: threading.Event = _NO_IO
    """Set when all reads and writes have ended."""
    io_begun_s: float = math.inf
    io_time_s: float = 0.0
    """Seconds from the begin of the first read or write to the end of the last."""
    fences: list[tuple[CopyFence, Sequence[int]]] = field(default_factory=list)
    """Launched copies, each with the positions of its chunks."""
    settled: bool = True
    traffic: Traffic | None = None
    """Where a copy between the KV cache and host memory counts."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        """Block until the answer is ready."""
        while not self.io_done.wait(_LOOK_S):
            for fence, _ in self.fences[-1:]:
                fence.done()  # it tells of a call that hangs
        for fence, _ in self.fences:
            fence.wait()

    # ---- on the I/O client's thread ----

    def copied(self, fence: CopyFence, positions: Sequence[int]) -> None:
        """Take in that the copies of these chunks were launched."""
        for i in positions:
            self.ok[i] = True
        self.fences.append((fence, positions))

    def part_ended(self, reason: str, settled: bool, io_time_s: float) -> None:
        """Take in that a read or write has ended, and why chunks of it are missing."""
        with self.lock:
            now_s = time.monotonic()
            self.io_begun_s = min(self.io_begun_s, now_s - io_time_s)
            self.io_time_s = now_s - self.io_begun_s
            if reason and self.reason != "deadline":
                self.reason = reason
            self.unsettled += not settled
            self.parts_left -= 1
            if not self.parts_left:
                self.settled = not self.unsettled
                self.io_done.set()

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        """Take in the answer of a write or an early read."""
        self.ok[:] = map(bool, ok)
        self.part_ended(reason, settled, io_time_s)

    def released(self) -> None:
        """Take in that the slots of an unsettled read or write are free."""
        with self.lock:
            self.unsettled -= 1
            if not self.unsettled and not self.settled:
                self.on_settled(self.job_id)

    # ---- the answer ----

    def result(self) -> TransferResult:
        """Compose the one answer."""
        for fence, positions in self.fences:
            if fence.error is not None:
                log.warning("copy of job %d failed: %s", self.job_id, fence.error)
                self.reason = self.reason or "copy_error"
                for i in positions:
                    self.ok[i] = False
        copies_s = [fence.copy_time_s for fence, _ in self.fences] or [0.0]
        # All copies but the last run in parallel to the reads.
        time_s = max(sum(copies_s), self.io_time_s + copies_s[-1])
        ok = tuple(self.ok)
        return TransferResult(self.job_id, ok, self.settled, self.num_bytes, time_s, self.reason)


class TransferEngine(OffloadingHandler):
    """Carries out transfers and answers each exactly once; used on the engine's thread only.

    Args:
        io: reads and writes the tiers; None if there are none.
        slab: host memory.
        layout: of chunks in slots.
        copier: copies between GPU blocks and slots.
        keeps_slots: whether slots keep the chunks that a load has brought. If not, chunks in a
            server's memory are copied from there.
    """

    def __init__(
        self,
        io: IOClient | None,
        slab: Slab,
        layout: ChunkLayout,
        copier: Copier,
        *,
        keeps_slots: bool = True,
    ) -> None:
        self.figures = Registry()
        """What this engine and its tiers have measured since the start."""
        self.failures = self.figures.counter(TRANSFER_FAILURES, *FAILURES)
        """Chunks that failed, by reason."""
        self._loads, self._stores = Traffic(LOADS, HOST), Traffic(STORES, HOST)
        self.figures.read(self._loads.samples, self._stores.samples)
        if io is not None:
            self.figures.read(io.samples)
        self._io = io
        self._slab = slab
        self._layout = layout
        self._copier = copier
        self._borrows = not keeps_slots
        """Whether chunks in a server's memory are copied from there."""
        if self._borrows and io is not None:
            io.borrow()
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
        except UsageError as error:
            log.warning("transfer %d is refused: %s", job_id, error)
        except Exception:
            log.exception("transfer %d from %s to %s could not begin", job_id, *spec)
        self._jobs[job_id] = EngineJob(
            job_id, [False] * num_chunks, self._settled.append, reason="refused_transfer"
        )

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        match spec:
            case (GPULoadStoreSpec() | Moves() as gpu, CPULoadStoreSpec() as host):
                self._jobs[job_id] = self._copy(job_id, gpu, host, to_host=True)
            case (CPULoadStoreSpec() as host, GPULoadStoreSpec() | Moves() as gpu):
                self._jobs[job_id] = self._copy(job_id, gpu, host, to_host=False)
            case (CPULoadStoreSpec() as host, BackendLoadStoreSpec() as target):
                self._jobs[job_id] = self._tier_job(job_id, host, target, reads=False)
            case (BackendLoadStoreSpec() as source, CPULoadStoreSpec() as host):
                self._jobs[job_id] = self._tier_job(job_id, host, source, reads=True)
            case _:
                return False
        return True

    def get_finished(self) -> list[TransferResult]:
        if not self._jobs:
            return []
        done = list[EngineJob]()
        for job in self._jobs.values():
            if job.io_done.is_set():
                if all(fence.done() for fence, _ in job.fences):
                    done.append(job)
            elif job.fences:  # a read may wait for this copy, and the copy for a call that hangs
                job.fences[-1][0].done()  # which it tells of
        results = [self._jobs.pop(job.job_id).result() for job in done]
        for job, result in zip(done, results, strict=True):
            good = result.ok.count(True)
            if result.reason:
                self.failures[result.reason] += len(result.ok) - good
            if job.traffic is not None and good:
                num_bytes = result.transfer_bytes * good // len(result.ok)
                job.traffic.add(good, num_bytes, result.transfer_time_s)
        return results

    def get_settled(self) -> list[int]:
        if not self._settled:
            return []
        return [self._settled.popleft() for _ in range(len(self._settled))]

    def wait(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            if job := self._jobs.get(job_id):
                job.wait()

    def remove(self, tier: str, key: OffloadKey) -> None:
        """Begin removing a chunk from a tier; nothing tells when that is done."""
        if self._io is not None:
            self._io.remove(tier, [key])

    # ---- the two kinds of jobs ----

    def _copy(
        self, job_id: int, gpu: GPULoadStoreSpec | Moves, host: CPULoadStoreSpec, to_host: bool
    ) -> EngineJob:
        # All of it is checked before anything is copied or read.
        moves = gpu if isinstance(gpu, Moves) else self._layout.moves(gpu, host.block_ids)
        check_moves(moves, to_host, self._layout, self._slab)
        fetches = () if to_host else host.fetches
        count, num_bytes = len(moves), self._layout.bytes_of(moves)
        job = EngineJob(job_id, [not fetches] * count, self._settled.append, num_bytes)
        job.traffic = self._stores if to_host else self._loads
        # The forward pass may still use these blocks: the copies wait for this fence.
        after = self._copier.record_fence()
        if not fetches:
            job.fences.append((self._copier.launch(moves, to_host, after), range(count)))
            return job
        if self._io is None:
            raise ValueError("there are no tiers")
        parts = job, fetches, moves, self._layout, self._io, self._copier, after
        load = TierLoad(*parts, self._borrows)
        if here := sorted({*range(count)}.difference(*[each.positions for each in fetches])):
            job.copied(self._copier.launch(moves.take(here), to_host, after), here)
        job.parts_left, job.io_done = len(load.parts), threading.Event()
        for part in load.first:
            part.begin()
        return job

    def _tier_job(
        self, job_id: int, host: CPULoadStoreSpec, chunks: BackendLoadStoreSpec, *, reads: bool
    ) -> EngineJob:
        """Begin to write slots to a tier, or to read them from it."""
        sizes = self._layout.sizes(chunks.keys)
        slots = host.block_ids.tolist()
        in_range = not slots or (min(slots) >= 0 and max(slots) < self._slab.num_slots)
        if len(slots) != len(chunks.keys) or not in_range:
            raise ValueError(f"host slots {slots} for {len(chunks.keys)} chunks")
        num_bytes = sizes * len(slots) if isinstance(sizes, int) else sum(sizes)
        job = EngineJob(job_id, [False] * len(slots), self._settled.append, num_bytes)
        job.parts_left, job.io_done = 1, threading.Event()
        if self._io is None:
            raise ValueError("there are no tiers")
        kind = Load if reads else Store
        order = kind(0, chunks.tier, list(chunks.keys), slots, sizes, list(chunks.tenants))
        self._io.begin(order, job)
        return job
