"""What a worker measures: durations, traffic, and the state of each tier. Plain data."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

import msgspec

BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations, in seconds; one more bucket has the rest."""


class Durations(msgspec.Struct):
    """Durations by bucket, since the start. One thread adds, and any thread reads."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * (len(BUCKETS_S) + 1))
    """Seconds of the durations in each bucket."""

    def add(self, seconds: float) -> None:
        """Count a duration."""
        i = bisect_left(BUCKETS_S, seconds)
        self.counts[i] += 1
        self.sums[i] += seconds

    def include(self, other: "Durations") -> None:
        """Add the durations of another rank."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]


class Traffic(msgspec.Struct):
    """Chunks that were moved in one direction, since the start."""

    chunks: int = 0
    bytes: int = 0
    seconds: Durations = msgspec.field(default_factory=Durations)
    """Durations of the batches in which they were moved."""

    def add(self, chunks: int, num_bytes: int, seconds: float) -> None:
        """Count a batch; one that brought nothing does not count."""
        if chunks:
            self.chunks += chunks
            self.bytes += num_bytes
            self.seconds.add(seconds)

    def include(self, other: "Traffic") -> None:
        """Add the traffic of another rank."""
        self.chunks += other.chunks
        self.bytes += other.bytes
        self.seconds.include(other.seconds)


class TierFigures(msgspec.Struct):
    """A tier as one rank knows it."""

    up: bool
    """Whether the store is open and can be reached."""
    resident_bytes: int | None
    """None where the store tells no usage, or has not yet."""
    capacity_bytes: int | None
    gauges: dict[str, int]
    counters: dict[str, int]
    loads: Traffic
    stores: Traffic

    def include(self, other: "TierFigures") -> None:
        """Add another rank's part. Ranks of a machine share a store: its usage is not summed."""
        self.up &= other.up
        self.resident_bytes = _largest(self.resident_bytes, other.resident_bytes)
        self.capacity_bytes = _largest(self.capacity_bytes, other.capacity_bytes)
        self.gauges = {**other.gauges, **_most(self.gauges, other.gauges)}
        for name, count in other.counters.items():
            self.counters[name] = self.counters.get(name, 0) + count
        self.loads.include(other.loads)
        self.stores.include(other.stores)


class WorkerFigures(msgspec.Struct):
    """All that one worker measures, since its start."""

    tiers: dict[str, TierFigures] = {}
    loads: Traffic = msgspec.field(default_factory=Traffic)
    """Copies from host memory to the KV cache."""
    stores: Traffic = msgspec.field(default_factory=Traffic)
    """Copies from the KV cache to host memory."""
    failed: dict[str, int] = {}
    """Chunks whose transfer failed, by reason."""
    io_restarts: int = 0
    """Ends of the I/O process, each followed by a start."""
    loop_delays: Durations = msgspec.field(default_factory=Durations)
    """By how much the event loop of the I/O server was late, twice a second."""
    namespaces: list[str] = []
    """The first digits of those that stores are open with: one a rank, or one for all ranks."""

    def include(self, other: "WorkerFigures") -> None:
        """Add another rank's figures."""
        for name, tier in other.tiers.items():
            if name in self.tiers:
                self.tiers[name].include(tier)
            else:
                self.tiers[name] = tier
        self.loads.include(other.loads)
        self.stores.include(other.stores)
        for reason, count in other.failed.items():
            self.failed[reason] = self.failed.get(reason, 0) + count
        self.io_restarts += other.io_restarts
        self.loop_delays.include(other.loop_delays)
        self.namespaces = sorted({*self.namespaces, *other.namespaces})


def total(workers: Iterable[bytes]) -> WorkerFigures:
    """Add up the figures of all ranks, each as :func:`packed` returned it."""
    figures = WorkerFigures()
    for worker in workers:
        figures.include(_decoder.decode(worker))
    return figures


def packed(figures: WorkerFigures) -> bytes:
    """Return figures as bytes, which travel and are kept at no cost to the engine's steps."""
    return _encoder.encode(figures)


def _largest(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


def _most(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(value, other.get(name, value)) for name, value in one.items()}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerFigures)
