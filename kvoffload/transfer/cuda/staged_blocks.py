"""What a kernel gathers or scatters: a part of each chunk, and a table of the blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.transfer.layout import Numbers, Region

if TYPE_CHECKING:
    import torch

    from kvoffload.transfer.cuda.torch_device import CudaEvent


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive regions of a group's chunks that are staged together."""

    regions: tuple[Region, ...]
    start: int
    """Where the first region begins in a chunk."""
    per_chunk: int
    num_bytes: int
    """Bytes of a whole chunk's regions; they lie in staging memory as they lie in a slot."""


class BlockTable:
    """The blocks of one portion and their places, in pinned memory and again on the device.

    Three rows of ``count``: block id, number of its chunk, place in the chunk. ``count`` belongs to
    the portion; the arrays are longer.
    """

    def __init__(self, host: Numbers, device: "torch.Tensor") -> None:
        self.host = host
        self.device = device
        self.count = 0
        self.used: CudaEvent | None = None
        """After it, no kernel reads the table."""

    def fill(self, rows: Sequence[Numbers]) -> None:
        """Write the three rows, packed: one upload moves them."""
        self.count = len(rows[0])
        np.concatenate(rows, out=self.host[: 3 * self.count])
