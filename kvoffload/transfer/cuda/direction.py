"""One direction of a copier: its streams, its staging memory, and what is in flight.

Copies go over two streams in turns, and each batch begins when the one before it has ended. A copy
engine leaves a stream only where the stream has to wait. Otherwise the engine's own small copies,
as of token ids, would wait until all that is enqueued here has been copied. Kernels have a stream
of their own, so that one portion is gathered while another is copied.

The streams are few. CUDA maps all streams of a process to eight hardware queues by default. A
stream of the engine that shares one with a stream that waits, waits too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.transfer.cuda.copy_plan import CopyPlan
from kvoffload.transfer.cuda.staged_blocks import BlockTable
from kvoffload.transfer.cuda.torch_device import CudaDevice, CudaEvent, CudaStream

if TYPE_CHECKING:
    import torch

STAGES = 2
"""In each direction: one is filled or emptied while the other is copied."""
TABLES = 16
"""Portions of a direction in flight, whose kernels read them."""
BATCH_BYTES = 8 << 20
"""Of copies that the driver gets in one call: 0.2 ms of the bus, which an engine's small copy may
have to wait."""
COPY_BYTES = 2 << 20
"""The most bytes of one copy of a batch."""
MOST_CALLS, OTHER_CALLS = 512, 8
MOST_BYTES = 256 << 20
"""Copies in flight. A stream takes about a thousand waiting calls; a further one blocks the
launching thread until the engine's work before the copies is done. Each step of copies has some
calls more, for events. The bytes are 5 ms of the bus, longer than the thread is away."""


@dataclass(eq=False)
class Stage:
    """Staging memory."""

    memory: "torch.Tensor"
    used: CudaEvent | None = None
    """After it, neither a copy nor a kernel uses the memory."""


class Staging:
    """The staging memory of one direction.

    Raises:
        MemoryError: the device has no room for it.
    """

    def __init__(self, device: CudaDevice, plan: CopyPlan) -> None:
        self.stages: deque[Stage] = deque()
        self.tables: deque[BlockTable] = deque()
        """The leftmost of either was used longest ago."""
        if plan.table_blocks:
            self.stages.extend(Stage(device.new_stage(plan.stage_bytes)) for _ in range(STAGES))
            self.tables.extend(device.new_tables(TABLES, plan.table_blocks))


class Direction:
    """To the host, or from it; for the launching thread alone."""

    def __init__(self, device: CudaDevice, staging: Staging) -> None:
        self.stages, self.tables = staging.stages, staging.tables
        self.kernels = device.new_stream()
        self._buses = deque(device.new_stream() for _ in range(2))
        self.last: CudaEvent | None = None
        """The end of the last batch."""
        self._flying: deque[tuple[CudaEvent, float]] = deque()
        """Events after copies, and the share of these in what may be in flight."""

    @property
    def streams(self) -> Sequence[CudaStream]:
        """All of them."""
        return [self.kernels, *self._buses]

    def next_stream(self) -> CudaStream:
        """Return the stream of the next batch, which begins when the one before it has ended."""
        self._buses.rotate()
        stream = self._buses[0]
        if self.last is not None:
            stream.wait_event(self.last)
        return stream

    def has_room(self) -> bool:
        """Whether the driver takes further copies at once."""
        flying = self._flying
        while flying and flying[0][0].query():
            flying.popleft()
        return sum(share for _, share in flying) < 1

    def note(self, calls: int, num_bytes: int) -> None:
        """Count copies that end with the last batch."""
        if self.last is not None:
            share = max((calls + OTHER_CALLS) / MOST_CALLS, num_bytes / MOST_BYTES)
            self._flying.append((self.last, share))
