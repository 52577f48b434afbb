"""Memory of a server, as an engine gets it, with chunks to load from it."""

import os
import socket
from collections.abc import Sequence

import numpy as np

from kvoffload.io.lent_memory import LentMemory
from kvoffload.messages import CanonicalKVCaches, GPULoadStoreSpec
from kvoffload.transfer.base import Copier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.shared_memory import create_shared_memory
from tests.support.fence_ends import ends


class Lender:
    """A file that the engine can only read; ``theirs`` is the server's socket.

    Args:
        num_bytes: of the file.
        used_bytes: so many are noise, and the server has not used the rest; all by default.
    """

    def __init__(self, num_bytes: int, used_bytes: int | None = None) -> None:
        self.fd = create_shared_memory(num_bytes)
        used_bytes = num_bytes if used_bytes is None else used_bytes
        self.written = np.random.default_rng(0).integers(-128, 127, used_bytes, np.int8)
        os.pwrite(self.fd, self.written.tobytes(), 0)
        mine, self.theirs = socket.socketpair()
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)
        self.memory: LentMemory | None = LentMemory(fd, mine)

    def write(self, start: int, numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        """Write there, as a server does."""
        os.pwrite(self.fd, numbers.tobytes(), start)

    def close(self) -> None:
        """End both ends; what is mapped stays until the last copy has ended."""
        if self.memory is not None:
            self.memory.leave()
        os.close(self.fd)
        self.theirs.close()

    def load(
        self,
        copier: Copier,
        layout: ChunkLayout,
        caches: CanonicalKVCaches,
        chunks: Sequence[int],
    ) -> None:
        """Load these chunks, which lie as in slots, and compare every byte."""
        assert self.memory is not None
        loan = self.memory.borrow(
            range(len(chunks)), [chunk * layout.slot_bytes for chunk in chunks], lambda: None
        )
        (per_chunk,) = layout.per_chunk
        blocks = np.random.default_rng(1).permutation(layout.num_blocks)
        blocks = blocks[: per_chunk * len(chunks)].reshape(len(chunks), per_chunk)
        for entry in caches.tensors:
            entry.tensor.zero_()
        moves = layout.moves(GPULoadStoreSpec(blocks.ravel()), loan.starts)
        fence = copier.launch(moves, False, copier.record_fence(), loan.memory)
        fence.when_reached(loan.end)
        assert ends(fence)
        assert fence.error is None
        for mine, start in zip(blocks.tolist(), loan.starts, strict=True):
            for tensor_idx, offset, page_bytes in layout.regions[0]:
                at = start + offset
                wanted = self.written[at : at + per_chunk * page_bytes].reshape(per_chunk, -1)
                found = caches.tensors[tensor_idx].tensor[mine, :page_bytes].cpu().numpy()
                assert np.array_equal(found, wanted)
