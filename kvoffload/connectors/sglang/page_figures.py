"""What a rank's pages and tiers did so far: for our page of metrics, and for SGLang's own."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

from kvoffload.io.client import IOClient
from kvoffload.metrics import names
from kvoffload.metrics.names import HOST
from kvoffload.metrics.samples import LOADS, STORES, Registry, Sample, Traffic
from kvoffload.transfer.engine import FAILURES

_DEADLINE = ("store", "deadline")


class PageFigures:
    """Counts what becomes of pages. Any thread adds, and any thread reads.

    Args:
        client: has the tiers' own figures.
        tokens_of: returns the tokens of a prompt that the page of a key holds.
        inflight_bytes: returns those of the slots in use.
    """

    def __init__(
        self,
        client: IOClient,
        tokens_of: Callable[[bytes], int],
        inflight_bytes: Callable[[], int],
    ) -> None:
        registry, tiers = Registry(), list(client.tiers)
        self._client = client
        self._tokens_of = tokens_of
        self._inflight_bytes = inflight_bytes
        self._lock = threading.Lock()
        self._events = registry.counter(
            names.EVENTS, "loaded", "stored", "already_stored", "raised"
        )
        self._lookups = registry.counter(
            names.LOOKUPS, ("", "miss"), *((tier, "hit") for tier in tiers)
        )
        self._hit_tokens = registry.counter(names.HIT_TOKENS, *tiers)
        self._removals = registry.counter(names.EVICTIONS, *((tier, "evicted") for tier in tiers))
        self._told: Counter[str] = Counter()
        """What SGLang's own page has."""
        self._lost: Counter[tuple[str, str]] = Counter({_DEADLINE: 0})
        """Pages that were not loaded or stored, by the call and the reason."""
        self._loads, self._stores = Traffic(LOADS, HOST), Traffic(STORES, HOST)
        """Copies between HiCache's host memory and the slots."""
        registry.read(self._of_pages, self._loads.samples, self._stores.samples, client.samples)
        self._registry = registry

    def count(self, event: str, pages: int = 1) -> None:
        """Count pages, or a call."""
        with self._lock:
            self._events[event] += pages

    def lose(self, call: Literal["load", "store"], reason: str, pages: int) -> None:
        """Count pages that were not loaded or stored."""
        with self._lock:
            self._lost[call, reason] += pages

    def looked_up(self, found: Counter[str], num_asked: int) -> None:
        """Count a lookup, which found pages by tier."""
        with self._lock:
            for tier, pages in found.items():
                self._lookups[tier, "hit"] += pages
            self._lookups["", "miss"] += found.total() < num_asked
            self._take_removals()

    def loaded(self, tier: str, keys: Sequence[bytes]) -> None:
        """Count the tokens of pages that a tier has brought."""
        with self._lock:
            self._hit_tokens[tier] += sum(map(self._tokens_of, keys))

    def copied(self, pages: int, num_bytes: int, seconds: float, *, into_slot: bool) -> None:
        """Count the copies of pages, and how long they took together."""
        with self._lock:
            (self._stores if into_slot else self._loads).add(pages, num_bytes, seconds)

    def _take_removals(self) -> None:
        for name, tier in self._client.tiers.items():
            for removal in tier.take_removals():
                self._removals[name, removal.reason] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of a scrape, on any thread."""
        with self._lock:
            self._take_removals()
        return self._registry.samples()

    def _of_pages(self) -> Iterator[Sample]:
        yield names.INFLIGHT_BYTES, (HOST,), self._inflight_bytes()
        yield names.SAVED_PREFILL_TOKENS, (), self._hit_tokens.total()
        failed = Counter(dict.fromkeys(FAILURES, 0))
        for (call, reason), pages in dict(self._lost).items():
            if call == "store":
                yield names.STORES_DROPPED, ("", reason), pages
            if reason != "barred":
                failed[reason] += pages  # of all tiers: another one may have had the page
        for reason, pages in failed.items():
            yield names.TRANSFER_FAILURES, (reason,), pages

    def tell(self, *ranks: int) -> None:
        """Pass on to SGLang's own page what changed since the last call.

        Args:
            ranks: of this process, in tensor and in pipeline parallelism.
        """
        for event, count in self.by_event().items():
            if change := max(0, count - self._told[event]):
                _counter().labels(event, *map(str, ranks)).inc(change)
            self._told[event] = count

    def by_event(self) -> dict[str, int]:
        """Return the counters of SGLang's own page: of pages, of tiers, and of the I/O server."""
        found = {**self._events, "io_died": self._client.died}
        found |= {f"{call}_{reason}": pages for (call, reason), pages in dict(self._lost).items()}
        for tier in self._client.tiers.values():
            found |= {f"{tier.name}_{name}": count for name, count in tier.counters.items()}
        return found


@cache
def _counter() -> Any:
    """Make the metric of SGLang's own page, once a process: a storage may be attached again."""
    import prometheus_client

    text = "Pages by what became of them, and counters of the tiers."
    labels = ["event", "tp_rank", "pp_rank"]
    return prometheus_client.Counter("sglang:kvoffload_events", text, labels)
