"""A device with streams that runs everything as late, and in as strange an order, as it may.

No work runs until a thread waits for an event or polls one. Then the device takes work from random
streams, each at another pace, until that event is passed. A copier without a fence copies the wrong
bytes here in most sets of some dozens of runs; a real device seldom shows it. The memory is that of
CPU tensors.
"""

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvoffload.io.lent_memory import LentMemory
from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part
from kvoffload.transfer.slab import Slab
from tests.support.index_kernels import IndexKernels


class LateEvent:
    """A point in a stream of a :class:`LateDevice`."""

    def __init__(self, device: "LateDevice") -> None:
        self.passed_at_s: float | None = None
        self._device = device

    @property
    def passed(self) -> bool:
        """Whether everything before it has run."""
        return self.passed_at_s is not None

    def query(self) -> bool:
        """Run a little work, perhaps; then answer."""
        self._device.run_some()
        return self.passed

    def synchronize(self) -> None:
        """Let things happen until it is passed."""
        self._device.run_until(self)

    def elapsed_time(self, end_event: "LateEvent") -> float:
        """See :meth:`kvoffload.transfer.cuda.torch_device.CudaEvent.elapsed_time`."""
        if self.passed_at_s is None or end_event.passed_at_s is None:
            raise RuntimeError("an event is asked for its time before it is passed")
        return (end_event.passed_at_s - self.passed_at_s) * 1e3


class LateStream:
    """A queue of work of a :class:`LateDevice`."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.work: deque[LateEvent | Callable[[], object]] = deque()
        self.pace = 1.0
        self.clock_s = 0.0
        """The time on a device whose streams run in parallel."""

    def enqueue(self, work: Callable[[], object]) -> None:
        """Run ``work`` after the queued work, some time."""
        with self._device.lock:
            self.work.append(work)

    def wait_event(self, event: LateEvent) -> None:
        """See :meth:`kvoffload.transfer.cuda.torch_device.CudaStream.wait_event`."""
        with self._device.lock:
            self.work.append(event)

    def record_event(self, *, timed: bool = False) -> LateEvent:
        """Do as :class:`kvoffload.transfer.cuda.torch_device.CudaStream`; every event is timed."""
        event = LateEvent(self._device)

        def arrive() -> None:
            event.passed_at_s = self.clock_s

        self.enqueue(arrive)
        return event

    def synchronize(self) -> None:
        """See :meth:`kvoffload.transfer.cuda.torch_device.CudaStream.synchronize`."""
        LateStream.record_event(self).synchronize()

    def step(self) -> bool:
        """Do the next piece of work; False if there is none, or it has to wait."""
        while self.work and isinstance(event := self.work[0], LateEvent):
            if event.passed_at_s is None:
                return False
            self.clock_s = max(self.clock_s, event.passed_at_s)
            self.work.popleft()
        if not self.work:
            return False
        work = self.work.popleft()
        assert not isinstance(work, LateEvent)
        begun_s = time.perf_counter()
        work()
        self.clock_s += time.perf_counter() - begun_s
        return True


class LateMemory:
    """Host memory of a :class:`LateDevice`, pinned as far as tests say."""

    def __init__(self, address: int, pinned_bytes: int) -> None:
        self.address, self.pinned_bytes = address, pinned_bytes
        self.portion_bytes = 1 << 60

    def is_settled(self, end: int) -> bool:
        """See :class:`kvoffload.transfer.cuda.pinning.Pinning`."""
        return self.pinned_bytes >= end


class LateDevice:
    """See the module; a :class:`kvoffload.transfer.cuda.torch_device.CudaDevice`.

    Args:
        kv_caches: CPU tensors.
        slab: host memory.
        seed: of all choices.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, slab: Slab, seed: int) -> None:
        self.lock = threading.RLock()
        self.draw = random.Random(seed)
        self.streams: list[LateStream] = []
        self.engine = self.new_stream()
        """The engine's stream: tests enqueue there the effects of a forward pass."""
        self.failures: deque[Exception] = deque()
        """Raised by the next calls that enqueue copies, one each."""
        self.broken: Exception | None = None
        """The error of earlier work: every event raises it from then on."""
        self.is_closed = False
        self.batches = True
        """Whether several copies are one call."""
        self.slab = LateMemory(slab.address, slab.num_bytes)
        self._kernels = IndexKernels(kv_caches)
        self._slab = slab
        self._stages: list[torch.Tensor] = []

    # ---- what happens, and when ----

    def run_some(self) -> None:
        """Run up to three pieces of work."""
        with self.lock:
            for _ in range(self.draw.randrange(4)):
                self._step()
            self._raise()

    def run_until(self, event: LateEvent) -> None:
        """Run work until an event is passed."""
        while True:
            with self.lock:
                for _ in range(8):
                    if event.passed or self.broken:
                        break
                    if not self._step():
                        raise RuntimeError("an event is waited for that nothing leads to")
                self._raise()
                if event.passed:
                    return
            time.sleep(0)  # or an enqueuing thread waits for a whole switch interval at the lock

    def run_all(self) -> None:
        """Run everything that is queued."""
        with self.lock:
            while self._step():
                pass
            self._raise()

    def _step(self) -> bool:
        draw = self.draw
        if draw.random() < 0.05:
            for stream in self.streams:
                stream.pace = draw.choice((0.02, 0.3, 1.0, 3.0))
        order = sorted(self.streams, key=lambda stream: draw.random() ** (1 / stream.pace))
        try:
            return any(stream.step() for stream in reversed(order))
        except Exception as error:
            self.broken = error
            return True

    def _raise(self) -> None:
        if self.broken is not None:
            raise RuntimeError("the device is broken") from self.broken

    # ---- the calls of a copier ----

    def prepare(self, parts: Sequence[Part]) -> bool:
        """Answer that pages can be staged: torch's own operations need no preparation."""
        return True

    def enter_thread(self) -> None:
        """Do nothing: there is one device."""

    def engine_event(self) -> LateEvent:
        """Mark the engine's stream."""
        return self.engine.record_event()

    def new_stream(self) -> LateStream:
        stream = LateStream(self)
        with self.lock:
            self.streams.append(stream)
        return stream

    def new_stage(self, num_bytes: int) -> torch.Tensor:
        """Return memory full of noise."""
        whole = -(-num_bytes // 8) * 8
        stage = torch.randint(-128, 127, (whole,), dtype=torch.int8)
        self._stages.append(stage)
        return stage

    def new_tables(self, count: int, num_blocks: int) -> list[BlockTable]:
        """Return tables whose device halves name block 0 everywhere."""
        length = 3 * num_blocks
        return [
            BlockTable(np.zeros(length, np.int64), torch.zeros(length, dtype=torch.int64))
            for _ in range(count)
        ]

    def upload(self, stream: LateStream, table: BlockTable) -> None:
        length = 3 * table.count
        source = torch.from_numpy(table.host)
        stream.enqueue(lambda: table.device[:length].copy_(source[:length]))

    def move(
        self,
        stream: LateStream,
        part: Part,
        table: BlockTable,
        stage: torch.Tensor,
        to_stage: bool,
    ) -> None:
        frozen = _frozen(table)
        stream.enqueue(lambda: self._kernels.move(part, frozen, stage, to_stage))

    def has_batches(self, memory: "LateMemory", end: int) -> bool:
        return self.batches

    def copy(self, stream: LateStream, copies: Copies, to_host: bool, memory: "LateMemory") -> None:
        """Copy in any order; read some of the slab's bytes early, as the driver is allowed to."""
        columns = list(zip(*(row.tolist() for row in copies), strict=True))
        for device, host, num_bytes in self.draw.sample(columns, len(columns)):
            if self.failures:
                raise self.failures.popleft()
            ends = (memory.address + host, device)
            target, source = ends if to_host else ends[::-1]
            if not to_host and self.draw.random() < 0.5:
                early = ctypes.string_at(source, num_bytes)
                stream.enqueue(lambda t=target, e=early: ctypes.memmove(t, e, len(e)))  # type: ignore[misc]
                continue
            stream.enqueue(lambda t=target, s=source, n=num_bytes: ctypes.memmove(t, s, n))  # type: ignore[misc]

    def lent(self, memory: LentMemory, end: int) -> "LateMemory":
        """Do as :class:`kvoffload.transfer.cuda.torch_device.CudaDevice`, but pin nothing."""
        whole = np.frombuffer(memory.bytes, np.int8)
        return LateMemory(whole.ctypes.data, len(whole))

    def can_pin_lent(self) -> bool:
        return True

    def stop_pinning(self) -> None:
        self.slab.pinned_bytes = self._slab.num_bytes

    def stats(self) -> dict[str, str | int]:
        """Name itself."""
        return {"copier": "simulated"}

    def close(self) -> None:
        """Note that it was called."""
        self.is_closed = True


def _frozen(table: BlockTable) -> BlockTable:
    """Keep the number that a launch takes by value; the table's memory is shared."""
    frozen = BlockTable(table.host, table.device)
    frozen.count = table.count
    return frozen
