"""How long one chunk takes, alone and behind a store that waits for the engine."""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu import device, sizes
from benchmarks.gpu.ours import Delays, Ours, Part, check, parts, times
from benchmarks.harness import Row, row, timed
from kvoffload.transfer.factory import make_copier

BUSY_CYCLES = 600_000_000
"""About 0.3 s of the engine's stream: a long prefill."""
BEFORE_S = 0.02
"""For the launching thread, to enqueue as much of the store as it can."""


def latency() -> Iterator[Row]:
    """One chunk from its launch to its end, against a plain copy of as many bytes."""
    for name, shape in sizes.SHAPES.items():
        with Ours(*shape, shape[0] * shape[1]) as ours:
            host, gpu = device.pinned(ours.num_bytes), device.pages(1, ours.num_bytes)[0]
            for way, ends in (("store", (host, gpu)), ("load", (gpu, host))):
                for part, value, limit in _parts(ours, way == "store", *ends):
                    case = f"one chunk of {name}, {way} {part}"
                    yield row(case, value * 1e3, "µs", limit * 1e3, "plain")


def _parts(ours: Ours, to_host: bool, target: Any, source: Any) -> Iterator[Part]:
    def plain() -> None:
        target.copy_(source, non_blocking=True)
        device.wait_for_stream()

    took, alone = (
        times(work, sizes.CHUNKS)[sizes.CHUNKS // 6 :]
        for work in (partial(ours.run, (to_host,)), plain)
    )
    return parts(took, alone)


def behind() -> Iterator[Row]:
    """Does a store behind a busy engine hold up a small load, or the engine's own launches?"""
    numbers = device.matrix(64, 64)
    numbers.add_(1)  # Its kernel is loaded at the first launch, which waits for the GPU.
    for name, batches in itertools.product(sizes.BEHIND, (True, False)):
        copier = partial(make_copier, batches=batches)
        shape = sizes.SHAPES[name]
        with Ours(*shape, 4 * max(sizes.LINK_BYTES), new_copier=copier) as ours:
            ours.run((True, False))
            with Delays() as delays:
                begun_s = time.perf_counter()
                device.occupy(BUSY_CYCLES)
                store = ours.begin_behind(True)
                time.sleep(BEFORE_S)
                launch_s = timed(partial(numbers.add_, 1))
                load_s = timed(lambda: check(ours.begin_one(False)))
                check(store)
                whole_s = time.perf_counter() - begun_s
        case = f"{name}, {'batches' if batches else 'one by one'}, behind a store that waits"
        yield row(f"{case}: a small load", load_s * 1e3, "ms")
        yield row(f"{case}: the engine's launch", launch_s * 1e3, "ms")
        yield row(f"{case}: a second thread, longest", max(delays.late_s) * 1e3, "ms")
        yield row(f"{case}: all", whole_s * 1e3, "ms")
