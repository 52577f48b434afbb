"""Copies between device memory and host memory, as arrays: no Python object for a page.

A large transfer has hundreds of thousands of pages. numpy describes, joins and cuts them in a
fraction of the time that the bus needs. The driver takes the arrays as they are.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.layout import Numbers, numbered


class Copies(NamedTuple):
    """Bytes that are contiguous at both ends, one copy a column."""

    device: Numbers
    """Addresses in device memory."""
    host: Numbers
    """Places in the slab, or in memory of a server."""
    sizes: Numbers

    def take(self, which: npt.NDArray[np.bool_]) -> "Copies":
        """Return some of the copies."""
        return Copies(*(row[which] for row in self))

    def joined(self) -> "Copies":
        """Join each copy with the copy before it where both ends are contiguous."""
        device, host, sizes = self
        goes_on = (device[:-1] + sizes[:-1] == device[1:]) & (host[:-1] + sizes[:-1] == host[1:])
        if not goes_on.any():
            return self
        begins = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        return Copies(device[begins], host[begins], np.add.reduceat(sizes, begins))

    def within_registrations(self, portion_bytes: int) -> "Copies":
        """Cut copies where a registration of host memory ends: CUDA refuses to cross two."""
        return self._cut(self.host % portion_bytes, portion_bytes)

    def of_at_most(self, num_bytes: int) -> "Copies":
        """Cut long copies."""
        return self._cut(np.zeros_like(self.host), num_bytes)

    def batches(self, num_bytes: int) -> Iterator["Copies"]:
        """Divide the copies into runs of about so many bytes: up to one copy more."""
        starts = self.sizes.cumsum() - self.sizes
        ends = np.flatnonzero(np.diff(starts // num_bytes)) + 1
        for begin, end in itertools.pairwise((0, *ends.tolist(), len(starts))):
            yield Copies(*(row[begin:end] for row in self))

    def _cut(self, begins: Numbers, unit: int) -> "Copies":
        """Cut copies that begin at these places at each multiple of the unit."""
        counts = (begins + self.sizes - 1) // unit + 1
        if counts.max(initial=1) == 1:
            return self
        which, nth = numbered(counts)
        begin, size = begins[which], self.sizes[which]
        first = np.maximum(nth * unit - begin, 0)
        last = np.minimum((nth + 1) * unit - begin, size)
        return Copies(self.device[which] + first, self.host[which] + first, last - first)
