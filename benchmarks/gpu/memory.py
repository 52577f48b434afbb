"""Host memory by its kind: the time that it takes to pin, what waits, and our rates with it."""

import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu import device, sizes, steps
from benchmarks.gpu.measures import delayed, our_rates
from benchmarks.gpu.ours import Delays, Ours, bytes_to_pin, parts, tier_slab, times, until_pinned
from benchmarks.harness import Row, caches_of, row
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

KINDS: dict[str, Callable[[int, int], Slab]] = {"memory file": tier_slab, "private memory": Slab}
"""The slab with tiers, and without. By default Linux gives huge pages to the second alone."""


def memory() -> Iterator[Row]:
    """Pin each kind during a model's steps; then transfer with the kind that tiers do not use."""
    (cuda_s,) = times(lambda: device.pinned(bytes_to_pin()), 1)
    step = steps.decode_like()
    times(step, 5)
    with Delays() as quiet:
        alone = times(step, sizes.STEPS["decode-like step"])
    for kind, new_slab in KINDS.items():
        yield from _pinned(kind, new_slab, cuda_s, step, alone, quiet)
    for name in sizes.WITH_STEPS:
        shape = sizes.SHAPES[name]
        with Ours(*shape, max(sizes.LINK_BYTES), new_slab=Slab) as ours:
            yield from our_rates(f"private memory, {name}", ours, max(sizes.LINK_BYTES))


def _pinned(
    kind: str,
    new_slab: Callable[[int, int], Slab],
    cuda_s: float,
    step: Callable[[], None],
    alone: list[float],
    quiet: Delays,
) -> Iterator[Row]:
    """Rows of one kind: populated first, so that registering is seen by itself."""
    slab = new_slab(bytes_to_pin() // sizes.MIB, sizes.MIB)
    gib = slab.num_bytes / sizes.GIB
    (populated_s,) = times(partial(slab.populate, 0, slab.num_bytes), 1)
    caches = caches_of([device.pages(8, sizes.MIB)])
    device.wait_for_all()
    meanwhile: list[float] = []
    with Delays() as delays:
        begun_s = time.perf_counter()
        copier = make_copier(caches, slab, ChunkLayout(caches, 1))
        try:
            while not meanwhile or copier.stats()["pinned_bytes"] != slab.num_bytes:
                meanwhile += times(step, 1)
                if time.perf_counter() - begun_s > sizes.WAIT_S:
                    break
            pinned_s = time.perf_counter() - begun_s
            until_pinned(copier, slab)
        finally:
            (close_s,) = times(copier.close, 1)
    yield row(f"{kind}, populated", populated_s / gib, "s/GiB")
    yield row(f"{kind}, registered", pinned_s / gib, "s/GiB", cuda_s / gib, "cudaHostAlloc")
    yield row(f"{kind}, closed and unpinned", close_s / gib, "s/GiB")
    for part, value, limit in parts(meanwhile, alone, 3):
        yield row(f"a model's step {part} while {kind} is pinned", value, "ms", limit, "alone")
    yield from delayed(f"{kind} is pinned", delays, quiet)
