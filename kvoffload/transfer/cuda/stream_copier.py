"""The copier for devices with streams: few large copies behind fences.

Each direction has two *lanes*: a stream with its own staging memory. A transfer is cut into
portions that fill a lane's staging memory, and the lanes take turns. On its lane a portion is
gathered and then copied (or copied and then scattered). Stream order is enough between the two, and
before the staging memory is used again. While one lane copies, the other gathers.

The engine's thread only queues a transfer. In each direction one thread enqueues its work, and one
waits for its end. Neither a large transfer nor a slow one delays the engine.
"""

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.base import CopyFence, Fence
from kvoffload.transfer.cuda.copy_plan import CopyPlan
from kvoffload.transfer.cuda.device import BlockList, Device, Event, Span, Stream
from kvoffload.transfer.cuda.fences import EngineFence, StreamFence
from kvoffload.transfer.layout import ChunkLayout, ChunkMove, Moves
from kvoffload.transfer.slab import Slab

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

STAGE_BYTES = 16 << 20
"""Staging memory of a lane: a copy of this size hides the cost of its start."""
DIRECT_PAGE_BYTES = 1 << 20
"""Pages from this size on are copied without staging: each alone is a large copy."""
LANES = 2
CLOSE_TIMEOUT_S = 5.0


@dataclass
class Lane:
    """A stream and its staging memory."""

    stream: Stream
    stage: "torch.Tensor"


@dataclass
class StreamJob:
    """A transfer in flight in one direction."""

    moves: Moves
    after: Fence
    fence: StreamFence
    lanes: list[Lane] = field(default_factory=list)
    """The lanes used so far, in the order of their first use."""
    table: BlockList | None = None
    uploaded: Event | None = None
    begun: Event | None = None
    """Its begin on the first lane, after the engine's work and the transfers before it."""
    unmarked: Exception | None = None
    """The error of a transfer whose end could not be marked on the streams."""


class StagedMoves(NamedTuple):
    """The chunks of a transfer that are staged, group after group."""

    moves: list[ChunkMove]
    starts: list[int]
    """For each chunk, its first row in the table; then the number of rows."""
    table: BlockList


class Direction:
    """All transfers to the host, or all from it.

    Each wait for another stream or for the device is a method named ``fence_...``. Tests on
    :mod:`tests.support.late_device` remove each one and find other bytes.
    """

    def __init__(self, device: Device, plan: CopyPlan, to_host: bool) -> None:
        self._device = device
        self._plan = plan
        self._to_host = to_host
        self._lanes = [
            Lane(device.new_stream(), device.new_stage(plan.stage_bytes)) for _ in range(LANES)
        ]
        self._turn = 0
        self._has_ended = False
        self._ending = threading.Lock()
        self._tables: deque[BlockList] = deque()
        self._queued: queue.SimpleQueue[StreamJob | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[StreamJob | None] = queue.SimpleQueue()
        name = "kvoffload-d2h" if to_host else "kvoffload-h2d"
        self._threads = [
            threading.Thread(target=self._launch_all, name=name, daemon=True),
            threading.Thread(target=self._await_all, name=f"{name}-wait", daemon=True),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.end()
            raise

    def submit(self, job: StreamJob) -> None:
        """Queue a transfer; from any thread.

        Raises:
            RuntimeError: the direction has ended.
        """
        with self._ending:
            if self._has_ended:
                raise RuntimeError("the copier is closed")
            self._queued.put(job)

    def end(self) -> None:
        """Refuse new transfers; finish the queued ones."""
        with self._ending:
            self._has_ended = True
            self._queued.put(None)

    def join(self, until_s: float) -> bool:
        """Wait for the threads to end; False if one runs at that time (monotonic)."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ---- the thread that enqueues ----

    def _launch_all(self) -> None:
        has_entered = False
        while (job := self._queued.get()) is not None:
            failed: Exception | None = None
            try:
                if not has_entered:
                    self._device.enter_thread()
                    has_entered = True
                self._launch(job)
            except Exception as error:
                # Work enqueued before the error still runs; its end is marked below.
                failed = error
            try:
                events = self.fence_end(job)
            except Exception as error:
                job.unmarked = failed or error
            else:
                job.fence.all_enqueued(job.begun, events, failed)
            self._launched.put(job)
        self._launched.put(None)

    def _launch(self, job: StreamJob) -> None:
        if not isinstance(job.after, EngineFence):
            job.after.wait()
        plan = self._plan
        staged = [move for move in job.moves if plan.is_staged[move.group_idx]]
        direct = [move for move in job.moves if not plan.is_staged[move.group_idx]]
        listed = self._list_blocks(job, staged) if staged else None
        if listed is not None:
            self._launch_staged(job, listed)
        if direct and (runs := plan.page_runs(direct)):
            self._device.copy(self._enter(job).stream, runs, self._to_host)

    def _list_blocks(self, job: StreamJob, moves: list[ChunkMove]) -> StagedMoves:
        moves.sort(key=lambda move: move.group_idx)
        counts = np.array([len(move.block_ids) for move in moves])
        starts = np.concatenate(([0], np.cumsum(counts)))
        total = int(starts[-1])
        chunks = np.repeat(np.arange(len(moves)), counts)
        firsts = np.array([move.first for move in moves])
        table = job.table = self._free_table(total)
        table.fill(
            (
                np.concatenate([move.block_ids for move in moves]).astype(np.int64),
                chunks,
                np.arange(total) - starts[chunks] + firsts[chunks],
            )
        )
        return StagedMoves(moves, starts.tolist(), table)

    def _launch_staged(self, job: StreamJob, listed: StagedMoves) -> None:
        moves, starts, table = listed
        begin = 0
        for group_idx, parts in enumerate(self._plan.parts):
            end = begin
            while end < len(moves) and moves[end].group_idx == group_idx:
                end += 1
            for part in parts if end > begin else ():
                chunks = max(1, self._plan.stage_bytes // part.num_bytes)
                for at in range(begin, end, chunks):
                    portion = moves[at : min(at + chunks, end)]
                    lane = self._enter(job)
                    span = Span(table, starts[at], starts[at + len(portion)] - starts[at], at)
                    runs = self._plan.stage_runs(part, portion, lane.stage)
                    if self._to_host:
                        self._device.gather(lane.stream, part, span, lane.stage)
                        self._device.copy(lane.stream, runs, to_host=True)
                    else:
                        self._device.copy(lane.stream, runs, to_host=False)
                        self._device.scatter(lane.stream, part, span, lane.stage)
            begin = end

    def _enter(self, job: StreamJob) -> Lane:
        """Take the next lane; fence it if this transfer has not used it yet."""
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % LANES
        if all(lane is not used for used in job.lanes):
            job.lanes.append(lane)
            self.fence_engine(job, lane)
            if job.begun is None:
                job.begun = lane.stream.record_event(timed=True)
            if job.table is not None:
                self._bring_table(job, job.table, lane)
        return lane

    def _bring_table(self, job: StreamJob, table: BlockList, lane: Lane) -> None:
        if job.uploaded is None:
            self._device.upload(lane.stream, table)
            job.uploaded = lane.stream.record_event()
        else:
            self.fence_upload(job.uploaded, lane)

    def _free_table(self, num_blocks: int) -> BlockList:
        for _ in range(len(self._tables)):
            table = self._tables.popleft()
            if len(table.host) >= 3 * num_blocks:
                return table
            self._tables.append(table)
        return self._device.new_table(num_blocks, self._lanes[self._turn].stream)

    # ---- the fences ----

    def fence_engine(self, job: StreamJob, lane: Lane) -> None:
        """Delay the lane until the engine's work submitted before the transfer is done.

        A store would otherwise read blocks that the forward pass has yet to write. A load would
        write blocks that the pass still reads, or that are yet to be zeroed for their new owner.
        """
        if isinstance(job.after, EngineFence):
            lane.stream.wait_event(job.after.event)

    def fence_upload(self, uploaded: Event, lane: Lane) -> None:
        """Delay the lane until another lane's stream has uploaded the table.

        The kernels would otherwise read the block numbers of the table's last transfer.
        """
        lane.stream.wait_event(uploaded)

    def fence_end(self, job: StreamJob) -> list[Event]:
        """Mark the end of the transfer on all streams that it used.

        The transfer would otherwise count as done while copies run. The engine would overwrite
        blocks that are still being read, or use blocks not yet written. The manager would reuse
        slots that a copy still reads.
        """
        return [lane.stream.record_event(timed=True) for lane in job.lanes]

    def fence_host(self, job: StreamJob) -> None:
        """Wait for the transfer's end before it is answered and its table is used again.

        Until then the copy engine reads the table's pinned half, and kernels its device half. If
        the table were written earlier, they would move the blocks of the next transfer.
        """
        for event in job.fence.events:
            event.synchronize()
        if job.unmarked is not None:
            for lane in job.lanes:
                lane.stream.synchronize()

    # ---- the thread that waits ----

    def _await_all(self) -> None:
        try:
            self._device.enter_thread()
        except Exception as error:
            # Events need no current device, so the thread waits all the same.
            log.warning("the thread that waits for copies has no current device: %s", error)
        while (job := self._launched.get()) is not None:
            try:
                self.fence_host(job)
            except Exception as error:
                # Kernels may still read the table: no transfer uses it again.
                job.fence.reach(job.unmarked or error)
            else:
                if job.table is not None:
                    self._tables.append(job.table)
                job.fence.reach(job.unmarked)


class StreamCopier:
    """Copies through the streams of a device.

    Args:
        device: of the tensors; closed with the copier, or here if the copier cannot be made.
        stage_bytes: staging memory of each of the four lanes; none if no page is staged.
        direct_page_bytes: pages of this size and more are not staged.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slab: Slab,
        layout: ChunkLayout,
        device: Device,
        *,
        stage_bytes: int = STAGE_BYTES,
        direct_page_bytes: int = DIRECT_PAGE_BYTES,
    ) -> None:
        self._layout = layout
        self._device = device
        self._directions: dict[bool, Direction] = {}
        try:
            self._plan = plan = CopyPlan(
                kv_caches,
                layout,
                slab.slot_bytes,
                min(stage_bytes, slab.num_bytes),
                direct_page_bytes,
            )
            device.prepare([part for parts in plan.parts for part in parts])
            for to_host in (True, False):
                self._directions[to_host] = Direction(device, plan, to_host)
        except BaseException:
            self.close()
            raise

    def record_fence(self) -> Fence:
        return EngineFence(self._device.engine_event())

    def launch(self, moves: Moves, to_host: bool, after: Fence) -> CopyFence:
        fence = StreamFence()
        self._directions[to_host].submit(StreamJob(moves, after, fence))
        return fence

    def stats(self) -> dict[str, str | int]:
        staged = self._plan.is_staged
        ways = {True: "staged", False: "direct"}
        used = [ways[way] for way, parts in zip(staged, self._layout.regions, strict=True) if parts]
        return {
            "groups": " ".join(used),
            "stage_bytes": self._plan.stage_bytes,
            **self._device.stats(),
        }

    def close(self) -> None:
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for direction in self._directions.values():
            direction.end()
        if not all(direction.join(until_s) for direction in self._directions.values()):
            # Leaking the memory is better than unpinning it under a running copy.
            log.warning("copies still ran %.0f s after the end; left alone", CLOSE_TIMEOUT_S)
            return
        self._device.close()
