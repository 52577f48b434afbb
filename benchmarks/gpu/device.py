"""The CUDA calls of the first run; tests replace those that a stand-in for torch lacks."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_VERSION = 12080
"""The driver gives the function the signature of this version, also if the driver is newer."""
STREAM_ORDER, ANY_ORDER = 1, 3
"""Whether the source of a copy may change later in the stream, or never does."""
PREFER_OVERLAP = 1
"""A flag of copies: run while kernels do. From CUDA 13.1 on it asks for a copy engine."""


def pages(count: int, page_bytes: int) -> torch.Tensor:
    """Random rows of bytes on the device: a tensor of a KV cache."""
    return torch.empty((count, page_bytes), dtype=torch.int8, device="cuda").random_(-128, 127)


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Random numbers on the device, as a model's weights are."""
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")


def pinned(num_bytes: int) -> torch.Tensor:
    """Host memory that CUDA allocates and pins."""
    return torch.empty(num_bytes, dtype=torch.int8, pin_memory=True)


def new_stream() -> Any:
    return torch.cuda.Stream()


def using(stream: Any) -> Any:
    """Make a stream the current one of this thread, in a ``with``."""
    return torch.cuda.stream(stream)


def wait_for_stream() -> None:
    """Wait for the current stream alone, as an engine does after a step."""
    torch.cuda.current_stream().synchronize()


def wait_for_ends(streams: Sequence[Any]) -> None:
    """Wait for these streams asleep, as our own transfers are waited for."""
    events = [torch.cuda.Event(blocking=True) for _ in streams]
    for event, stream in zip(events, streams, strict=True):
        event.record(stream)
    for event in events:
        event.synchronize()


def numbers(count: int) -> torch.Tensor:
    """Room for so many numbers of 64 bits on the device."""
    return torch.empty(count, dtype=torch.int64, device="cuda")


def put(table: Any) -> None:
    """Copy a table of blocks to the device."""
    table.device.copy_(torch.from_numpy(table.host))


def kernels(caches: Any, part: Any, programs: int) -> Any:
    """Our Triton kernel for one part of a cache, with at most so many programs."""
    from kvoffload.transfer.cuda.triton_kernel import TritonKernels

    return TritonKernels(caches, [part], programs)


def wait_for_all() -> None:
    torch.cuda.synchronize()


def occupy(cycles: int) -> None:
    """Keep the current stream busy for so many clock cycles."""
    torch.cuda._sleep(cycles)


def capture(work: Callable[[], object]) -> Any:
    """Capture work in a CUDA graph, which runs when it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def allow_captures() -> None:
    """Keep calls of this thread from breaking a capture on another one, which forbids them."""
    relaxed = ctypes.c_int(2)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


class BatchCopy:
    """``cuMemcpyBatchAsync`` itself, on arrays of addresses: what pieces of a size can reach.

    Raises:
        RuntimeError: the driver does not have it.
    """

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # initialises CUDA
        function, status = ctypes.c_void_p(), ctypes.c_int()
        error = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(function),
            _VERSION,
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if error or not function.value:
            raise RuntimeError(f"no cuMemcpyBatchAsync: error {error}, status {status.value}")
        address, size = ctypes.c_void_p, ctypes.c_size_t
        signature = (address, address, address, size, address, address, size, address, address)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *signature)(function.value)

    def __call__(
        self,
        targets: np.ndarray,
        sources: np.ndarray,
        sizes: np.ndarray,
        stream: Any,
        order: int,
        flags: int = 0,
    ) -> None:
        """Enqueue copies of these addresses and sizes, all uint64.

        Raises:
            RuntimeError: the driver refused them.
        """
        # ``CUmemcpyAttributes``: the order, two locations of two words that may be 0, flags.
        attributes = np.array([order, 0, 0, 0, 0, flags], np.int32)
        begin, failed = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        arrays = targets, sources, sizes, attributes, begin, failed
        places = [array.ctypes.data for array in arrays]
        error = self._call(*places[:3], len(sizes), *places[3:5], 1, places[5], stream.cuda_stream)
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {error} at copy {failed[0]}")
