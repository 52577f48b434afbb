"""What the parts of the first run share: our copier on a cache, endless transfers, delays."""

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from benchmarks.gpu import device, sizes
from benchmarks.harness import caches_of, quantile, timed
from kvoffload.memory_limits import available_host_bytes
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab

WAYS = {"store": (True,), "load": (False,), "both ways": (True, False)}
"""Directions, as the ``to_host`` of transfers."""
IN_FLIGHT = 3
"""Endless transfers in flight in a direction."""
POLL_S = 0.0005
Part = tuple[str, float, float]


def tier_slab(num_slots: int, slot_bytes: int) -> Slab:
    """Take host memory as connectors with tiers do: a memory file, without huge pages on most."""
    fd = create_shared_memory(num_slots * slot_bytes)
    try:
        return Slab(num_slots, slot_bytes, fd)
    finally:
        os.close(fd)  # the mapping remains


def bytes_to_pin() -> int:
    """Return how much host memory to pin: whole MiB, and at most a quarter of what is left."""
    left = available_host_bytes() or sizes.PINNED_BYTES
    return min(sizes.PINNED_BYTES, left // 4) // sizes.MIB * sizes.MIB


def until_pinned(copier: Any, slab: Slab) -> None:
    """Wait until all of a slab is pinned.

    Raises:
        RuntimeError: it is not; gives the copier's ``stats()``, which say why.
    """
    end_s = time.monotonic() + sizes.WAIT_S
    while (stats := copier.stats())["pinned_bytes"] != slab.num_bytes:
        if "why_not_pinned" in stats or time.monotonic() > end_s:
            raise RuntimeError(f"not all of {slab.num_bytes} bytes is pinned: {stats}")
        time.sleep(POLL_S)


def check(fence: Any) -> None:
    """Wait for a transfer; a part has a time limit, and a wait with one polls, which costs time.

    Raises:
        RuntimeError: it failed.
    """
    fence.wait()
    if fence.error is not None:
        raise RuntimeError(f"a transfer failed: {fence.error}") from fence.error


class Ours:
    """A cache and our copier, with half of its blocks and slots to store, half to load.

    Args:
        num_tensors: of the cache.
        page_bytes: of each tensor's rows; a chunk is one block.
        num_bytes: of a transfer, rounded down to whole chunks.
        new_slab: makes the host memory.
        new_copier: makes the copier.
    """

    def __init__(
        self,
        num_tensors: int,
        page_bytes: int,
        num_bytes: int,
        new_slab: Callable[[int, int], Slab] = tier_slab,
        new_copier: Callable[..., Any] = make_copier,
    ) -> None:
        count = max(1, num_bytes // (num_tensors * page_bytes))
        self.num_bytes = count * num_tensors * page_bytes
        caches = caches_of([device.pages(2 * count, page_bytes) for _ in range(num_tensors)])
        self.layout = ChunkLayout(caches, 1)
        self.slab = new_slab(2 * count, self.layout.slot_bytes)
        # Scattered at both ends: otherwise pieces would join to larger ones.
        draw = np.random.default_rng(0)
        numbers = np.arange(2 * count, dtype=np.int32)
        self.blocks, self.slots = (list(draw.permutation(numbers).reshape(2, -1)) for _ in "12")
        self._moves = [
            self.layout.moves(GPULoadStoreSpec(blocks), slots.tolist())
            for blocks, slots in zip(self.blocks, self.slots, strict=True)
        ]
        self._idle = device.new_stream()
        device.wait_for_all()
        self.copier = new_copier(caches, self.slab, self.layout)
        try:
            until_pinned(self.copier, self.slab)
        except BaseException:
            self.copier.close()
            raise

    def begin(self, to_host: bool) -> Any:
        """Launch a transfer that waits for no step of a model: its fence is of an idle stream."""
        with device.using(self._idle):
            return self.begin_behind(to_host)

    def begin_behind(self, to_host: bool, num_chunks: int | None = None) -> Any:
        """Launch a transfer of these chunks that waits for the current stream's work."""
        moves = self._moves[to_host].take(slice(num_chunks))
        return self.copier.launch(moves, to_host, self.copier.record_fence())

    def begin_one(self, to_host: bool) -> Any:
        """Launch a transfer of one chunk that waits for no step of a model."""
        with device.using(self._idle):
            return self.begin_behind(to_host, 1)

    def run(self, which: Sequence[bool]) -> None:
        """Transfer in these directions at once, and wait."""
        for fence in [self.begin(to_host) for to_host in which]:
            check(fence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.copier.close()


class Background:
    """A thread that calls ``step`` again and again as long as the ``with`` lasts."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def step(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            device.allow_captures()
            while not self._stop.is_set():
                self.step()
        except Exception as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


class Transfers(Background):
    """Transfers in both directions without end."""

    def __init__(self, ours: Ours) -> None:
        super().__init__()
        self.num_bytes = 0
        """Of finished transfers."""
        self._ours = ours
        self._flying = {to_host: deque[Any]() for to_host in (True, False)}

    def step(self) -> None:
        for to_host, fences in self._flying.items():
            while len(fences) < IN_FLIGHT:
                fences.append(self._ours.begin(to_host))
            while fences and fences[0].done():
                check(fences.popleft())
                self.num_bytes += self._ours.num_bytes
        time.sleep(POLL_S)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for fence in (*self._flying[True], *self._flying[False]):
            check(fence)


class Delays(Background):
    """How late a second thread of Python wakes: its wait for the GIL."""

    SLEEP_S = 0.0002

    def __init__(self) -> None:
        super().__init__()
        self.late_s = [0.0]

    def step(self) -> None:
        (took_s,) = times(lambda: time.sleep(self.SLEEP_S), 1)
        self.late_s.append(took_s - self.SLEEP_S)


def times(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round."""
    return [timed(work) for _ in range(rounds)]


def median_s(work: Callable[[], object]) -> float:
    """Median seconds, after a round that is not counted."""
    work()
    return statistics.median(times(work, sizes.ROUNDS))


def parts(took: Sequence[float], alone: Sequence[float], most: int = 2) -> Iterator[Part]:
    """Yield the name of each of the first parts, with what it is of both, in milliseconds."""
    for part, share in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))[:most]:
        yield part, quantile(took, share) * 1e3, quantile(alone, share) * 1e3
