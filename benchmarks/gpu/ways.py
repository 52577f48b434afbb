"""Other ways to copy small pages: which of them would make staging memory unnecessary."""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.gpu import device, sizes, steps
from benchmarks.gpu.measures import our_rates
from benchmarks.gpu.ours import Background, Ours, median_s, parts, times
from benchmarks.harness import Row, caches_of, row
from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.cuda import direction
from kvoffload.transfer.cuda.staged_blocks import BlockTable, Part
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

ORDERS = {"stream order": device.STREAM_ORDER, "any order": device.ANY_ORDER}
FLAGS = {"": 0, ", overlap": device.PREFER_OVERLAP}


def ways() -> Iterator[Row]:
    """Calls of the driver by size, number, order and flag; then our kernel on host memory."""
    batch, stream = device.BatchCopy(), device.new_stream()
    most, draw = 2 * max(sizes.LINK_BYTES), np.random.default_rng(0)
    host, gpu = device.pinned(most), device.pages(1, most)[0]
    for piece, wanted in itertools.product(sizes.SMALL_PIECES, sizes.COUNTS):
        count = min(wanted, most // piece)
        here, there = (
            (end.data_ptr() + draw.permutation(most // piece)[:count] * piece).astype(np.uint64)
            for end in (host, gpu)
        )
        lengths = np.full(count, piece, np.uint64)
        for way, (order, flag) in itertools.product(
            ("store", "load"), itertools.product(ORDERS, FLAGS)
        ):
            ends = (here, there) if way == "store" else (there, here)

            def copy(
                ends: tuple[Any, Any] = ends, lengths: Any = lengths, how: Any = (order, flag)
            ) -> None:
                batch(*ends, lengths, stream, ORDERS[how[0]], FLAGS[how[1]])
                stream.synchronize()

            rate = count * piece / median_s(copy) / 1e9
            yield row(f"{way}, {count} x {piece >> 10} KiB, {order}{flag}", rate, "GB/s")
    yield from _kernels_on_host_memory(host, gpu)


def _kernels_on_host_memory(host: Any, gpu: Any) -> Iterator[Row]:
    """The kernel that gathers and scatters, with pinned host memory in place of its stage."""
    for page, programs in itertools.product(sizes.SMALL_PIECES, sizes.PROGRAMS):
        count = min(max(sizes.COUNTS), len(gpu) // page)
        kernels = _Kernels(host, gpu, page, count, programs)
        for way, to_host in (("store", True), ("load", False)):

            def move(kernels: _Kernels = kernels, to_host: bool = to_host) -> None:
                kernels.move(to_host)
                device.wait_for_all()

            rate = kernels.num_bytes / median_s(move) / 1e9
            case = f"kernel on host memory, {way}, {count} x {page >> 10} KiB, {programs} programs"
            yield row(case, rate, "GB/s")
    yield from _kernels_beside_steps(host, gpu)


def _kernels_beside_steps(host: Any, gpu: Any) -> Iterator[Row]:
    """The same without end, both ways: a program takes a multiprocessor from the model."""
    makers = {"prefill-like step": steps.prefill_like, "decode-like step": steps.decode_like}
    page = max(sizes.SMALL_PIECES)
    count = min(max(sizes.COUNTS) // 4, len(gpu) // page)
    for name, step in ((name, make()) for name, make in makers.items()):
        times(step, 5)
        alone = times(step, sizes.STEPS[name] // 2)
        for programs in sizes.PROGRAMS:
            with _Endless(_Kernels(host, gpu, page, count, programs)) as moved:
                time.sleep(sizes.LISTEN_S / 10)
                before = moved.num_bytes
                took = times(step, sizes.STEPS[name] // 2)
                rate = (moved.num_bytes - before) / sum(took) / 1e9
            case = f"kernel on host memory, {programs} programs a direction, {name}"
            yield row(f"{case}, both ways", rate, "GB/s")
            for part, value, limit in parts(took, alone):
                yield row(f"{case} {part}", value, "ms", limit, "alone")


class _Kernels:
    """Our kernel between so many pages of GPU memory and of pinned host memory."""

    def __init__(self, host: Any, gpu: Any, page: int, count: int, programs: int) -> None:
        self._host = host
        self.num_bytes = count * page
        caches = caches_of([gpu[: count * page].view(count, page)])
        self._part = Part(ChunkLayout(caches, 1).regions[0], 0, 1, page)
        self._kernels = device.kernels(caches, self._part, programs)
        ids = np.random.default_rng(0).permutation(count).astype(np.int64)
        self._table = BlockTable(np.zeros(3 * count, np.int64), device.numbers(3 * count))
        self._table.fill((ids, np.arange(count), np.zeros(count, np.int64)))
        device.put(self._table)

    def move(self, to_host: bool) -> None:
        """Launch on the current stream."""
        self._kernels.move(self._part, self._table, self._host, to_host)


class _Endless(Background):
    """Kernels in both directions, two in flight in each."""

    def __init__(self, kernels: _Kernels) -> None:
        super().__init__()
        self.num_bytes = 0
        self._kernels = kernels
        self._streams = {to_host: device.new_stream() for to_host in (True, False)}

    def step(self) -> None:
        for to_host, stream in self._streams.items():
            with device.using(stream):
                for _ in range(2):
                    self._kernels.move(to_host)
        device.wait_for_ends(list(self._streams.values()))
        self.num_bytes += 4 * self._kernels.num_bytes


def plans() -> Iterator[Row]:
    """Our transfers staged and direct, by size of page; and by stages and their memory."""
    most = max(sizes.LINK_BYTES)
    thresholds = {"direct": 1, "staged": 1 << 30}
    for page, (name, least) in itertools.product(sizes.SMALL_PIECES, thresholds.items()):
        copier = partial(_copier, direct_page_bytes=least)
        with Ours(sizes.PLAN_TENSORS, page, most, new_copier=copier) as ours:
            yield from our_rates(f"{sizes.PLAN_TENSORS} x {page >> 10} KiB {name}", ours, most)
    shape = next(iter(sizes.WITH_STEPS))
    for stages, stage_bytes in sizes.STAGES:
        copier = partial(_copier, stage_bytes=stage_bytes)
        with (
            patch.object(direction, "STAGES", stages),
            Ours(*sizes.SHAPES[shape], most, new_copier=copier) as ours,
        ):
            name = f"{shape}, {stages} stages of {stage_bytes >> 20} MiB"
            yield from our_rates(name, ours, most)


def _copier(caches: CanonicalKVCaches, slab: Slab, layout: ChunkLayout, **how: int) -> StreamCopier:
    from kvoffload.transfer.cuda.torch_device import CudaDevice

    return StreamCopier(caches, slab, layout, CudaDevice(caches, slab), **how)
