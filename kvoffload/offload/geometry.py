"""The division of host memory when KV cache groups have chunks of several sizes.

Memory consists of rows of one size (see :mod:`kvoffload.transfer.slab`). A chunk takes a whole
number of rows. Consecutive rows form an *extent*, which serves chunks of one size at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError


@dataclass(frozen=True)
class HostGeometry:
    """Rows, extents and sizes of the slots of one host tier."""

    row_bytes: int
    num_rows: int
    rows_of_group: tuple[int, ...]
    """Rows of a chunk of each KV cache group."""
    extent_rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different numbers of rows a slot may have."""
        return tuple(sorted(set(self.rows_of_group)))

    @property
    def num_extents(self) -> int:
        """Whole extents in the rows there are."""
        return self.num_rows // self.extent_rows

    @classmethod
    def plan(
        cls, total_bytes: int, chunk_bytes: Sequence[int], setting: str = "cpu_bytes"
    ) -> "HostGeometry":
        """Divide memory for chunks of these sizes, one for each group; 0 for a group never stored.

        Errors name ``setting``.

        Raises:
            ConfigError: the memory cannot hold one chunk of each size at a time.
        """
        sizes = sorted({size for size in chunk_bytes if size})
        row_bytes = gcd(*sizes)
        num_rows = total_bytes // row_bytes
        rows = [size // row_bytes for size in sizes]
        if num_rows < rows[-1] * len(rows):
            raise ConfigError(
                setting,
                human_bytes(total_bytes),
                f"must hold at least one chunk of each size, {human_bytes(sizes[-1])} the largest; "
                "raise it or lower blocks_per_chunk",
            )
        # A group that is never stored counts as the smallest size: it takes no slots.
        rows_of_group = tuple(max(size, sizes[0]) // row_bytes for size in chunk_bytes)
        return cls(row_bytes, num_rows, rows_of_group, _extent_rows(num_rows, rows))


def _extent_rows(num_rows: int, rows: Sequence[int]) -> int:
    """Choose an extent that is small against the memory and wastes little for any size."""
    largest = rows[-1]
    most = min(64 * largest, num_rows // (16 * len(rows)))
    best, least = largest, 1.0
    step = max(1, (most - largest) // 4096)  # a bounded search
    for extent in range(largest, max(largest, most) + 1, step):
        waste = max((extent % size) / extent for size in rows)
        if waste < least - 1e-3:
            best, least = extent, waste
    return best
