"""What the copier needs of a device with streams: few verbs, so that a simulation can stand in.

:class:`kvoffload.transfer.cuda.torch_device.CudaDevice` is the real one. The simulation in
:mod:`tests.support.late_device` runs everything as late, and in as strange an order, as the
fences allow.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.layout import Region

if TYPE_CHECKING:
    import torch

Numbers = npt.NDArray[np.int64]


class Event(Protocol):
    """A point in a stream: passed when everything enqueued before it has run."""

    def query(self) -> bool:
        """Whether it is passed; never blocks. Raises what went wrong on the device."""
        ...

    def synchronize(self) -> None:
        """Block until it is passed, without spinning. Raises what went wrong on the device."""
        ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds on the device from this event to a later one; both passed, both timed."""
        ...


class Stream(Protocol):
    """A queue of work that the device carries out in order."""

    def wait_event(self, event: Event) -> None:
        """Hold back what is enqueued from now on until ``event`` is passed."""
        ...

    def record_event(self, *, timed: bool = False) -> Event:
        """Mark the stream as it is now; ``timed`` if somebody asks for the time in between."""
        ...

    def synchronize(self) -> None:
        """Block until the stream is empty. Raises what went wrong on the device."""
        ...


class Part(NamedTuple):
    """Consecutive regions of a group's chunks, which go through staging memory together."""

    group_idx: int
    regions: tuple[Region, ...]
    start: int
    """Where the first begins in a chunk."""
    per_chunk: int
    num_bytes: int
    """Of a whole chunk's regions; they lie in staging memory as they lie in a slot."""


class Run(NamedTuple):
    """Bytes that lie side by side at both ends of a copy between device and host."""

    buffer: "torch.Tensor"
    """Device memory as one row of bytes."""
    at: int
    host_at: int
    """Where in the slab."""
    num_bytes: int


class Table:
    """Where each block of a transfer goes, in pinned memory and again on the device.

    Three rows of ``count``: block id, number of its chunk, place in the chunk. ``count`` is that of
    the transfer, the arrays are longer.
    """

    def __init__(self, host: Numbers, pinned: "torch.Tensor", device: "torch.Tensor") -> None:
        self.host = host
        """The same memory as ``pinned``."""
        self.pinned = pinned
        self.device = device
        self.count = 0

    def fill(self, rows: Sequence[Numbers]) -> None:
        """Write the three rows, packed: one upload moves them."""
        self.count = len(rows[0])
        np.concatenate(rows, out=self.host[: 3 * self.count])


class Span(NamedTuple):
    """Rows of a table that one call moves: ``start`` to ``start + length``."""

    table: Table
    start: int
    length: int
    first_chunk: int
    """The chunk that lies at the beginning of the staging memory."""


class Device(Protocol):
    """Everything here only enqueues work, and does so on the streams given.

    Streams, events and memory come from here and go when nobody holds them any more. Raises
    whatever the device's library raises.
    """

    def prepare(self, parts: Sequence[Part]) -> None:
        """Make ready to gather and scatter these parts, so that nothing is compiled later."""
        ...

    def enter_thread(self) -> None:
        """Make the device the current one of the calling thread."""
        ...

    def engine_event(self) -> Event:
        """Mark the engine's current stream on the calling thread as it is now."""
        ...

    def new_stream(self) -> Stream:
        """Make a stream whose kernels give way to the engine's."""
        ...

    def new_stage(self, num_bytes: int) -> "torch.Tensor":
        """Allocate device memory, as one row of bytes, that no earlier work still uses."""
        ...

    def new_table(self, num_blocks: int, stream: Stream) -> Table:
        """Allocate a table for up to ``num_blocks``, first used on ``stream``."""
        ...

    def upload(self, stream: Stream, table: Table) -> None:
        """Copy the table to the device."""
        ...

    def gather(self, stream: Stream, part: Part, span: Span, stage: "torch.Tensor") -> None:
        """Bring pages of blocks into staging memory, chunk after chunk."""
        ...

    def scatter(self, stream: Stream, part: Part, span: Span, stage: "torch.Tensor") -> None:
        """Bring pages from staging memory to their blocks."""
        ...

    def copy(self, stream: Stream, runs: Sequence[Run], to_host: bool) -> None:
        """Copy between device memory and the slab, in any order among the runs."""
        ...

    def stats(self) -> dict[str, str | int]:
        """Say which of several ways are taken, and why."""
        ...

    def close(self) -> None:
        """Unpin host memory; nothing runs any more."""
        ...
