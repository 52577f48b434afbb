"""What the moving half sees of an engine's KV cache: rows of bytes, one row a block.

Only the types; :mod:`kvoffload.core.tensors` makes them from an engine's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """An int8 view ``(num_blocks, page_bytes)`` of KV cache memory; row i is block i.

    Where an engine's tensor has ``num_blocks`` at a later physical dimension (``(2, num_blocks,
    ...)``), it is split so that each view leads with ``num_blocks``. Rows are contiguous; the
    distance between rows may be larger than a row (padded pages). The engine owns the memory.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """A layer's (or several layers') use of one canonical tensor, by index."""

    tensor_idx: int
    page_size_bytes: int
    """Bytes that layer uses at the front of each row: the page without its padding."""


@dataclass(frozen=True)
class CanonicalKVCaches:
    """The whole cache: unique tensors, and which of them each KV cache group's blocks live in."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def block_bytes(self, group_idx: int) -> int:
        """Bytes of one block of a group over all its tensors, without padding."""
        return sum(ref.page_size_bytes for ref in self.group_data_refs[group_idx])
