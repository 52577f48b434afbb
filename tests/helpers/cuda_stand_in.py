"""A stand-in for ``torch.cuda`` that carries out on the CPU, at once, what its calls ask for.

It refuses what CUDA would refuse: a copy that crosses the end of a registered range. Ordering is
not seen here (``test_streams.py`` sees it), nor that a GPU does the same (``tests/gpu`` does).
"""

import contextlib
import ctypes
import threading
import time
import types
import weakref

import torch

from kvoffload.transfer.cuda import pinning
from kvoffload.transfer.cuda import torch_device as cuda_device
from tests.support.index_kernels import IndexKernels


class FakeCuda:
    """Stands in for ``torch.cuda``; registered ranges are those of the driver."""

    def __init__(self):
        self.registered = {}
        self.allocated = {}
        """Ranges that were allocated as pinned memory."""
        self.refuse_after = 1 << 60
        self.allocated_bytes = 0
        """Of device memory that still lives."""
        self.device_bytes = 1 << 60
        self.why_no_batches = ""
        self.batch_error = None
        self.batches = []
        """The sizes of the copies in each batch."""
        self.streams, self.streams_made = set(), 0
        """Handles of the streams that were not destroyed, and the number of all."""
        self.entered = set()
        """Names of the threads that have the device's context."""

    class Event:
        def __init__(self, blocking=False, enable_timing=False):
            assert blocking, "waiting for it would spin"
            self.is_timed = enable_timing

        def record(self, stream=None):
            self.stream = stream
            self.passed_at_s = time.perf_counter()

        def query(self):
            return True

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            assert self.is_timed
            assert end.is_timed
            return (end.passed_at_s - self.passed_at_s) * 1e3

    class Stream:
        def __init__(self, cuda_stream=0, device=None):
            self.cuda_stream, self.device = cuda_stream, device or torch.device("cuda", 0)

        def wait_event(self, event):
            assert isinstance(event, FakeCuda.Event)

        def synchronize(self):
            pass

    ExternalStream = Stream

    def register(self, address, length):
        assert address % 4096 == 0
        if sum(self.registered.values()) + length > self.refuse_after:
            raise RuntimeError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        assert address not in self.registered
        self.registered[address] = length

    def unregister(self, address):
        del self.registered[address]

    def registered_within(self, address, length):
        """Bytes that are registered of this range."""
        ranges = self.registered.copy().items()
        return sum(size for start, size in ranges if address <= start < address + length)

    def is_registered(self, address):
        return any(start <= address < start + size for start, size in self.registered.items())

    def is_pinned(self, address):
        ranges = (*self.registered.items(), *self.allocated.items())
        return any(start <= address < start + size for start, size in ranges)

    def check_within_one(self, address, length):
        assert any(
            start <= address and address + length <= start + size
            for start, size in self.registered.items()
        ), "crosses the end of a registered range"

    def empty_of(self, empty):
        """``torch.empty`` that counts the bytes of its tensors on the device."""

        def free(num_bytes):
            self.allocated_bytes -= num_bytes

        def counted(*sizes, pin_memory=False, **how):
            tensor = empty(*sizes, **how)
            if pin_memory:
                self.allocated[tensor.data_ptr()] = tensor.nbytes
            if "device" in how and not pin_memory:
                if self.allocated_bytes + tensor.nbytes > self.device_bytes:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24.00 MiB.")
                self.allocated_bytes += tensor.nbytes
                weakref.finalize(tensor, free, tensor.nbytes)
            return tensor

        return counted


def install(put, portion_bytes):
    """Put a stand-in in the place of ``torch.cuda`` wherever the product uses that.

    Args:
        put: ``setattr``, or that of pytest's ``monkeypatch``.
        portion_bytes: of a registration.
    """
    fake = FakeCuda()
    put(cuda_device, "_cuda", fake)
    put(cuda_device, "Driver", lambda index: FakeDriver(fake))
    put(cuda_device.CudaDevice, "_compile", lambda device, parts: IndexKernels(device._kv_caches))
    put(torch.cuda, "set_device", lambda device: None)
    put(torch.cuda, "synchronize", lambda device=None: None)
    put(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    put(torch.cuda, "set_stream", lambda stream: None)
    put(torch.cuda, "device", lambda device: contextlib.nullcontext())
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "current_stream", lambda device=None: FakeCuda.Stream())
    put(torch.cuda, "get_device_name", lambda device=None: "a stand-in")
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    put(torch.cuda, "get_device_properties", lambda device: properties)
    put(torch, "empty", fake.empty_of(torch.empty))
    put(pinning, "PAUSES_S", (0.0, 0.0))
    put(pinning.Pinning.__init__, "__defaults__", (portion_bytes,))
    return fake


def is_writable(address):
    """Whether this process may write there."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(end, 16) for end in line.split(" ")[0].split("-"))
            if first <= address < last:
                return "w" in line.split(" ")[1]
    raise LookupError(address)


class FakeDriver:
    """Stands in for the driver library: copies at once, and refuses what CUDA refuses."""

    def __init__(self, cuda):
        self._cuda = cuda

    def why_no_batches(self):
        return self._cuda.why_no_batches

    def enter_thread(self):
        self._cuda.entered.add(threading.current_thread().name)

    def register(self, address, length, is_read_only=False):
        assert threading.current_thread().name in self._cuda.entered
        assert is_read_only is not is_writable(address), "CUDA_ERROR_INVALID_VALUE"
        self._cuda.register(address, length)
        for start in range(address, address + length, 4096):  # each page is there from now on
            ctypes.string_at(start, 1)

    def unregister(self, address):
        assert threading.current_thread().name in self._cuda.entered
        is_writable(address)  # it is still mapped
        self._cuda.unregister(address)

    def new_stream(self):
        handle = 4711 + self._cuda.streams_made
        self._cuda.streams_made += 1
        self._cuda.streams.add(handle)
        return handle

    def destroy_stream(self, handle):
        self._cuda.streams.remove(handle)

    def batch(self, stream, device, host, sizes, to_host):
        assert threading.current_thread().name in self._cuda.entered
        self._cuda.batches.append(sizes.tolist())
        if self._cuda.batch_error is not None:
            raise self._cuda.batch_error
        for ends in zip(device.tolist(), host.tolist(), sizes.tolist(), strict=True):
            assert self._cuda.is_pinned(ends[1]), "only pinned memory is copied in batches"
            self._move(stream, *ends, to_host)

    def copy(self, stream, device, host, num_bytes, to_host):
        self._move(stream, device, host, num_bytes, to_host)

    def _move(self, stream, device, host, num_bytes, to_host):
        assert stream in self._cuda.streams
        assert threading.current_thread().name in self._cuda.entered
        assert num_bytes > 0
        if self._cuda.is_registered(host):
            self._cuda.check_within_one(host, num_bytes)
        target, source = (host, device) if to_host else (device, host)
        ctypes.memmove(target, source, num_bytes)


class OnCpu(torch.overrides.TorchFunctionMode):
    """Takes every tensor that code asks for on a CUDA device from the CPU instead."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.is_pinned:
            return self._cuda.is_registered(args[0].data_ptr())
        if function is torch.Tensor.copy_:
            self._check(args[0])
            self._check(args[1])
        args = tuple("cpu" if _is_cuda(given) else given for given in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)

    def _check(self, tensor):
        if self._cuda.is_registered(tensor.data_ptr()):
            self._cuda.check_within_one(tensor.data_ptr(), tensor.nbytes)


def _is_cuda(given):
    return isinstance(given, str | torch.device) and str(given).startswith("cuda")
