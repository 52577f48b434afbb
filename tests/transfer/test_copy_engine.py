"""An engine's small copy does not wait for all that is enqueued for a copy engine before it."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.harness import caches_of
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.cuda import stream_copier
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.late_device import LateDevice

PAGE, CHUNKS = 4096, 256
BATCH_BYTES = 16 * PAGE


class CopyEngine(LateDevice):
    """A device that works on one stream until that has to wait, as an H100's copy engines do.

    The engine's token ids waited there for 256 MiB that were enqueued in one piece.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.now, self.copied_bytes = 0, 0

    def _step(self):
        for _ in range(len(self.streams) + 1):
            if self.streams[self.now % len(self.streams)].step():
                return True
            self.now += 1
        return False

    def copy(self, stream, copies, to_host, memory):
        for i, num_bytes in enumerate(copies.sizes.tolist()):
            one = Copies(*(row[i : i + 1] for row in copies))
            super().copy(stream, one, to_host, memory)
            stream.enqueue(partial(self._count, num_bytes))

    def _count(self, num_bytes):
        self.copied_bytes += num_bytes


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("direct_page_bytes", [1, 1 << 20])
def test_a_small_copy_waits_for_two_batches_at_most(to_host, direct_page_bytes, monkeypatch, until):
    monkeypatch.setattr(stream_copier, "BATCH_BYTES", BATCH_BYTES)
    tensor = torch.randint(-128, 127, (CHUNKS, PAGE), dtype=torch.int8)
    caches = caches_of([tensor])
    layout = ChunkLayout(caches, 1)
    slab = Slab(CHUNKS, layout.slot_bytes)
    device = CopyEngine(caches, slab, 1)
    copier = StreamCopier(caches, slab, layout, device, direct_page_bytes=direct_page_bytes)
    order = np.random.default_rng(0).permutation(CHUNKS)
    copy = copier.launch(
        layout.moves(GPULoadStoreSpec(order), order), to_host, copier.record_fence()
    )
    until(lambda: copy._events is not None)  # all is enqueued
    waited = []
    for share in (0.1, 0.4, 0.7):  # of the transfer
        while device.copied_bytes < share * CHUNKS * PAGE:
            device.run_some()
        before = device.copied_bytes
        device.engine.enqueue(lambda before=before: waited.append(device.copied_bytes - before))
        device.engine.synchronize()
    assert ends(copy)
    copier.close()
    assert max(waited) <= 2 * BATCH_BYTES
    assert device.copied_bytes == CHUNKS * PAGE
