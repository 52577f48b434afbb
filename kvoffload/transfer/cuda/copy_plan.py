"""The arithmetic of copies: which pages are staged, and which bytes are contiguous.

Pages of a block are small and scattered; a slot has a chunk in one piece. Small pages are gathered
into staging memory on the device first, so that the bus carries few large copies. Large pages are
copied to their place in the slot directly.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.device import Part, Run
from kvoffload.transfer.layout import ChunkLayout, ChunkMove, Region

if TYPE_CHECKING:
    import torch


class CopyPlan:
    """The way of each group's chunks between blocks and slots.

    Args:
        slot_bytes: distance of two slots.
        stage_bytes: staging memory for one gather; at least the size of the largest region.
        direct_page_bytes: pages of this size and more are not staged.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        layout: ChunkLayout,
        slot_bytes: int,
        stage_bytes: int,
        direct_page_bytes: int,
    ) -> None:
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._rows = [entry.tensor.stride(0) for entry in kv_caches.tensors]
        self._buffers = [as_one_row(entry.tensor) for entry in kv_caches.tensors]
        self.is_staged = [
            bool(regions) and sum(r.page_bytes for r in regions) < direct_page_bytes * len(regions)
            for regions in layout.regions
        ]
        """For each group, whether its pages go through staging memory."""
        widest = max(
            (
                region.page_bytes * count
                for regions, count, staged in self._groups()
                if staged
                for region in regions
            ),
            default=0,
        )
        self.stage_bytes = max(stage_bytes, widest) if widest else 0
        self.parts = [
            tuple(self._cut(group_idx, regions, count)) if staged else ()
            for group_idx, (regions, count, staged) in enumerate(self._groups())
        ]
        """For each staged group, the regions that are staged together."""

    def _groups(self) -> Iterable[tuple[tuple[Region, ...], int, bool]]:
        return zip(self._layout.regions, self._layout.per_chunk, self.is_staged, strict=True)

    def _cut(self, group_idx: int, regions: Sequence[Region], count: int) -> Iterator[Part]:
        """Cut where staging memory is full, and between regions that are not contiguous."""
        begin = 0
        for i in range(1, len(regions) + 1):
            length = sum(region.page_bytes for region in regions[begin : i + 1]) * count
            before = regions[i - 1]
            if (
                i == len(regions)
                or length > self.stage_bytes
                or regions[i].offset != before.offset + before.page_bytes * count
            ):
                mine = tuple(regions[begin:i])
                num_bytes = sum(region.page_bytes for region in mine) * count
                yield Part(group_idx, mine, mine[0].offset, count, num_bytes)
                begin = i

    def stage_runs(
        self, part: Part, moves: Sequence[ChunkMove], stage: "torch.Tensor"
    ) -> list[Run]:
        """Return the copies between slots and staging memory, which has ``moves`` in order."""
        runs: list[Run] = []
        for i, move in enumerate(moves):
            at, host_at = i * part.num_bytes, move.host_slot * self._slot_bytes
            count = len(move.block_ids)
            if count == part.per_chunk:
                append(runs, Run(stage, at, host_at + part.start, part.num_bytes))
                continue
            # The rest of the chunk must stay as it is, at both ends.
            for region in part.regions:
                skip = move.first * region.page_bytes
                append(
                    runs,
                    Run(
                        stage,
                        at + region.offset - part.start + skip,
                        host_at + region.offset + skip,
                        count * region.page_bytes,
                    ),
                )
        return runs

    def page_runs(self, moves: Sequence[ChunkMove]) -> list[Run]:
        """Return the copies between slots and blocks of groups that are not staged."""
        runs: list[Run] = []
        for move in moves:
            host_at = move.host_slot * self._slot_bytes
            for region in self._layout.regions[move.group_idx]:
                buffer, row = self._buffers[region.tensor_idx], self._rows[region.tensor_idx]
                size = region.page_bytes
                for i, block in enumerate(move.block_ids.tolist(), start=move.first):
                    at = host_at + region.offset + i * size
                    append(runs, Run(buffer, block * row, at, size))
        return runs


def append(runs: list[Run], run: Run) -> None:
    """Add a run; join it with the last one if both are contiguous at both ends."""
    if runs:
        last = runs[-1]
        if (
            last.buffer is run.buffer
            and last.at + last.num_bytes == run.at
            and last.host_at + last.num_bytes == run.host_at
        ):
            runs[-1] = last._replace(num_bytes=last.num_bytes + run.num_bytes)
            return
    runs.append(run)


def as_one_row(tensor: "torch.Tensor") -> "torch.Tensor":
    """View rows of bytes, and the gaps between them, as one row."""
    length = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
    return tensor.as_strided((length,), (1,))
