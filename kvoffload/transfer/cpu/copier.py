"""The copier between KV cache blocks in CPU memory and host slots."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvoffload.errors import UsageError
from kvoffload.io.lent_memory import LentMemory
from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.base import CopyFence, Fence
from kvoffload.transfer.cpu.gather import Indices, PageCopy, PagesOfTensor, gathers, scatters
from kvoffload.transfer.layout import ChunkLayout, Moves, check_within
from kvoffload.transfer.slab import HostBytes, Slab

CLOSE_TIMEOUT_S = 5.0
POPULATED_BYTES = 4 << 20
"""Host memory allocated between two looks for a copy: some milliseconds."""


class Job(NamedTuple):
    """A transfer that is queued."""

    moves: Moves
    to_host: bool
    memory: HostBytes
    """What has the chunks: the slab, or memory of a server."""
    slot_bytes: int
    """The unit of host slots in it."""
    after: Fence
    fence: CopyFence


class CpuCopier:
    """Copies for KV caches in CPU memory, on one thread that plays the copy stream."""

    def __init__(self, kv_caches: CanonicalKVCaches, slab: Slab, layout: ChunkLayout) -> None:
        tensors: list[HostBytes] = [t.tensor.numpy() for t in kv_caches.tensors]

        def copies(
            choose: Callable[[list[PagesOfTensor], int, int], list[PageCopy]],
        ) -> list[list[PageCopy]]:
            return [
                choose(
                    [PagesOfTensor(tensors[r.tensor_idx][:, : r.page_bytes], r.offset) for r in rs],
                    per_chunk,
                    slab.address,
                )
                for rs, per_chunk in zip(layout.regions, layout.per_chunk, strict=True)
            ]

        # For each group, how its chunks go to host memory (True) or come back (False).
        self._copies = {True: copies(gathers), False: copies(scatters)}
        self._slab = slab
        self._layout = layout
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_populated = 0
        # On a CPU, tensor operations end before they return: the engine's work is always done.
        self._no_work = CopyFence()
        self._no_work.reach()
        self._is_closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvoffload-copy", daemon=True)
        self._thread.start()

    def record_fence(self) -> Fence:
        return self._no_work

    def launch(
        self, moves: Moves, to_host: bool, after: Fence, lent: LentMemory | None = None
    ) -> CopyFence:
        memory, slot_bytes = self._slab.flat, self._slab.slot_bytes
        if lent is not None:
            check_within(lent.bytes, moves, self._layout)
            memory, slot_bytes = np.frombuffer(lent.bytes, np.int8), 1
        fence = CopyFence()
        with self._closing:
            if self._is_closed:
                raise UsageError("the copier is closed")
            self._queue.put(Job(moves, to_host, memory, slot_bytes, after, fence))
        return fence

    def can_borrow(self) -> bool:
        return True

    def stats(self) -> dict[str, str | int]:
        return {"copier": "cpu"}

    def close(self) -> None:
        """Finish the queue and join the thread, at most for ``CLOSE_TIMEOUT_S``."""
        with self._closing:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                # The copy begins after the forward pass. A store would read blocks that the pass
                # still writes; a load would overwrite blocks that the pass still reads.
                job.after.wait()
                begun_s = time.perf_counter()
                self._copy(job)
            except Exception as error:
                job.fence.reach(error)
            else:
                job.fence.reach(copy_time_s=time.perf_counter() - begun_s)
            del job  # it has memory of a server, which may have ended

    def _next_job(self) -> Job | None:
        """Wait for a copy. Until there is one, let the kernel allocate host memory.

        It would do so at the first write, which a store would wait for: longer than for the copy.
        """
        while self._num_populated < self._slab.num_bytes:
            with contextlib.suppress(queue.Empty):
                return self._queue.get_nowait()
            left = self._slab.num_bytes - self._num_populated
            is_done = self._slab.populate(self._num_populated, min(left, POPULATED_BYTES))
            self._num_populated += POPULATED_BYTES if is_done else left
        return self._queue.get()

    def _copy(self, job: Job) -> None:
        slots, groups, firsts, starts, counts = job.moves.chunks
        alike: list[list[tuple[Indices, int, list[int]]]] = [[] for _ in self._layout.regions]
        # Chunks of the same blocks cost few Python objects each: the thread has the GIL for them.
        for group, first, count in {*zip(*job.moves.chunks[[1, 2, 4]].tolist(), strict=True)}:
            mine = (groups == group) & (firsts == first) & (counts == count)
            ids = job.moves.block_ids[starts[mine][:, None] + np.arange(count)].astype(np.intp)
            alike[group].append((ids, first, (slots[mine] * job.slot_bytes).tolist()))
        for copies, chunks in zip(self._copies[job.to_host], alike, strict=True):
            # Tensor by tensor: one tensor's pages stay in the processor's caches and TLB.
            for part in copies:
                for ids, first, places in chunks:
                    part.copy(ids, first, job.memory, places)
