"""The interface of a device with streams, as the copier needs it.

:class:`kvoffload.transfer.cuda.torch_device.CudaDevice` is the real device. The simulated device
in :mod:`tests.support.late_device` runs all work as late, and in as strange an order, as the fences
allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvoffload.io.lent_memory import LentMemory
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.layout import Numbers, Region

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in a stream: passed when everything enqueued before it has run. For any thread."""

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

    def fill(self, rows: Sequence[Numbers]) -> None:
        """Write the three rows, packed: one upload moves them."""
        self.count = len(rows[0])
        np.concatenate(rows, out=self.host[: 3 * self.count])


class HostMemory(Protocol):
    """Host memory that a device copies from and to: the slab, or memory of a server to read."""

    address: int
    pinned_bytes: int
    """So many bytes from the start on are pinned."""
    portion_bytes: int
    """Where a multiple of this lies, a copy must be cut."""

    def is_settled(self, end: int) -> bool:
        """Whether it is pinned up to here, or copies need not wait for that; never blocks."""
        ...


class Device(Protocol):
    """Enqueues work on streams and allocates memory. Errors of its library pass through."""

    @property
    def slab(self) -> HostMemory:
        """The slab."""
        ...

    def lent(self, memory: LentMemory, end: int) -> HostMemory:
        """Return memory of a server, which is pinned up to here, and farther by a later call.

        It is unpinned when it is left.
        """
        ...

    def can_pin_lent(self) -> bool:
        """Whether servers' memory can be pinned, as far as is known; never blocks."""
        ...

    def prepare(self, parts: Sequence[Part]) -> bool:
        """Compile the kernels for these parts; False if the device has no kernels."""
        ...

    def enter_thread(self) -> None:
        """Make the device the current one of the calling thread."""
        ...

    def engine_event(self) -> Event:
        """Mark the engine's current stream on the calling thread as it is now."""
        ...

    def new_stream(self) -> Stream:
        """Make a stream of the highest priority, which no one else uses."""
        ...

    def new_stage(self, num_bytes: int) -> "torch.Tensor":
        """Allocate device memory, as one row of bytes, that no earlier work uses.

        Raises:
            MemoryError: the device has not that much left.
        """
        ...

    def new_tables(self, count: int, num_blocks: int) -> Sequence[BlockTable]:
        """Allocate tables for up to ``num_blocks`` each, that no earlier work uses.

        Raises:
            MemoryError: the device has not that much left.
        """
        ...

    def upload(self, stream: Stream, table: BlockTable) -> None:
        """Copy the table to the device."""
        ...

    def move(
        self, stream: Stream, part: Part, table: BlockTable, stage: "torch.Tensor", to_stage: bool
    ) -> None:
        """Gather pages into staging memory, chunk after chunk; or scatter them to their blocks."""
        ...

    def has_batches(self, memory: HostMemory, end: int) -> bool:
        """Whether several copies, up to here, are one call of the driver; may change."""
        ...

    def copy(self, stream: Stream, copies: Copies, to_host: bool, memory: HostMemory) -> None:
        """Copy between device memory and host memory, in any order among the copies.

        The places are settled. The bytes in host memory do not change meanwhile, so they may be
        read earlier than the stream's order says.
        """
        ...

    def stop_pinning(self) -> None:
        """Pin no more host memory: all of it is settled."""
        ...

    def stats(self) -> dict[str, str | int]:
        """Name the ways taken, and why."""
        ...

    def close(self) -> None:
        """Unpin host memory and free the streams; no copy may run any more."""
        ...
