"""Statistics: totals of transfers, rates for decisions, and all figures of a manager."""

from collections import Counter
from collections.abc import Sequence
from copy import copy

import msgspec

from kvoffload.offload.events import EventLog
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import Tier, WriteThrough

FORGET_PER_SAMPLE = 0.8
"""Weight of the earlier samples of a rate at each new sample."""
MIN_SAMPLES = 4
"""Samples before a rate counts as known."""


class Moved(msgspec.Struct):
    """Totals in one direction between the GPU and a medium, or host memory and a tier."""

    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Sum of the transfers' durations. Transfers that run at the same time count each."""


class HostFigures(msgspec.Struct, frozen=True):
    """Host memory now."""

    capacity_bytes: int
    resident_bytes: int
    inflight_bytes: int
    resident_chunks: int
    busy_chunks: int
    """Slots that transfers use; rows, if chunks differ in size."""


class LaneFigures(msgspec.Struct, frozen=True):
    """Write-through to one tier now."""

    inflight_bytes: int
    waiting_chunks: int


class LookupFigures(msgspec.Struct, frozen=True):
    """Lookups so far."""

    hits: dict[str, int]
    """Chunks found, by medium."""
    misses: int
    pending: int
    declined: dict[str, int]
    """Requests that did not load what a tier has, by medium: too slow, or too much in its queue."""


class ManagerStats(msgspec.Struct, frozen=True):
    """All figures of a manager; see ``docs/reference/counters.md``."""

    host: HostFigures
    write_through: dict[str, LaneFigures]
    """By medium."""
    removed: dict[str, dict[str, int]]
    """Chunks that left, by medium and reason."""
    counters: dict[str, int]
    lookups: LookupFigures
    not_stored: dict[str, dict[str, int]]
    """Chunks that were not stored, by medium and reason."""
    loads: dict[str, Moved]
    stores: dict[str, Moved]
    saved_prefill_tokens: int
    tokens_per_s: dict[str, float | None]
    """Rates of prefill and of loads by medium; None if not known."""


class Rate:
    """Tokens a second, over the last few samples, larger ones weighing more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._samples = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a sample."""
        self._tokens = self._tokens * FORGET_PER_SAMPLE + tokens
        self._seconds = self._seconds * FORGET_PER_SAMPLE + seconds
        self._samples += 1

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None if it is not known."""
        if self._samples < MIN_SAMPLES or not self._seconds:
            return None
        return self._tokens / self._seconds


class Stats:
    """Totals and rates, as the connector measures them."""

    def __init__(self) -> None:
        self.loads: dict[str, Moved] = {}
        self.stores: dict[str, Moved] = {}
        self.saved_prefill_tokens = 0
        self.prefill = Rate()
        self.load_rates: dict[str, Rate] = {}

    def loaded(
        self,
        medium: str,
        tokens: int,
        chunks: int,
        num_bytes: int,
        seconds: float,
        rated: bool = True,
    ) -> None:
        """Count a load from a medium to the GPU.

        Args:
            medium: ``CPU``, or a tier's medium.
            tokens: tokens that need not be computed.
            chunks: chunks moved.
            num_bytes: bytes moved.
            seconds: the transfer's own time.
            rated: include this sample in the medium's rate.
        """
        _add(self.loads, medium, chunks, num_bytes, seconds)
        self.saved_prefill_tokens += tokens
        if rated and tokens and seconds > 0:
            self.load_rates.setdefault(medium, Rate()).add(tokens, seconds)

    def stored(self, medium: str, chunks: int, num_bytes: int, seconds: float) -> None:
        """Count a store to host memory (``CPU``) or a write-through to a tier."""
        _add(self.stores, medium, chunks, num_bytes, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Add a sample of the rate at which the engine computes prompts."""
        if tokens and seconds > 0:
            self.prefill.add(tokens, seconds)


def _add(table: dict[str, Moved], medium: str, chunks: int, num_bytes: int, seconds: float) -> None:
    moved = table.setdefault(medium, Moved())
    moved.chunks += chunks
    moved.bytes += num_bytes
    moved.seconds += seconds


def collect(
    host: HostCache,
    count: Counter[str],
    tiers: Sequence[Tier],
    write_through: WriteThrough,
    events: EventLog,
    figures: Stats,
) -> ManagerStats:
    """Collect the figures of a manager's parts."""
    below = {tier.medium: count[f"lookup_hits_{tier.medium}"] for tier in tiers}
    not_stored = {
        "CPU": {
            "no_room": count["store_refused"],
            "not_admitted": count["store_not_admitted"],
            "not_wanted": count["store_not_wanted"],
            "failed": count["store_failed"],
        }
    }
    for tier in tiers:
        not_stored[tier.medium] = {
            "back_pressure": count[f"persist_dropped_{tier.name}"],
            "failed": count[f"persist_failed_{tier.name}"],
        }
    rates = {medium: rate.tokens_per_s for medium, rate in figures.load_rates.items()}
    return ManagerStats(
        host=HostFigures(
            host.capacity_bytes,
            host.resident_bytes,
            host.inflight_bytes,
            host.num_ready,
            host.busy_slots,
        ),
        write_through={t.medium: LaneFigures(*write_through.in_flight(t.name)) for t in tiers},
        removed=events.removed_by_medium(),
        counters=dict(count),
        lookups=LookupFigures(
            {"CPU": count["lookup_hits"] - sum(below.values()), **below},
            count["lookup_misses"],
            count["lookup_pending"],
            {
                tier.medium: count[f"load_declined_{tier.name}"]
                + count[f"load_not_in_time_{tier.name}"]
                for tier in tiers
            },
        ),
        not_stored=not_stored,
        loads={medium: copy(moved) for medium, moved in figures.loads.items()},
        stores={medium: copy(moved) for medium, moved in figures.stores.items()},
        saved_prefill_tokens=figures.saved_prefill_tokens,
        tokens_per_s={"prefill": figures.prefill.tokens_per_s, **rates},
    )
