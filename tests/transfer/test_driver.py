"""The driver's calls have the driver's signatures: a library in C takes them, as ``cuda.h`` says.

The C compiler checks the library against the real ``cuda.h`` where Triton, which has one, is
installed. The library copies with memcpy, and like the driver it wants a context on each thread.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.transfer.cuda.driver import Driver

SOURCE = r"""
#include <stddef.h>
#include <string.h>
#ifdef CUDA_H
#define __CUDA_API_VERSION_INTERNAL
#include CUDA_H
#else
typedef int CUresult, CUdevice, CUdevice_attribute, CUstreamCaptureMode;
typedef unsigned long long CUdeviceptr;
typedef void *CUstream, *CUcontext;
typedef struct { int type, id; } CUmemLocation;
#endif
#if !defined(CUDA_VERSION) || CUDA_VERSION < 12080
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
#endif

static int context;
static __thread CUcontext current, pushed;
void *registered;
size_t registered_bytes;
int order, copies, one_address = 1, priority, stream_flags, capture_mode, streams, refuse;

CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
               CUmemcpyAttributes *attributes, size_t *first, size_t kinds, CUstream stream)
{
    if (current != (CUcontext)&context) return 201;
    if (refuse) return refuse;
    if (stream != (CUstream)0x4711 || kinds != 1 || *first != 0) return 1;
    if (attributes->flags || attributes->srcLocHint.type || attributes->dstLocHint.id) return 1;
    order = attributes->srcAccessOrder;
    for (size_t i = 0; i < count; i++, copies++) {
        if (!sizes[i]) return 1;
        memcpy((void *)to[i], (void *)from[i], sizes[i]);
    }
    return 0;
}

#ifdef HAS_V1
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                            size_t *failIdx, CUstream hStream)
{
    *failIdx = 0;
    return batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream);
}
#endif
#ifdef HAS_V2
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                               CUstream hStream)
{
    return batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream);
}
#endif

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t count, CUstream stream)
{
    if (current != (CUcontext)&context || stream != (CUstream)0x4711) return 201;
    copies++;
    memcpy(to, (void *)from, count);
    return 0;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t count, CUstream stream)
{
    if (current != (CUcontext)&context || stream != (CUstream)0x4711) return 201;
    copies++;
    memcpy((void *)to, from, count);
    return 0;
}

CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int flags)
{
    if (current != (CUcontext)&context || flags != 1) return 201;
    registered = p;
    registered_bytes = bytesize;
    return 0;
}

CUresult cuMemHostUnregister(void *p)
{
    if (current != (CUcontext)&context || p != registered) return 201;
    registered = NULL;
    return 0;
}

CUresult cuDriverGetVersion(int *version) { *version = 12040; return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 70 + ordinal; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device)
{
    *retained = (CUcontext)&context;
    return device == 73 ? 0 : 101;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    *value = one_address;
    return attribute == 91 && device == 73 ? 0 : 1;
}
CUresult cuCtxPushCurrent_v2(CUcontext given) { pushed = current; current = given; return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *popped) { *popped = current; current = pushed; return 0; }
CUresult cuCtxSetCurrent(CUcontext given) { current = given; return 0; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    capture_mode = *mode;
    return 0;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return current == (CUcontext)&context ? 0 : 201;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int wanted)
{
    if (current != (CUcontext)&context) return 201;
    *stream = (CUstream)0x4711;
    stream_flags = flags;
    priority = wanted;
    streams++;
    return 0;
}
CUresult cuStreamDestroy_v2(CUstream stream)
{
    if (stream != (CUstream)0x4711) return 400;
    streams--;
    return 0;
}
CUresult cuGetErrorName(CUresult error, const char **name)
{
    if (error != 700) return 1;
    *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
    return 0;
}
"""


def header():
    """The path of Triton's ``cuda.h``, if it is installed."""
    spec = importlib.util.find_spec("triton")
    path = spec and Path(spec.origin).parent / "backends/nvidia/include/cuda.h"
    return path if path and path.exists() else None


def build(folder, *abi):
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (folder / "driver.c").write_text(SOURCE)
    library = folder / "libcuda-stand-in.so"
    real = [f'-DCUDA_H="{header()}"'] if header() else []
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", *real, *(f"-DHAS_{one}" for one in abi)]
    subprocess.run([compiler, *flags, "-o", str(library), str(folder / "driver.c")], check=True)
    return str(library)


@pytest.fixture(params=[("V1",), ("V2",), ("V1", "V2")], ids="-".join, scope="module")
def built(request, tmp_path_factory):
    """A driver with the batched copy of CUDA 12, that of CUDA 13, or both."""
    return build(tmp_path_factory.mktemp("driver"), *request.param)


@pytest.fixture
def library(built, tmp_path):
    """A copy of it: loaded by itself, with variables of its own."""
    return shutil.copy(built, tmp_path)


def number(library, name):
    return ctypes.c_int.in_dll(ctypes.CDLL(library), name)


def on_a_thread(action):
    """Run an action on a thread of its own, as a launch thread begins; return its result."""
    results = []

    def run():
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(("to_host", "order"), [(True, 1), (False, 3)])
def test_a_batch_copies_between_both_ends_in_the_order_of_its_direction(library, to_host, order):
    driver = Driver(3, library)
    assert driver.why_no_batches() == ""
    device = np.random.default_rng(0).integers(-128, 127, 1000).astype(np.int8)
    host = np.zeros(1000, np.int8)
    if not to_host:
        device, host = host, device
    at = np.array([[0, 500, 990], [10, 0, 600], [300, 9, 1]])

    def batch():
        driver.enter_thread()
        ends = (device.ctypes.data + at[0], host.ctypes.data + at[1])
        driver.batch(0x4711, *ends, at[2], to_host)

    assert on_a_thread(batch) is None
    assert number(library, "order").value == order
    assert number(library, "copies").value == 3
    for device_at, host_at, length in at.T:
        assert np.array_equal(
            device[device_at : device_at + length], host[host_at : host_at + length]
        )
    assert number(library, "capture_mode").value == 2


def test_arrays_of_another_type_or_shape_are_the_same_addresses(library):
    driver = Driver(3, library)
    device, host = np.arange(90, dtype=np.int8), np.zeros(90, np.int8)
    at = np.array([3, 0, 5, 0])

    def batch():
        driver.enter_thread()
        ends = ((device.ctypes.data + at)[::2], (host.ctypes.data + at)[::2])
        driver.batch(0x4711, *ends, np.array([2, 4], np.int32), True)

    assert on_a_thread(batch) is None
    assert np.flatnonzero(host).tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("to_host", [True, False])
def test_one_copy_goes_its_direction(library, to_host):
    driver = Driver(3, library)
    device, host = np.full(8, 1, np.int8), np.full(8, 2, np.int8)

    def copy():
        driver.enter_thread()
        driver.copy(0x4711, device.ctypes.data, host.ctypes.data, 5, to_host)

    assert on_a_thread(copy) is None
    assert device.tolist() == [1] * 8 if to_host else [2] * 5 + [1] * 3
    assert host.tolist() == [1] * 5 + [2] * 3 if to_host else [2] * 8


def test_a_thread_without_the_context_is_refused_what_it_enqueues(library):
    """So a launch thread that only told torch its device would be, on the first GPU."""
    driver = Driver(3, library)
    assert "(201)" in str(on_a_thread(lambda: driver.copy(0x4711, 0, 0, 5, True)))


def test_host_memory_is_pinned_for_all_contexts_and_let_go_again(library):
    driver = Driver(3, library)
    registered = ctypes.c_void_p.in_dll(ctypes.CDLL(library), "registered")
    num_bytes = ctypes.c_size_t.in_dll(ctypes.CDLL(library), "registered_bytes")
    address = 0x7F12_3456_7000

    def pin():
        driver.enter_thread()
        driver.register(address, 5 << 30)
        assert (registered.value, num_bytes.value) == (address, 5 << 30)
        driver.unregister(address)

    assert on_a_thread(pin) is None
    assert registered.value is None
    assert "(201)" in str(on_a_thread(lambda: driver.register(address, 8)))


def test_a_stream_is_of_the_highest_priority_and_made_on_any_thread(library):
    driver = Driver(3, library)
    assert on_a_thread(driver.new_stream) == 0x4711
    assert number(library, "priority").value == -5
    assert number(library, "stream_flags").value == 1
    driver.destroy_stream(0x4711)
    assert number(library, "streams").value == 0
    with pytest.raises(RuntimeError, match=r"cuStreamDestroy_v2: an unknown error \(400\)"):
        driver.destroy_stream(5)


def test_an_error_has_the_drivers_name_for_it(library):
    driver = Driver(3, library)
    driver.enter_thread()
    number(library, "refuse").value = 700
    nothing = np.zeros(1, np.int64)
    expected = r"cuMemcpyBatchAsync: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    with pytest.raises(RuntimeError, match=expected):
        driver.batch(0x4711, nothing, nothing, nothing, True)


def test_a_gpu_that_uses_other_addresses_than_the_host_has_no_batches(library):
    driver = Driver(3, library)
    number(library, "one_address").value = 0
    assert driver.why_no_batches() == "the GPU does not use the host's addresses"


def test_an_old_driver_has_no_batches_and_says_its_version(tmp_path):
    assert Driver(3, build(tmp_path)).why_no_batches() == "the driver is of CUDA 12.4"


def test_a_machine_without_the_driver_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"kv_caches = .*cuda.*no-such-library"):
        Driver(0, "no-such-library.so")
