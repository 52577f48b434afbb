"""Counts what happens, and makes samples: what every page and table is made from."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import add
from typing import Any

import msgspec

from kvoffload.metrics.names import (
    LOAD_BYTES,
    LOAD_CHUNKS,
    LOAD_SECONDS,
    METRICS,
    STORE_BYTES,
    STORE_CHUNKS,
    STORE_SECONDS,
)

BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations, in seconds; one more bucket has the rest."""


class Durations(msgspec.Struct):
    """A histogram: durations by bucket, since the start. One thread adds, and any thread reads."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * (len(BUCKETS_S) + 1))
    """Seconds of the durations in each bucket."""

    def add(self, seconds: float) -> None:
        """Count a duration."""
        i = bisect_left(BUCKETS_S, seconds)
        self.counts[i] += 1
        self.sums[i] += seconds

    def __add__(self, other: "Durations") -> "Durations":
        """Return the durations of two ranks together."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Durations(counts, [a + b for a, b in zip(self.sums, other.sums, strict=True)])


Value = int | float | Durations
Labels = tuple[str, ...]
Sample = tuple[str, Labels, Value]
"""Name, label values and value."""
LOADS = LOAD_BYTES, LOAD_CHUNKS, LOAD_SECONDS
STORES = STORE_BYTES, STORE_CHUNKS, STORE_SECONDS


class Traffic:
    """Chunks that were moved in one direction, since the start. One thread adds, any reads.

    Args:
        metrics: :data:`LOADS` or :data:`STORES`.
        tier: the label.
    """

    def __init__(self, metrics: tuple[str, str, str], tier: str) -> None:
        self._metrics, self._labels = metrics, (tier,)
        self.chunks = self.bytes = 0
        self.seconds = Durations()
        """Durations of the batches in which they were moved."""

    def add(self, chunks: int, num_bytes: int, seconds: float) -> None:
        """Count a batch; one that brought nothing does not count."""
        if chunks:
            self.chunks += chunks
            self.bytes += num_bytes
            self.seconds.add(seconds)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of the three metrics."""
        values: tuple[Value, ...] = (self.bytes, self.chunks, self.seconds)
        for name, value in zip(self._metrics, values, strict=True):
            yield name, self._labels, value


class Registry:
    """What one part of an engine counts, and what is read from it when it is asked."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter[Any]] = {}
        self._sources: list[Callable[[], Iterable[Sample]]] = []

    def counter(self, name: str, *zeros: str | Labels) -> Counter[Any]:
        """Return a counter, for a thread to add to by ``counter[labels] += number``.

        A metric's only label is a text there, and more are a tuple. ``zeros`` begin at 0.
        """
        counter = self._counters.setdefault(name, Counter())
        for labels in zeros:
            counter[labels] += 0
        return counter

    def read(self, *sources: Callable[[], Iterable[Sample]]) -> None:
        """Take further samples from here, each time that they are asked for."""
        self._sources += sources

    def samples(self) -> Iterator[Sample]:
        """Yield all samples, on any thread.

        Raises:
            RuntimeError: a source's dictionary was changed while it was read.
        """
        for name, counter in list(self._counters.items()):
            for labels, count in list(counter.items()):
                yield name, labels if isinstance(labels, tuple) else (labels,), count
        for source in self._sources:
            yield from source()


# ---- several ranks ----


def packed(samples: Iterable[Sample]) -> bytes:
    """Return samples as bytes, which travel and are kept at no cost to the engine's steps."""
    tables: dict[str, list[tuple[Labels, Value]]] = {}
    for name, labels, value in samples:
        tables.setdefault(name, []).append((labels, value))
    return _encoder.encode(tables)


def total(ranks: Iterable[bytes]) -> Iterator[Sample]:
    """Yield the samples of all ranks together, each rank's as :func:`packed` returned them.

    A metric is decoded and added up when the first sample of it is wanted.
    """
    tables = [_by_name.decode(rank) for rank in ranks]
    for name in dict.fromkeys(chain.from_iterable(tables)):
        join, found = _JOIN[METRICS[name].of_ranks], dict[Labels, Any]()
        for table in tables:
            for labels, value in _series.decode(table[name]) if name in table else ():
                found[labels] = join(found[labels], value) if labels in found else value
        for labels, value in found.items():
            yield name, labels, value


_JOIN: dict[str, Callable[[Any, Any], Any]] = {"sum": add, "largest": max, "smallest": min}
_encoder = msgspec.msgpack.Encoder()
_by_name = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_series = msgspec.msgpack.Decoder(list[tuple[Labels, Value]])


# ---- plain data ----


def as_data(samples: Iterable[Sample]) -> dict[str, Any]:
    """Return samples as plain data: ``data["lookups"]["disk"]["hit"]``."""
    data: dict[str, Any] = {}
    for name, labels, value in samples:
        place, key = data, name
        for label in labels:
            place, key = place.setdefault(key, {}), label
        place[key] = msgspec.to_builtins(value)
    return data


def samples_of(data: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples that :func:`as_data` made; what is none is passed over."""
    for name, metric in METRICS.items():
        if name in data:
            yield from _samples(name, (), data[name], len(metric.labels))


def _samples(name: str, labels: Labels, data: Any, depth: int) -> Iterator[Sample]:
    if not depth:
        yield name, labels, msgspec.convert(data, Value)
        return
    for label, inner in data.items():
        yield from _samples(name, (*labels, label), inner, depth - 1)
