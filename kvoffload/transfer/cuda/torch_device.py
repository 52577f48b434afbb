"""A CUDA device through torch, and through Triton and cuda-bindings if they are installed."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch

from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda.device import BlockList, Event, Part, Run, Span, Stream
from kvoffload.transfer.cuda.kernels import IndexKernels, Kernels
from kvoffload.transfer.cuda.pinning import Pinning, numa_node_of
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda
"""Typed as Any, because most of it has no annotations."""

LOWEST_PRIORITY = 0
"""CUDA has none lower. Engine streams with a negative number go first."""
_under_inference_mode = torch.inference_mode()
"""Torch writes tensors made under inference mode only on threads in that mode."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``."""
_CAPTURE_MODE_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``."""
_TABLE_BLOCKS = 4096
"""The least length of a table, so that nearly every transfer can use any table."""
_DRIVER_WITH_BATCHES = 12080


class BatchedCopies:
    """``cudaMemcpyBatchAsync`` of cuda-bindings: many copies in one call.

    Raises:
        RuntimeError: it cannot work here; gives the reason.
    """

    def __init__(self, device_index: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise RuntimeError(f"no cuda-bindings: {error}") from error
        if not hasattr(runtime, "cudaMemcpyBatchAsync"):
            raise RuntimeError("cuda-bindings older than 12.8")
        self._runtime = runtime
        driver = self._checked(runtime.cudaDriverGetVersion())
        if driver < _DRIVER_WITH_BATCHES:
            raise RuntimeError(f"the driver is of CUDA {driver // 1000}.{driver % 1000 // 10}")
        # Elsewhere (WSL) registered memory has another address on the GPU.
        same_pointer = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not self._checked(runtime.cudaDeviceGetAttribute(same_pointer, device_index)):
            raise RuntimeError("the GPU does not use the host's addresses")
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def copy(self, stream: int, runs: Sequence[Run], slab_address: int, to_host: bool) -> None:
        """Enqueue the runs, in any order."""
        device = [run.buffer.data_ptr() + run.at for run in runs]
        host = [slab_address + run.host_at for run in runs]
        sizes = [run.num_bytes for run in runs]
        targets, sources = (host, device) if to_host else (device, host)
        # CUDA 12 also returns which copy failed; only the error, always first, is used.
        self._checked(
            self._runtime.cudaMemcpyBatchAsync(
                targets, sources, sizes, len(sizes), self._attributes, [0], 1, stream
            )
        )

    def _checked(self, returned: Any) -> Any:
        error, *values = returned
        if int(error) != 0:
            raise RuntimeError(f"{error!s} ({int(error)})")
        return values[0] if values else None


class CudaStream:
    """A torch stream whose events let waiting threads sleep."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.torch = stream

    def wait_event(self, event: Any) -> None:
        self.torch.wait_event(event)

    def record_event(self, *, timed: bool = False) -> Event:
        event = _cuda.Event(enable_timing=timed, blocking=True)
        event.record(self.torch)
        return cast(Event, event)

    def synchronize(self) -> None:
        self.torch.synchronize()


class CudaDevice:
    """The GPU of the caches. It begins pinning the slab at once.

    Args:
        kv_caches: tensors of one CUDA device.
        slab: host memory, to be pinned.
        triton: whether the Triton kernel may be used; for measurements.
        batches: whether batched copies may be used; for measurements.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slab: Slab,
        *,
        triton: bool = True,
        batches: bool = True,
    ) -> None:
        self._device = kv_caches.tensors[0].tensor.device
        self._kv_caches = kv_caches
        self._slab = slab
        self._host = torch.from_numpy(slab.flat)
        self._kernels: Kernels = IndexKernels(kv_caches)
        self._triton = triton
        self._batches: BatchedCopies | None = None
        self._why_not: dict[str, str] = {}
        """For each choice, why the better way is not taken."""
        if batches:
            try:
                with torch.cuda.device(self._device):
                    self._batches = BatchedCopies(torch.cuda.current_device())
            except Exception as error:
                self._why_not["copies"] = str(error)
        self._pinning = Pinning(slab, self._pin, self._unpin, self._numa_node())

    def prepare(self, parts: Sequence[Part]) -> None:
        """Compile and upload the kernels' data for these parts; synchronises the device."""
        if not self._triton or not parts:
            return
        try:
            from kvoffload.transfer.cuda.triton_kernel import TritonKernels

            kernels = TritonKernels(self._kv_caches)
            with torch.cuda.device(self._device):
                table = self.new_table(0, CudaStream(torch.cuda.current_stream()))
                for part in parts:
                    kernels.prepare(part, table)
                torch.cuda.synchronize()
        except Exception as error:  # any error of a compiler
            self._why_not["kernels"] = f"{type(error).__name__}: {error}"
        else:
            self._kernels = kernels

    # ---- host memory ----

    def _pin(self, address: int, length: int) -> None:
        self.enter_thread()
        cudart = _cuda.cudart()
        error = cudart.cudaHostRegister(address, length, _PORTABLE)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(error)}")

    def _unpin(self, address: int) -> None:
        self.enter_thread()
        cudart = _cuda.cudart()
        error = cudart.cudaHostUnregister(address)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostUnregister: {cudart.cudaGetErrorString(error)}")

    def _numa_node(self) -> int | None:
        properties: Any = torch.cuda.get_device_properties(self._device)
        names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
        numbers: list[Any] = [getattr(properties, name, None) for name in names]
        if None in numbers:  # torch before 2.8
            return None
        return numa_node_of("{:04x}:{:02x}:{:02x}.0".format(*numbers))

    # ---- streams and memory ----

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        _allow_captures()

    def engine_event(self) -> Event:
        return CudaStream(torch.cuda.current_stream(self._device)).record_event()

    def new_stream(self) -> Stream:
        return CudaStream(_cuda.Stream(self._device, priority=LOWEST_PRIORITY))

    def new_stage(self, num_bytes: int) -> torch.Tensor:
        stage = torch.empty(-(-num_bytes // 8) * 8, dtype=torch.int8, device=self._device)
        # The allocator may return memory that was just freed on this thread's stream and is still
        # in use there. Our streams are not ordered behind that stream.
        torch.cuda.synchronize(self._device)
        return stage

    def new_table(self, num_blocks: int, stream: Stream) -> BlockList:
        length = 3 * max(_TABLE_BLOCKS, num_blocks)
        pinned = torch.empty(length, dtype=torch.int64, pin_memory=True)
        # Allocated on the stream that uploads it: there the allocator orders memory behind its
        # last use, and other streams wait for the upload.
        with torch.cuda.stream(_torch(stream)):
            device = torch.empty(length, dtype=torch.int64, device=self._device)
        return BlockList(pinned.numpy(), pinned, device)

    # ---- work ----

    @_under_inference_mode
    def upload(self, stream: Stream, table: BlockList) -> None:
        length = 3 * table.count
        with torch.cuda.stream(_torch(stream)):
            table.device[:length].copy_(table.pinned[:length], non_blocking=True)

    @_under_inference_mode
    def gather(self, stream: Stream, part: Part, span: Span, stage: torch.Tensor) -> None:
        with torch.cuda.stream(_torch(stream)):
            self._kernels.gather(part, span, stage)

    @_under_inference_mode
    def scatter(self, stream: Stream, part: Part, span: Span, stage: torch.Tensor) -> None:
        with torch.cuda.stream(_torch(stream)):
            self._kernels.scatter(part, span, stage)

    @_under_inference_mode
    def copy(self, stream: Stream, runs: Sequence[Run], to_host: bool) -> None:
        pinned, others = self._pinning.ready(runs)
        # The other direction's thread may drop the batches meanwhile.
        batches = self._batches
        if batches is not None and len(pinned) > 1:
            try:
                batches.copy(_torch(stream).cuda_stream, pinned, self._slab.address, to_host)
            except Exception as error:
                # Copies of the batch that were enqueued are repeated below: the same bytes.
                self._why_not["copies"] = str(error)
                self._batches = None
                log.warning("batched copies do not work here (%s); copying one by one", error)
            else:
                pinned = []
        with torch.cuda.stream(_torch(stream)):
            for run in (*pinned, *others):
                device = run.buffer[run.at : run.at + run.num_bytes]
                host = self._host[run.host_at : run.host_at + run.num_bytes]
                if to_host:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)

    def stats(self) -> dict[str, str | int]:
        why_not = dict(self._why_not)
        if self._pinning.error is not None:
            why_not["pinned"] = str(self._pinning.error)
        return {
            "copier": "cuda",
            "device": torch.cuda.get_device_name(self._device),
            "kernels": self._kernels.name,
            "copies": "batched" if self._batches is not None else "one by one",
            "pinned_bytes": self._pinning.pinned_bytes,
            **{f"why_not_{choice}": why for choice, why in why_not.items()},
        }

    def close(self) -> None:
        self._pinning.close()


def _torch(stream: Stream) -> torch.cuda.Stream:
    return cast(CudaStream, stream).torch


def _allow_captures() -> None:
    """Keep this thread's calls from breaking a CUDA graph that the engine captures meanwhile.

    A capture forbids some calls to all threads, such as registering memory, unless a thread
    declares that its calls are no part of any graph.
    """
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    try:
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        log.info("a CUDA graph captured while memory is pinned may fail: %s", error)
