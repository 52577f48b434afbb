"""Copies between KV cache blocks in CPU memory and host slots, with the face of every copier."""

import queue
import threading
from collections.abc import Sequence

import numpy as np

from kvoffload.core.canonical import CanonicalKVCaches
from kvoffload.transfer.base import Fence, check_moves
from kvoffload.transfer.layout import ChunkLayout, ChunkMove
from kvoffload.transfer.pages import PageCopy, PagesOfTensor, gathers, scatters
from kvoffload.transfer.slab import HostBytes, Slab

CLOSE_TIMEOUT_S = 5.0


class DoneFence:
    """A fence with nothing before it: on a CPU, tensor operations are finished when they return."""

    error: BaseException | None = None

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True at once."""
        return True


class _CpuFence:
    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._event.wait(timeout_s)

    def reach(self, error: BaseException | None) -> None:
        self.error = error
        self._event.set()


class CpuCopier:
    """Copies for KV caches in CPU memory, on a thread of its own that plays the copy stream."""

    def __init__(self, kv_caches: CanonicalKVCaches, slab: Slab, layout: ChunkLayout) -> None:
        tensors: list[HostBytes] = [t.tensor.numpy() for t in kv_caches.tensors]
        self._num_blocks = min(len(pages) for pages in tensors)
        # For each group, how its chunks go to host memory and how they come back.
        self._to_host: list[list[PageCopy]] = []
        self._to_blocks: list[list[PageCopy]] = []
        for regions, per_chunk in zip(layout.regions, layout.per_chunk, strict=True):
            parts = [
                PagesOfTensor(tensors[r.tensor_idx][:, : r.page_bytes], r.offset) for r in regions
            ]
            self._to_host.append(gathers(parts, per_chunk, slab.address))
            self._to_blocks.append(scatters(parts, per_chunk, slab.address))
        self._slab = slab
        self._layout = layout
        self._queue: queue.SimpleQueue[
            tuple[Sequence[ChunkMove], bool, Fence, _CpuFence] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvoffload-copy", daemon=True)
        self._thread.start()

    def record_fence(self) -> Fence:
        """Return a fence that is done: see DoneFence."""
        return DoneFence()

    def launch(self, moves: Sequence[ChunkMove], to_host: bool, after: Fence) -> Fence:
        """See :meth:`kvoffload.transfer.base.Copier.launch`."""
        check_moves(moves, to_host, self._layout, self._num_blocks, self._slab)
        fence = _CpuFence()
        self._queue.put((moves, to_host, after, fence))
        return fence

    def stats(self) -> dict[str, str | int]:
        """See :meth:`kvoffload.transfer.base.Copier.stats`."""
        return {"copier": "cpu"}

    def close(self) -> None:
        """Finish the queue and join the thread, for as long as a copy may reasonably take."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            moves, to_host, after, fence = job
            try:
                # The forward pass may still write these blocks (a store would read too early) or
                # read them (a load would overwrite them): begin only after it.
                after.wait()
                self._copy(moves, to_host)
            except Exception as error:
                fence.reach(error)
            else:
                fence.reach(None)

    def _copy(self, moves: Sequence[ChunkMove], to_host: bool) -> None:
        for group_idx, copies in enumerate(self._to_host if to_host else self._to_blocks):
            mine = [
                (move.block_ids.astype(np.intp), move.first, self._slot(move))
                for move in moves
                if move.group_idx == group_idx
            ]
            # Tensor by tensor: one tensor's pages stay in the processor's caches and tables.
            for part in copies:
                for ids, first, slot in mine:
                    part.copy(ids, first, slot)

    def _slot(self, move: ChunkMove) -> HostBytes:
        return self._slab.array(move.host_slot, self._layout.payload_bytes[move.group_idx])
