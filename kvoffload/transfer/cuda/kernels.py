"""Gather and scatter with torch's index operations, for devices without Triton and for CPUs.

Pages are moved as the widest words that their sizes and places allow.
"""

import math
from typing import TYPE_CHECKING, Protocol

import torch

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.device import Part, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Kernels(Protocol):
    """Moves pages between blocks and staging memory, on the device's current stream."""

    name: str

    def gather(self, part: Part, span: Span, stage: torch.Tensor) -> None: ...

    def scatter(self, part: Part, span: Span, stage: torch.Tensor) -> None: ...


def word_bytes(part: Part, tensors: "Sequence[torch.Tensor]") -> int:
    """Return the widest word that divides all sizes and places of a part."""
    numbers = [8, part.num_bytes]
    for region in part.regions:
        tensor = tensors[region.tensor_idx]
        numbers += [region.page_bytes, region.offset - part.start]
        numbers += [int(tensor.stride(0)), tensor.data_ptr(), int(tensor.storage_offset())]
    return math.gcd(*numbers)


class IndexKernels:
    """Two torch operations for each tensor; allocates as many bytes as it moves."""

    name = "index_select"

    def __init__(self, kv_caches: CanonicalKVCaches) -> None:
        self._tensors = [entry.tensor for entry in kv_caches.tensors]
        self._pages: dict[Part, list[torch.Tensor]] = {}

    def gather(self, part: Part, span: Span, stage: torch.Tensor) -> None:
        ids, chunks, within = self._numbers(span)
        for pages, rows in self._ends(part, stage):
            rows[chunks, within] = pages.index_select(0, ids)

    def scatter(self, part: Part, span: Span, stage: torch.Tensor) -> None:
        ids, chunks, within = self._numbers(span)
        for pages, rows in self._ends(part, stage):
            pages.index_copy_(0, ids, rows[chunks, within])

    def _numbers(self, span: Span) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = span.table.count
        ids, chunks, within = (
            span.table.device[row * size + span.start :][: span.length] for row in range(3)
        )
        return ids, chunks - span.first_chunk, within

    def _ends(self, part: Part, stage: torch.Tensor) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """For each region, its pages and its staging memory as (chunk, block, word)."""
        width = word_bytes(part, self._tensors)
        words = stage.view(WORDS[width])
        pages = self._pages.get(part)
        if pages is None:
            pages = self._pages[part] = [
                self._tensors[region.tensor_idx][:, : region.page_bytes].view(WORDS[width])
                for region in part.regions
            ]
        return [
            (
                page_words,
                words.as_strided(
                    (len(stage) // part.num_bytes, part.per_chunk, region.page_bytes // width),
                    (part.num_bytes // width, region.page_bytes // width, 1),
                    (region.offset - part.start) // width,
                ),
            )
            for page_words, region in zip(pages, part.regions, strict=True)
        ]
