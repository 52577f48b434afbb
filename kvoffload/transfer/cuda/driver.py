"""Calls of NVIDIA's driver library through ctypes, which releases the GIL in each call.

torch has no batched copy, and it refuses to write tensors made under inference mode. Its streams
come from one pool for all callers. The driver takes numpy's arrays as they are.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.transfer.layout import Numbers

LIBRARY = "libcuda.so.1"
_BATCHES = (("cuMemcpyBatchAsync", True), ("cuMemcpyBatchAsync_v2", False))
"""Exported names, and whether the call has CUDA 12's place for the number of the failed copy."""
_NON_BLOCKING = 1
_CAPTURE_MODE_RELAXED = 2
_REGISTERED_FOR_ALL_CONTEXTS, _REGISTERED_TO_BE_READ = 1, 8
_SOURCE_IN_STREAM_ORDER, _SOURCE_AT_ANY_TIME = 1, 3
_REGISTERED_MEMORY_HAS_ONE_ADDRESS = 91
_ADDRESS = ctypes.c_uint64
_Attributes = ctypes.c_uint * 6
"""``CUmemcpyAttributes``: the order of access to sources, two hints of two numbers each, flags."""


class Driver:
    """The driver library, for one GPU.

    Args:
        device_index: of the GPU, whose context exists.
        library: the library's file.

    Raises:
        ConfigError: there is no such library.
    """

    def __init__(self, device_index: int, library: str = LIBRARY) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise ConfigError("kv_caches", "cuda", f"needs NVIDIA's driver ({error})") from error
        self._batch: Any = None
        for name, self._tells_failed in _BATCHES:
            if hasattr(self._cuda, name):
                self._batch = getattr(self._cuda, name)
                break
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device_index))
        # torch's context, which torch too keeps until the process ends.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        # By direction: targets in host memory (True) have sources that earlier work still writes.
        self._attributes = {
            True: _Attributes(_SOURCE_IN_STREAM_ORDER),
            False: _Attributes(_SOURCE_AT_ANY_TIME),
        }

    def why_no_batches(self) -> str:
        """Say why copies cannot be batched; nothing if they can."""
        if self._batch is None:
            version = ctypes.c_int()
            self._call("cuDriverGetVersion", ctypes.byref(version))
            return f"the driver is of CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        same, attribute = ctypes.c_int(), ctypes.c_int(_REGISTERED_MEMORY_HAS_ONE_ADDRESS)
        self._call("cuDeviceGetAttribute", ctypes.byref(same), attribute, self._device)
        return "" if same.value else "the GPU does not use the host's addresses"

    # ---- copies ----

    def batch(
        self, stream: int, device: Numbers, host: Numbers, sizes: Numbers, to_host: bool
    ) -> None:
        """Enqueue copies between these addresses, in any order, in one call.

        Copies from the host may read it at any time from now on.
        """
        arrays = [np.ascontiguousarray(row, np.int64) for row in (device, host, sizes)]
        device_at, host_at, sizes_at = (ctypes.c_void_p(row.ctypes.data) for row in arrays)
        targets, sources = (host_at, device_at) if to_host else (device_at, host_at)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = self._batch(
            targets,
            sources,
            sizes_at,
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(self._attributes[to_host]),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if self._tells_failed else ()),
            ctypes.c_void_p(stream),
        )
        self._check("cuMemcpyBatchAsync", error)

    def copy(self, stream: int, device: int, host: int, num_bytes: int, to_host: bool) -> None:
        """Enqueue one copy; from or to memory that is not pinned, it may block."""
        rest = (ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))
        if to_host:
            self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), _ADDRESS(device), *rest)
        else:
            self._call("cuMemcpyHtoDAsync_v2", _ADDRESS(device), ctypes.c_void_p(host), *rest)

    # ---- host memory ----

    def register(self, address: int, num_bytes: int, is_read_only: bool = False) -> None:
        """Pin host memory; takes a tenth of a second for each gigabyte."""
        flags = _REGISTERED_FOR_ALL_CONTEXTS | (_REGISTERED_TO_BE_READ if is_read_only else 0)
        rest = (ctypes.c_size_t(num_bytes), ctypes.c_uint(flags))
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), *rest)

    def unregister(self, address: int) -> None:
        """Unpin the memory that was registered at this address."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    # ---- streams ----

    def new_stream(self) -> int:
        """Make a stream of the highest priority that does not wait for the default stream."""
        lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        flags = ctypes.c_uint(_NON_BLOCKING)
        with self._current():
            self._call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
            self._call("cuStreamCreateWithPriority", ctypes.byref(stream), flags, highest)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Free a stream."""
        with self._current():
            self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    # ---- threads ----

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context the current one of a thread that is not ours, for some calls."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def enter_thread(self) -> None:
        """Prepare a thread of ours: its context, and its way with CUDA graphs.

        While the engine captures a graph, CUDA refuses some calls of all threads, such as
        registering memory, and breaks the capture. It accepts them from a thread that declares its
        calls to be no part of any graph.
        """
        self._call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, error: int) -> None:
        if error:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(error, ctypes.byref(text))
            told = text.value.decode() if text.value else "an unknown error"
            raise RuntimeError(f"{name}: {told} ({error})")
