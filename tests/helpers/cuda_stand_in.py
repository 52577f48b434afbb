"""A stand-in for ``torch.cuda`` that carries out on the CPU, at once, what its calls ask for.

It refuses what CUDA would refuse: a copy that crosses the end of a registered range. Ordering is
not seen here (``test_streams.py`` sees it), nor that a GPU does the same (``tests/gpu`` does).
"""

import contextlib
import ctypes
import time
import types
import weakref

import torch

from kvoffload.transfer.cuda import pinning
from kvoffload.transfer.cuda import torch_device as cuda_device


class FakeCuda:
    """Stands in for ``torch.cuda``; registered ranges are those of ``cudaHostRegister``."""

    def __init__(self):
        self.registered = {}
        self.refuse_after = 1 << 60
        self.allocated_bytes = 0
        """Of device memory that still lives."""

    class Event:
        def __init__(self, blocking=False, enable_timing=False):
            assert blocking, "waiting for it would spin"
            self.is_timed = enable_timing

        def record(self, stream=None):
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
        cuda_stream = 4711

        def __init__(self, device=None, priority=0):
            pass

        def wait_event(self, event):
            assert isinstance(event, FakeCuda.Event)

        def synchronize(self):
            pass

    def cudart(self):
        return self

    def cudaHostRegister(self, address, length, flags):
        assert flags == 1
        assert address % 4096 == 0
        if sum(self.registered.values()) + length > self.refuse_after:
            return 2
        assert address not in self.registered
        self.registered[address] = length
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error):
        return "out of memory"

    def is_registered(self, address):
        return any(start <= address < start + size for start, size in self.registered.items())

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
            if "device" in how:
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
    put(torch.cuda, "set_device", lambda device: None)
    put(torch.cuda, "synchronize", lambda device=None: None)
    put(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    put(torch.cuda, "device", lambda device: contextlib.nullcontext())
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "current_stream", lambda device=None: FakeCuda.Stream())
    put(torch.cuda, "get_device_name", lambda device=None: "a stand-in")
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    put(torch.cuda, "get_device_properties", lambda device: properties)
    put(torch, "empty", fake.empty_of(torch.empty))
    put(pinning.Pinning.__init__, "__defaults__", (None, portion_bytes))
    return fake


def fake_bindings(cuda, version):
    """``cuda.bindings.runtime`` as of a CUDA version, with the signature all of them have."""
    runtime = types.ModuleType("cuda.bindings.runtime")
    runtime.cudaDriverGetVersion = lambda: (0, version)
    runtime.cudaDeviceAttr = types.SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem=91)
    runtime.cudaDeviceGetAttribute = lambda attribute, device: (0, 1)
    runtime.cudaMemcpyAttributes = types.SimpleNamespace
    runtime.cudaMemcpySrcAccessOrder = types.SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
    runtime.calls = 0

    def batch(dsts, srcs, sizes, count, attrs, indices, num_attrs, stream):
        assert stream == FakeCuda.Stream.cuda_stream
        assert (len(dsts), len(srcs), len(sizes)) == (count, count, count)
        assert (attrs[0].srcAccessOrder, indices, num_attrs) == (1, [0], 1)
        runtime.calls += 1
        for target, source, size in zip(dsts, srcs, sizes, strict=True):
            cuda.check_within_one(target if cuda.is_registered(target) else source, size)
            ctypes.memmove(target, source, size)
        return (0,) if version >= 13000 else (0, None)

    runtime.cudaMemcpyBatchAsync = batch
    return runtime


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
