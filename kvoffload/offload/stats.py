"""What was moved and how fast: totals for statistics, rates for decisions."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from kvoffload.offload.tiers import Tier

FORGET_PER_SAMPLE = 0.8
"""Weight of what was known before each sample of a rate."""
MIN_SAMPLES = 4
"""Samples before a rate counts as known."""
RETRY_AFTER_DECLINES = 64
"""Declined lookups after which a slow tier is tried again: it may have become faster."""


@dataclass
class Moved:
    """Totals in one direction between the GPU and a medium, or host memory and a tier."""

    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Sum of the transfers' durations; those that ran side by side count each."""


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
    """Totals and rates; told by the connector, which measures."""

    def __init__(self) -> None:
        self.loads: dict[str, Moved] = {}
        self.stores: dict[str, Moved] = {}
        self.saved_prefill_tokens = 0
        self.prefill = Rate()
        self.load_rates: dict[str, Rate] = {}
        self._declines: dict[str, int] = {}

    def loaded(
        self,
        medium: str,
        tokens: int,
        chunks: int,
        num_bytes: int,
        seconds: float,
        rated: bool = True,
    ) -> None:
        """A load from a medium to the GPU ended well.

        Args:
            medium: ``CPU``, or a tier's medium.
            tokens: that need not be computed now.
            chunks: moved.
            num_bytes: moved.
            seconds: from its beginning to its end.
            rated: whether this says how fast the medium is.
        """
        _add(self.loads, medium, chunks, num_bytes, seconds)
        self.saved_prefill_tokens += tokens
        if rated and tokens and seconds > 0:
            self.load_rates.setdefault(medium, Rate()).add(tokens, seconds)
        self._declines.pop(medium, None)

    def stored(self, medium: str, chunks: int, num_bytes: int, seconds: float) -> None:
        """A store to host memory (``CPU``) or a write-through to a tier ended."""
        _add(self.stores, medium, chunks, num_bytes, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed a prompt's tokens."""
        if tokens and seconds > 0:
            self.prefill.add(tokens, seconds)

    def slower_than_computing(self, medium: str) -> bool:
        """Whether loading a token from there takes longer than computing it; False if unknown.

        Says no from time to time, so that a tier that became faster is noticed.
        """
        rate = self.load_rates.get(medium)
        if rate is None:
            return False
        load, prefill = rate.tokens_per_s, self.prefill.tokens_per_s
        if load is None or prefill is None or load >= prefill:
            return False
        return self._declines.get(medium, 0) < RETRY_AFTER_DECLINES

    def declined(self, medium: str) -> None:
        """A load from there was declined."""
        self._declines[medium] = self._declines.get(medium, 0) + 1

    def as_dict(self) -> dict[str, object]:
        """Return the totals as plain data."""
        return {
            "loads": {medium: asdict(moved) for medium, moved in self.loads.items()},
            "stores": {medium: asdict(moved) for medium, moved in self.stores.items()},
            "saved_prefill_tokens": self.saved_prefill_tokens,
            "tokens_per_s": {
                "prefill": self.prefill.tokens_per_s,
                **{medium: rate.tokens_per_s for medium, rate in self.load_rates.items()},
            },
        }


def _add(table: dict[str, Moved], medium: str, chunks: int, num_bytes: int, seconds: float) -> None:
    moved = table.setdefault(medium, Moved())
    moved.chunks += chunks
    moved.bytes += num_bytes
    moved.seconds += seconds


def by_tier(count: Counter[str], tiers: Iterable[Tier]) -> dict[str, object]:
    """Sort the manager's counters of lookups and of what was not stored by medium."""
    tiers = list(tiers)
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
    return {
        "lookups": {
            "hits": {"CPU": count["lookup_hits"] - sum(below.values()), **below},
            "misses": count["lookup_misses"],
            "pending": count["lookup_pending"],
            "declined": {tier.medium: count[f"load_declined_{tier.name}"] for tier in tiers},
        },
        "not_stored": not_stored,
    }
