"""Gather and scatter with torch's index operations, for simulated devices."""

from collections.abc import Iterator

import torch

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part


class IndexKernels:
    """Two torch operations for each tensor; allocates as many bytes as it moves."""

    def __init__(self, kv_caches: CanonicalKVCaches, parts: object = ()) -> None:
        self._tensors = [entry.tensor for entry in kv_caches.tensors]

    @torch.inference_mode()
    def move(self, part: Part, table: BlockTable, stage: torch.Tensor, to_stage: bool) -> None:
        """Copy pages to staging memory, or from it."""
        ids, chunks, within = table.device[: 3 * table.count].reshape(3, table.count)
        for pages, rows in self._ends(part, stage):
            if to_stage:
                rows[chunks, within] = pages.index_select(0, ids)
            else:
                pages.index_copy_(0, ids, rows[chunks, within])

    def _ends(self, part: Part, stage: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each region, its pages and its staging memory as (chunk, block, byte)."""
        for tensor_idx, offset, page_bytes in part.regions:
            shape = (len(stage) // part.num_bytes, part.per_chunk, page_bytes)
            strides = (part.num_bytes, page_bytes, 1)
            yield (
                self._tensors[tensor_idx][:, :page_bytes],
                stage.as_strided(shape, strides, offset - part.start),
            )
