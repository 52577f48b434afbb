"""The interface of a device with streams, as the copier needs it.

:class:`kvoffload.transfer.cuda.torch_device.CudaDevice` is the real device. The simulated device
in :mod:`tests.support.late_device` runs all work as late, and in as strange an order, as the fences
allow.
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
        """Whether it is passed; never blocks. Raises the device's error."""
        ...

    def synchronize(self) -> None:
        """Block until it is passed, without spinning. Raises the device's error."""
        ...

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to a later one; both passed, both timed."""
        ...


class Stream(Protocol):
    """A queue of work that the device carries out in order."""

    def wait_event(self, event: Event) -> None:
        """Delay the work enqueued from now on until ``event`` is passed."""
        ...

    def record_event(self, *, timed: bool = False) -> Event:
        """Mark the stream as it is now; ``timed`` if the event is used to measure time."""
        ...

    def synchronize(self) -> None:
        """Block until the stream is empty. Raises the device's error."""
        ...


class Part(NamedTuple):
    """Consecutive regions of a group's chunks that are staged together."""

    group_idx: int
    regions: tuple[Region, ...]
    start: int
    """Where the first region begins in a chunk."""
    per_chunk: int
    num_bytes: int
    """Bytes of a whole chunk's regions; they lie in staging memory as they lie in a slot."""


class Run(NamedTuple):
    """Bytes that are contiguous at both ends of a copy between device and host."""

    buffer: "torch.Tensor"
    """Device memory as one row of bytes."""
    at: int
    host_at: int
    """Their place in the slab."""
    num_bytes: int


class BlockList:
    """The blocks of a transfer and their places, in pinned memory and again on the device.

    Three rows of ``count``: block id, number of its chunk, place in the chunk. ``count`` belongs to
    the transfer; the arrays are longer.
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
    """Blocks of a list that one call moves: ``start`` to ``start + length``."""

    table: BlockList
    start: int
    length: int
    first_chunk: int
    """The chunk that lies at the beginning of the staging memory."""


class Device(Protocol):
    """Enqueues work on the streams given, and allocates streams, events and memory.

    These are freed with their last reference. Errors of the device's library pass through.
    """

    def prepare(self, parts: Sequence[Part]) -> None:
        """Compile the kernels for these parts, so that none is compiled later."""
        ...

    def enter_thread(self) -> None:
        """Make the device the current one of the calling thread."""
        ...

    def engine_event(self) -> Event:
        """Mark the engine's current stream on the calling thread as it is now."""
        ...

    def new_stream(self) -> Stream:
        """Make a stream of the lowest priority."""
        ...

    def new_stage(self, num_bytes: int) -> "torch.Tensor":
        """Allocate device memory, as one row of bytes, that no earlier work uses."""
        ...

    def new_table(self, num_blocks: int, stream: Stream) -> BlockList:
        """Allocate a list for up to ``num_blocks``, first used on ``stream``."""
        ...

    def upload(self, stream: Stream, table: BlockList) -> None:
        """Copy the list to the device."""
        ...

    def gather(self, stream: Stream, part: Part, span: Span, stage: "torch.Tensor") -> None:
        """Copy pages of blocks into staging memory, chunk after chunk."""
        ...

    def scatter(self, stream: Stream, part: Part, span: Span, stage: "torch.Tensor") -> None:
        """Copy pages from staging memory to their blocks."""
        ...

    def copy(self, stream: Stream, runs: Sequence[Run], to_host: bool) -> None:
        """Copy between device memory and the slab, in any order among the runs."""
        ...

    def stats(self) -> dict[str, str | int]:
        """Name the ways taken, and why."""
        ...

    def close(self) -> None:
        """Unpin host memory; no copy may run any more."""
        ...
