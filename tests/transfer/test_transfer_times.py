"""A transfer's time is its own: waits before its begin do not count."""

import hashlib

import pytest

from kvoffload import open_backend
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    make_offload_key,
)
from kvoffload.transfer import engine as transfer_engine
from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cpu import copier as cpu_copier
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.engine import TransferEngine
from tests.support import late_device
from tests.support.interleavings import small_parts
from tests.support.io_rig import call, client_over, loop_of
from tests.support.late_device import LateDevice

WAIT_S = 0.3
READ_S = 0.05
KEYS = tuple(make_offload_key(hashlib.sha256(bytes([i])).digest(), 0) for i in range(2))


class Clock:
    """Stands for ``time``; it goes on when someone sleeps, and a little when it is read."""

    def __init__(self):
        self._now_s = 0.0

    def sleep(self, seconds):
        self._now_s += seconds

    def perf_counter(self):
        self.sleep(1e-6)
        return self._now_s

    monotonic = perf_counter


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    for module in (cpu_copier, late_device, transfer_engine):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Half:
    """A copier, on a simulated device or a CPU, and an engine that is busy when asked."""

    def __init__(self, on, clock):
        self._clock = clock
        caches, self.layout, self.slab = small_parts()
        self.device = LateDevice(caches, self.slab, seed=1)
        if on == "cpu":
            self.copier = CpuCopier(caches, self.slab, self.layout)
        else:
            self.copier = StreamCopier(
                caches, self.slab, self.layout, self.device, stage_bytes=1000
            )

    def engine(self, io=None):
        """The transfer engine, over tiers."""
        return TransferEngine(io, self.slab, self.layout, self.copier)

    def busy_engine(self, monkeypatch, begins=lambda: None):
        """Copies submitted from now on wait for a forward pass.

        On a CPU it takes its time once ``begins`` returns: all threads here have one clock.
        """
        self.device.engine.enqueue(lambda: self._clock.sleep(WAIT_S))
        if isinstance(self.copier, CpuCopier):
            fence = CopyFence()
            monkeypatch.setattr(fence, "wait", lambda: (begins(), self._clock.sleep(WAIT_S)))
            monkeypatch.setattr(self.copier, "record_fence", lambda: fence)


@pytest.fixture(params=["cpu", "device"])
def half(request, clock):
    half = Half(request.param, clock)
    yield half
    half.copier.close()


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_that_waits_for_the_forward_pass_took_as_long_as_the_copy(
    half, clock, monkeypatch, until, to_host
):
    engine = half.engine()
    gpu, host = GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0])
    half.busy_engine(monkeypatch)
    begun_s = clock.monotonic()
    engine.transfer_async(1, (gpu, host) if to_host else (host, gpu))
    (result,) = until(engine.get_finished)
    assert clock.monotonic() - begun_s >= WAIT_S
    assert result.success
    assert 0 < result.transfer_time_s < WAIT_S / 2


def test_a_copy_that_failed_took_no_time(clock, until):
    half = Half("device", clock)
    half.device.failures.append(RuntimeError("out of something"))
    engine = half.engine()
    try:
        engine.transfer_async(1, (GPULoadStoreSpec([1, 2]), CPULoadStoreSpec([0])))
        (result,) = until(engine.get_finished)
    finally:
        half.copier.close()
    assert (result.success, result.transfer_time_s) == (False, 0.0)


@pytest.fixture
def over(half, clock, closing, monkeypatch):
    """Return what starts a client over a store."""

    def start(store):
        io = closing(client_over({"store": store}, half.slab))
        monkeypatch.setattr(loop_of(io), "time", clock.monotonic)
        return io

    return start


def test_a_load_from_a_tier_took_its_reads_and_the_last_copy(half, clock, monkeypatch, over, until):
    store = open_backend("memory", {"capacity": "1MiB"}, "0" * 64)
    io = over(store)
    views = [half.slab.slot(i, half.layout.payload_bytes[0]) for i in range(2)]
    assert all(call(io, store.write(KEYS, views)))
    read = store.read

    async def slow_read(keys, into):
        clock.sleep(READ_S)
        return await read(keys, into)

    store.read = slow_read
    engine = half.engine(io)
    half.busy_engine(monkeypatch, lambda: until(lambda: not io._jobs.unanswered))
    loop_of(io).call_soon_threadsafe(clock.sleep, WAIT_S)
    source = CPULoadStoreSpec([0, 1], [Fetch("store", (0, 1), KEYS)])
    engine.transfer_async(1, (source, GPULoadStoreSpec([1, 2, 3, 4])))
    (result,) = until(engine.get_finished)
    assert result.success
    assert READ_S <= result.transfer_time_s < WAIT_S


def test_a_write_through_took_as_long_as_its_writes(half, clock, over, until):
    store = open_backend("memory", {"capacity": "1MiB"}, "0" * 64)
    io, write = over(store), store.write

    async def slow_write(keys, chunks):
        clock.sleep(READ_S)
        return await write(keys, chunks)

    store.write = slow_write
    engine = half.engine(io)
    loop_of(io).call_soon_threadsafe(clock.sleep, WAIT_S)
    engine.transfer_async(1, (CPULoadStoreSpec([0, 1]), BackendLoadStoreSpec("store", KEYS)))
    (result,) = until(engine.get_finished)
    assert result.success
    assert READ_S <= result.transfer_time_s < WAIT_S
