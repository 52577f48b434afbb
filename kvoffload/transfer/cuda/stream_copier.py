"""The copier for devices with streams: few large copies behind fences.

A transfer of small pages is cut into portions that fill a stage, and the stages of a direction take
turns. A portion is gathered there and then copied (or copied and then scattered). While one waits
for the GPU to schedule a kernel, the copies of the other use the bus.

The engine's thread only queues a transfer. One thread enqueues the work of both directions. The
end of a transfer is an event, which the engine's thread polls.
"""

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvoffload.config import human_bytes
from kvoffload.errors import UsageError
from kvoffload.io.lent_memory import LentMemory
from kvoffload.messages import CanonicalKVCaches
from kvoffload.timed_queue import next_within
from kvoffload.transfer.base import CopyFence, Fence
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.copy_plan import MOST_COPIES, CopyPlan, blocks_of, in_bytes
from kvoffload.transfer.cuda.direction import (
    BATCH_BYTES,
    COPY_BYTES,
    Direction,
    Stage,
    Staging,
)
from kvoffload.transfer.cuda.fences import LATE_S, EngineFence, StreamFence, Timing
from kvoffload.transfer.cuda.pinning import Pinning
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part
from kvoffload.transfer.cuda.torch_device import CudaDevice, CudaEvent, CudaStream
from kvoffload.transfer.layout import ChunkLayout, Moves, check_within
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

DIRECT_PAGE_BYTES = 128 << 10
"""Pages from this size on are copied without staging. Each copy of a batch takes an H100 0.4 to 0.9
µs more. Pages of 64 KiB reach 0.6 to 0.8 of the bus, those of 4 KiB 0.05 to 0.14."""
STAGE_BYTES = 48 << 20
"""Of a stage. To enqueue a portion takes the launching thread up to half a millisecond while an
engine's thread runs; the bus needs one for 48 MiB. A kernel may wait as long on a GPU busy with a
prefill."""
LEAST_STAGE_BYTES = 1 << 20
"""Where device memory is short, a stage is halved down to this; then pages are copied directly."""
MOST_SINGLE_COPIES = 256
"""Enqueued at a time where each copy is a call of its own."""
PAUSE_S = 30e-6
"""Between two steps. Each call of the driver gives the GIL away and takes it back before a waiting
thread has woken. Without a pause the engine's thread waits for all steps to end."""
POLL_S = 0.001
"""Between two looks at fences and at what the device has yet to do."""
CLOSE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class StreamJob:
    """A transfer in flight."""

    moves: Moves
    slot_bytes: int
    """The unit of their host slots."""
    memory: Pinning
    to_host: bool
    after: Fence
    fence: StreamFence
    host_end: int = 0
    """Where in host memory its last chunk ends."""
    streams: list[CudaStream] = field(default_factory=list)
    """Those used so far, in the order of their first use."""
    timing: Timing = field(default_factory=Timing)


class Launcher:
    """Enqueues all transfers, on one thread.

    If device memory is too short for the plan, the error is a MemoryError, and nothing is left.

    Each wait for another stream or for the device is a method named ``fence_...``. Tests on
    :mod:`tests.support.late_device` remove each one and find other bytes.
    """

    def __init__(self, device: CudaDevice, plan: CopyPlan) -> None:
        self._device = device
        self._plan = plan
        # All memory first: streams that were made before it is too short would remain.
        staging = {to_host: Staging(device, plan) for to_host in (True, False)}
        # To the host (True) and from it.
        self._ways = {to_host: Direction(device, staging[to_host]) for to_host in staging}
        self._has_ended = self._has_entered = False
        self._begun_s: float | None = None
        """When the thread began the calls of the driver that it is in."""
        self._told_s: float | None = None
        """The begin of those that were told of."""
        self._ending = threading.Lock()
        self._queued: queue.SimpleQueue[StreamJob | StreamFence | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvoffload-launch", daemon=True)
        self._thread.start()

    def submit(self, job: StreamJob) -> None:
        """Queue a transfer; from any thread.

        Raises:
            UsageError: the launcher has ended.
        """
        with self._ending:
            if self._has_ended:
                raise UsageError("the copier is closed")
            self._queued.put(job)

    def watch(self, fence: StreamFence) -> None:
        """Poll a fence until it is reached; from any thread."""
        self._queued.put(fence)

    def tell_late(self) -> None:
        """Tell of a call that does not return, once: all transfers wait behind it; any thread."""
        begun_s = self._begun_s
        if begun_s is None or begun_s == self._told_s or time.monotonic() - begun_s < LATE_S:
            return
        self._told_s = begun_s
        log.warning(
            "a call of the GPU's driver has not returned for %.0f s: no chunk is stored or "
            "loaded until it does. If it never does, restart with "
            '"batched_copies": false. Version 580.159.04 of the driver is known to hang so',
            LATE_S,
        )

    def end(self, timeout_s: float) -> bool:
        """Refuse new transfers and finish the queued ones; False if the time passed first."""
        with self._ending:
            self._has_ended = True
            self._queued.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread ----

    def _run(self) -> None:
        begun: dict[bool, deque[tuple[StreamJob, Iterator[bool]]]] = {True: deque(), False: deque()}
        watched: list[StreamFence] = []
        is_open, is_stuck = True, False
        while is_open or any(begun.values()):
            timeout_s: float | None = POLL_S if watched else None
            if any(begun.values()):
                timeout_s = POLL_S if is_stuck else PAUSE_S
            with contextlib.suppress(queue.Empty):
                job = next_within(self._queued, timeout_s)
                if job is None:
                    is_open = False
                elif isinstance(job, StreamFence):
                    watched.append(job)
                else:
                    job.moves = in_bytes(job.moves, job.slot_bytes)
                    job.host_end = self._plan.host_end(job.moves)
                    begun[job.to_host].append((job, self._launch(job)))
            # Both directions take turns: a large store does not hold up a load.
            self._begun_s = time.monotonic()
            went_on = [self._advance(jobs) for jobs in begun.values() if jobs]
            self._begun_s = None
            is_stuck = not any(went_on)
            watched = [fence for fence in watched if not fence.done()]
        self.fence_close()
        for fence in watched:
            fence.done()

    def _advance(self, jobs: deque[tuple[StreamJob, Iterator[bool]]]) -> bool:
        """Take the next step of the first transfer; False if it can take none now.

        A transfer whose slots are not pinned yet lets later ones pass: pinning takes a minute.
        """
        for _ in range(len(jobs)):
            if jobs[0][0].memory.is_settled(jobs[0][0].host_end):
                break
            jobs.rotate(-1)
        else:
            return False
        (job, steps), failed = jobs[0], None
        try:
            if not self._has_entered:
                self._device.enter_thread()
                self._has_entered = True
            for went_on in steps:
                return went_on
        except Exception as error:
            # Work enqueued before the error still runs; its end is marked below.
            failed = error
        jobs.popleft()
        try:
            job.fence.all_enqueued(job.timing, self.fence_end(job), failed)
        except Exception as error:
            # The transfer has no end on its streams: it ends when those are empty.
            _await(job.streams)
            job.fence.reach(failed or error)
        return True

    def _launch(self, job: StreamJob) -> Iterator[bool]:
        """Enqueue a transfer; tell between its steps whether it went on or waits for the device."""
        if not isinstance(job.after, EngineFence):
            job.after.wait()
        has_begun = False
        for is_ready, enqueue in self._steps(job):
            if has_begun:
                yield True
            while not is_ready():
                yield False
            enqueue()
            has_begun = True

    def _steps(self, job: StreamJob) -> Iterator[tuple[Callable[[], bool], Callable[[], None]]]:
        """Return for each step whether the device takes it now, and what enqueues it."""
        way = self._ways[job.to_host]

        def most() -> int:
            # The driver may refuse batches at any time.
            return MOST_COPIES if self._has_batches(job) else MOST_SINGLE_COPIES

        def has_table() -> bool:
            return self.fence_table(way.tables[0]) and way.has_room()

        for group_idx, parts in enumerate(self._plan.parts):
            moves = job.moves.of_group(group_idx)
            for part in parts:
                for portion in self._plan.portions(part, moves, most):
                    yield has_table, partial(self._stage, job, part, portion)
            if len(moves) and not parts:
                for copies in self._plan.page_copies(group_idx, moves, most):
                    yield way.has_room, partial(self._copy_pages, job, copies)

    def _has_batches(self, job: StreamJob) -> bool:
        return self._device.has_batches(job.memory, job.host_end)

    def _copy_pages(self, job: StreamJob, copies: Copies) -> None:
        begun, _ = self._copy(job, copies, lambda stream: self.fence_engine(job, stream))
        job.timing = job.timing.begun_at(begun)

    def _stage(self, job: StreamJob, part: Part, moves: Moves) -> None:
        way = self._ways[job.to_host]
        stage, table = way.stages[0], way.tables[0]
        way.stages.rotate(-1)
        way.tables.rotate(-1)
        copies = self._plan.stage_copies(part, moves, stage.memory.data_ptr())
        table.fill(blocks_of(moves))
        self._use(job, way.kernels)
        try:
            self._device.upload(way.kernels, table)
            (self._gather if job.to_host else self._scatter)(job, part, stage, table, copies)
        except BaseException:
            _await(way.streams)  # what was enqueued uses the two
            stage.used = table.used = None
            raise

    def _gather(
        self, job: StreamJob, part: Part, stage: Stage, table: BlockTable, copies: Copies
    ) -> None:
        way = self._ways[True]
        self.fence_engine(job, way.kernels)
        self.fence_stage(stage, way.kernels)
        self._device.move(way.kernels, part, table, stage.memory, to_stage=True)
        table.used = gathered = way.kernels.record_event()
        begun, _ = self._copy(job, copies, lambda stream: self.fence_gathered(gathered, stream))
        job.timing = job.timing.begun_at(begun)
        stage.used = way.last

    def _scatter(
        self, job: StreamJob, part: Part, stage: Stage, table: BlockTable, copies: Copies
    ) -> None:
        way = self._ways[False]
        # The copy writes only the stage: it need not wait for the engine.
        begun, stream = self._copy(job, copies, lambda stream: self.fence_stage(stage, stream))
        early = job.timing.early
        if job.timing.begun is None or 0 < len(early) < len(way.stages):
            # Before the first scatter, which waits for the engine, there is a stage for each.
            early += ((begun, stream.record_event(timed=True)),)
        self.fence_copied(way)
        self.fence_engine(job, way.kernels)
        begun = job.timing.begun or way.kernels.record_event(timed=True)
        job.timing = Timing(begun, early)
        self._device.move(way.kernels, part, table, stage.memory, to_stage=False)
        stage.used = table.used = way.kernels.record_event()

    def _copy(
        self, job: StreamJob, copies: Copies, first_waits: Callable[[CudaStream], object]
    ) -> tuple[CudaEvent, CudaStream]:
        """Enqueue copies, the first batch after a wait; return its begin and the last stream."""
        way, calls = self._ways[job.to_host], 0
        begun: CudaEvent | None = None
        for batch in copies.of_at_most(COPY_BYTES).batches(BATCH_BYTES):
            stream = way.next_stream()
            self._use(job, stream)
            if begun is None:
                first_waits(stream)
                # After the transfers before it, whose time is not counted.
                begun = stream.record_event(timed=True)
            self._device.copy(stream, batch, job.to_host, job.memory)
            way.last = stream.record_event()
            calls += 1 if self._has_batches(job) else len(batch.sizes)
        way.note(calls, int(copies.sizes.sum()))
        assert begun is not None
        return begun, stream

    def _use(self, job: StreamJob, stream: CudaStream) -> None:
        if stream not in job.streams:
            job.streams.append(stream)

    # ---- the fences ----

    def fence_engine(self, job: StreamJob, stream: CudaStream) -> None:
        """Delay the stream until the engine's work submitted before the transfer is done.

        A store would otherwise read blocks that the forward pass has yet to write. A load would
        write blocks that the pass still reads, or that are yet to be zeroed for their new owner.
        """
        if isinstance(job.after, EngineFence):
            stream.wait_event(job.after.event)

    def fence_stage(self, stage: Stage, stream: CudaStream) -> None:
        """Delay the stream until neither a copy nor a kernel uses the stage.

        A copy would otherwise have bytes of another portion, or a block.
        """
        if stage.used is not None:
            stream.wait_event(stage.used)

    def fence_gathered(self, gathered: CudaEvent, stream: CudaStream) -> None:
        """Delay the copies to the host until the pages are in the stage."""
        stream.wait_event(gathered)

    def fence_copied(self, way: Direction) -> None:
        """Delay the kernel until the bytes from the host are in the stage."""
        if way.last is not None:
            way.kernels.wait_event(way.last)

    def fence_table(self, table: BlockTable) -> bool:
        """Whether no kernel reads the table, which is written next.

        The kernels would otherwise move the blocks of the next portion.
        """
        return table.used is None or table.used.query()

    def fence_end(self, job: StreamJob) -> list[CudaEvent]:
        """Mark the end of the transfer on all streams that it used.

        The transfer would otherwise count as done while copies run. The engine would overwrite
        blocks that are still being read, or use blocks not yet written. The manager would reuse
        slots that a copy still reads.
        """
        return [stream.record_event(timed=True) for stream in job.streams]

    def fence_close(self) -> None:
        """Wait for all copies: host memory is unpinned and freed next."""
        _await([*self._ways[True].streams, *self._ways[False].streams])


def _await(streams: Sequence[CudaStream]) -> None:
    for stream in streams:
        try:
            stream.synchronize()
        except Exception as error:
            log.warning("a stream's end is not known: %s", error)


def _halved(num_bytes: int) -> Iterator[int]:
    yield num_bytes
    while (num_bytes := num_bytes // 2) >= LEAST_STAGE_BYTES:
        yield num_bytes


class StreamCopier:
    """Copies through the streams of a device.

    Args:
        device: of the tensors; closed with the copier, or here if the copier cannot be made.
        stage_bytes: of each stage; none if no page is staged.
        direct_page_bytes: pages of this size and more are not staged.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slab: Slab,
        layout: ChunkLayout,
        device: CudaDevice,
        *,
        stage_bytes: int = STAGE_BYTES,
        direct_page_bytes: int = DIRECT_PAGE_BYTES,
    ) -> None:
        self._layout = layout
        self._slot_bytes = slab.slot_bytes
        self._device = device
        self._why_less = ""
        """Why there is less staging memory than asked for."""

        def plan(stage_bytes: int, direct_page_bytes: int) -> CopyPlan:
            return CopyPlan(kv_caches, layout, stage_bytes, direct_page_bytes)

        try:
            sizes = _halved(min(stage_bytes, slab.num_bytes))
            plans = (plan(size, direct_page_bytes) for size in sizes)
            self._plan, self._launcher = self._begin(plans, plan(0, 0))
        except BaseException:
            device.close()
            raise
        self._pid = os.getpid()
        # A thread that is within torch's code when the interpreter ends aborts the process.
        atexit.register(self._at_exit)

    def _begin(self, plans: Iterator[CopyPlan], direct: CopyPlan) -> tuple[CopyPlan, Launcher]:
        """Begin with the first of these plans that device memory is enough for."""
        for plan in plans:
            if not self._device.prepare([part for parts in plan.parts for part in parts]):
                break
            try:
                launcher = Launcher(self._device, plan)
            except MemoryError as error:
                self._why_less = str(error)
                continue
            if self._why_less:
                text = "%s; stages of %s are used"
                log.warning(text, self._why_less, human_bytes(plan.stage_bytes))
            return plan, launcher
        if self._why_less:
            log.warning("%s; small pages are copied without staging: slowly", self._why_less)
        return direct, Launcher(self._device, direct)

    def record_fence(self) -> Fence:
        return EngineFence(self._device.engine_event())

    def launch(
        self, moves: Moves, to_host: bool, after: Fence, lent: LentMemory | None = None
    ) -> CopyFence:
        memory, slot_bytes = self._device.slab, self._slot_bytes
        if lent is not None:
            check_within(lent.bytes, moves, self._layout)
            memory, slot_bytes = self._device.lent(lent, self._plan.host_end(moves)), 1
        fence = StreamFence(self._launcher.watch, self._launcher.tell_late)
        self._launcher.submit(StreamJob(moves, slot_bytes, memory, to_host, after, fence))
        return fence

    def can_borrow(self) -> bool:
        return self._device.can_pin_lent()

    def stats(self) -> dict[str, str | int]:
        groups = zip(self._plan.parts, self._layout.regions, strict=True)
        used = ["staged" if parts else "direct" for parts, regions in groups if regions]
        return {
            "groups": " ".join(used),
            "stage_bytes": self._plan.stage_bytes,
            **self._device.stats(),
            **({"why_not_stage_bytes": self._why_less} if self._why_less else {}),
        }

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # a forked child has neither the threads nor the device
            self.close()

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self._device.stop_pinning()
        if self._launcher.end(CLOSE_TIMEOUT_S):
            self._device.close()
        else:
            # Leaking the memory is better than unpinning it under a running copy.
            log.warning("copies still ran %.0f s after the end; left alone", CLOSE_TIMEOUT_S)
