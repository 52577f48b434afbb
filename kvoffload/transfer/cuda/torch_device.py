"""A CUDA device through torch and the driver, and through Triton if it is installed."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvoffload.config import human_bytes
from kvoffload.io.lent_memory import LentMemory
from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.copies import Copies
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.pinning import CLOSE_TIMEOUT_S, LentPinning, Pinning, numa_node_of
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda
"""Typed as Any, because most of it has no annotations."""


class CudaEvent:
    """A torch event for threads of any current device.

    torch asks for an event with the thread's own current device. On a thread without one that is
    the first GPU, where the question would take memory for a context. The device is named by its
    number, which torch takes without a look at it: an engine's thread asks at each step.
    """

    def __init__(self, stream: Any, *, timed: bool) -> None:
        self._device = stream.device.index
        self.torch = _cuda.Event(enable_timing=timed, blocking=True)
        self.torch.record(stream)

    def query(self) -> bool:
        """Whether all work enqueued before it has run; never blocks. Raises the device's error."""
        with torch.cuda.device(self._device):
            return bool(self.torch.query())

    def synchronize(self) -> None:
        """Block until it is passed, without spinning. Raises the device's error."""
        with torch.cuda.device(self._device):
            self.torch.synchronize()

    def elapsed_time(self, end_event: "CudaEvent") -> float:
        """Milliseconds from this event to a later one; both passed, both timed."""
        with torch.cuda.device(self._device):
            return float(self.torch.elapsed_time(end_event.torch))


class CudaStream:
    """A torch stream whose events let waiting threads sleep."""

    def __init__(self, stream: Any) -> None:
        self.torch = stream

    def wait_event(self, event: CudaEvent) -> None:
        """Delay the work enqueued from now on until ``event`` is passed."""
        self.torch.wait_event(event.torch)

    def record_event(self, *, timed: bool = False) -> CudaEvent:
        """Mark the stream as it is now; ``timed`` if the event is used to measure time."""
        return CudaEvent(self.torch, timed=timed)

    def synchronize(self) -> None:
        """Block until the stream is empty. Raises the device's error."""
        self.torch.synchronize()


class CudaDevice:
    """The GPU of the caches. It begins pinning the slab at once.

    Args:
        kv_caches: tensors of one CUDA device.
        slab: host memory, to be pinned.
        triton: whether the Triton kernel may be used; for measurements.
        batches: whether batched copies may be used.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, slab: Slab, *, triton: bool = True, batches: bool = True
    ) -> None:
        self._device = kv_caches.tensors[0].tensor.device
        self._kv_caches = kv_caches  # keeps the tensors' memory
        self._driver = Driver(self._device.index)
        self._streams: list[int] = []
        self._kernels: Any = None
        self._why_not = {} if triton else {"kernels": "not asked for"}
        """For each choice, why the better way is not taken."""
        if why := self._driver.why_no_batches() if batches else "not asked for":
            self._why_not["copies"] = why
        slab.keep_from_forks()
        if (node := self._numa_node()) is not None:
            slab.prefer_node(node)
        self.slab = Pinning(slab, self._pin, self._driver.unregister)
        self._lent: dict[int, LentPinning] = {}
        """Memory of servers, by its address."""
        self._lending = threading.Lock()

    def prepare(self, parts: Sequence[Part]) -> bool:
        """Compile the kernels, and upload what they need of these parts; wait for the device.

        False if the device has no kernels.
        """
        if not parts or "kernels" in self._why_not:
            return False
        try:
            with torch.cuda.device(self._device):
                self._kernels = self._compile(parts)
                torch.cuda.synchronize()
        except Exception as error:  # any error of a compiler
            self._why_not["kernels"] = f"{type(error).__name__}: {error}"
            return False
        return True

    def _compile(self, parts: Sequence[Part]) -> Any:
        from kvoffload.transfer.cuda.triton_kernel import TritonKernels

        return TritonKernels(self._kv_caches, parts)

    # ---- host memory ----

    def _pin(self, address: int, length: int, is_read_only: bool = False) -> None:
        # Without torch, whose code would abort the process if the interpreter ended meanwhile.
        self._driver.enter_thread()
        self._driver.register(address, length, is_read_only)

    def lent(self, memory: LentMemory, end: int) -> LentPinning:
        """Return memory of a server, which is pinned up to here, and farther by a later call.

        It is unpinned when it is left.
        """
        with self._lending:
            pinning = self._lent.get(memory.address)
            is_new = pinning is None
            if pinning is None:
                pin = partial(self._pin, is_read_only=True)
                pinning = LentPinning(memory, pin, self._driver.unregister)
                self._lent[memory.address] = pinning
        if is_new:
            memory.when_left(partial(self._leave, memory.address))
        pinning.use(end)
        return pinning

    def can_pin_lent(self) -> bool:
        """Whether servers' memory can be pinned, as far as is known; never blocks."""
        return all(pinning.error is None for pinning in list(self._lent.values()))

    def _leave(self, address: int) -> None:
        with self._lending:
            if (pinning := self._lent.pop(address, None)) is not None:
                pinning.begin_unpinning()

    def _numa_node(self) -> int | None:
        properties: Any = torch.cuda.get_device_properties(self._device)
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        numbers: list[Any] = [getattr(properties, name, None) for name in names]
        if None in numbers:  # torch before 2.8
            return None
        return numa_node_of("{:04x}:{:02x}:{:02x}.0".format(*numbers))

    # ---- streams and memory ----

    def enter_thread(self) -> None:
        """Make the device the current one of the calling thread."""
        torch.cuda.set_device(self._device)
        self._driver.enter_thread()

    def engine_event(self) -> CudaEvent:
        """Mark the engine's current stream on the calling thread as it is now."""
        return CudaEvent(torch.cuda.current_stream(self._device.index), timed=False)

    def new_stream(self) -> CudaStream:
        """Make a stream of the highest priority, which no one else uses."""
        # A stream of torch's pool may be in use elsewhere, even to capture a CUDA graph.
        stream = self._driver.new_stream()
        self._streams.append(stream)
        return CudaStream(_cuda.ExternalStream(stream, device=self._device))

    def new_stage(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory, as one row of bytes, that no earlier work uses.

        Raises:
            MemoryError: the device has not that much left.
        """
        stage = self._empty((-(-num_bytes // 8) * 8,), torch.int8)
        # The allocator may return memory that was just freed on this thread's stream and is still
        # in use there. Our streams are not ordered behind that stream.
        torch.cuda.synchronize(self._device)
        return stage

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            wanted = human_bytes(math.prod(shape) * dtype.itemsize)
            raise MemoryError(f"the GPU has no memory left for {wanted}") from error

    def new_tables(self, count: int, num_blocks: int) -> list[BlockTable]:
        """Allocate tables for up to ``num_blocks`` each, that no earlier work uses.

        Raises:
            MemoryError: the device has not that much left.
        """
        shape = (count, 3 * num_blocks)
        pinned = torch.empty(shape, dtype=torch.int64, pin_memory=True, device="cpu")
        device = self._empty(shape, torch.int64)
        torch.cuda.synchronize(self._device)  # as for a stage
        return [BlockTable(*rows) for rows in zip(pinned.numpy(), device, strict=True)]

    # ---- work ----

    def upload(self, stream: CudaStream, table: BlockTable) -> None:
        """Copy the table to the device."""
        num_bytes = table.count * 3 * table.host.itemsize
        ends = table.device.data_ptr(), table.host.ctypes.data, num_bytes
        self._enqueue(_handle(stream), Copies(*(np.array([each]) for each in ends)), False)

    def move(
        self,
        stream: CudaStream,
        part: Part,
        table: BlockTable,
        stage: torch.Tensor,
        to_stage: bool,
    ) -> None:
        """Gather pages into staging memory, chunk after chunk; or scatter them to their blocks.

        On a thread that uses no other stream of torch: this one stays its current one.
        """
        torch.cuda.set_stream(stream.torch)
        self._kernels.move(part, table, stage, to_stage)

    def copy(self, stream: CudaStream, copies: Copies, to_host: bool, memory: Pinning) -> None:
        """Copy between device memory and host memory, in any order among the copies.

        The places are settled. The bytes in host memory do not change meanwhile, so they may be
        read earlier than the stream's order says.
        """
        copies = copies.within_registrations(memory.portion_bytes)
        pinned = copies.host < memory.pinned_bytes
        copies = copies._replace(host=copies.host + memory.address)
        if not pinned.all():
            self._one_by_one(_handle(stream), copies.take(~pinned), to_host)
            copies = copies.take(pinned)
        self._enqueue(_handle(stream), copies, to_host, memory)

    def has_batches(self, memory: Pinning, end: int) -> bool:
        """Whether several copies, up to here, are one call of the driver; may change."""
        return self._takes_batches(memory) and end <= memory.pinned_bytes

    def _takes_batches(self, memory: Pinning | None) -> bool:
        is_refused = isinstance(memory, LentPinning) and not memory.takes_batches
        return "copies" not in self._why_not and not is_refused

    def _enqueue(
        self, stream: int, copies: Copies, to_host: bool, memory: Pinning | None = None
    ) -> None:
        """Copy from and to pinned memory, whose addresses the copies name.

        A single copy is a batch too: the older call takes a lock that other threads wait for.
        """
        if len(copies.sizes) and self._takes_batches(memory):
            try:
                self._driver.batch(stream, *copies, to_host)
            except Exception as error:
                # Copies of the batch that were enqueued are repeated below: the same bytes.
                if isinstance(memory, LentPinning):
                    memory.takes_batches = False
                else:
                    self._why_not["copies"] = str(error)
                log.warning("batched copies do not work here (%s); copying one by one", error)
            else:
                return
        self._one_by_one(stream, copies, to_host)

    def _one_by_one(self, stream: int, copies: Copies, to_host: bool) -> None:
        for device, host, num_bytes in zip(*(row.tolist() for row in copies), strict=True):
            self._driver.copy(stream, device, host, num_bytes, to_host)

    def stop_pinning(self) -> None:
        """Pin no more host memory: all of it is settled."""
        for pinning in self._pinnings():
            pinning.stop()

    def _pinnings(self) -> list[Pinning]:
        with self._lending:
            return [self.slab, *self._lent.values()]

    def stats(self) -> dict[str, str | int]:
        """Name the ways taken, and why."""
        error = self.slab.error
        why_not = {**self._why_not, **({"pinned": str(error)} if error else {})}
        return {
            "copier": "cuda",
            "device": torch.cuda.get_device_name(self._device),
            "kernels": "triton" if self._kernels is not None else "none",
            "copies": "batched" if self._takes_batches(None) else "one by one",
            "pinned_bytes": self.slab.pinned_bytes,
            **{f"why_not_{choice}": why for choice, why in why_not.items()},
        }

    def close(self) -> None:
        """Unpin host memory and free the streams; no copy may run any more."""
        pinnings, end_s = self._pinnings(), time.monotonic() + CLOSE_TIMEOUT_S
        for pinning in pinnings:
            pinning.begin_unpinning()
        for pinning in pinnings:
            pinning.close(max(0.0, end_s - time.monotonic()))
        while self._streams:
            self._driver.destroy_stream(self._streams.pop())


def _handle(stream: CudaStream) -> int:
    return int(stream.torch.cuda_stream)
