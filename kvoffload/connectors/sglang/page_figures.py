"""What a rank's pages and tiers did so far, as the samples of :mod:`kvoffload.metric_list`."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvoffload.figures import Traffic, WorkerFigures
from kvoffload.identity import short
from kvoffload.io.client import IOClient
from kvoffload.metric_list import Sample, samples_of_worker


class PageFigures:
    """Counts lookups, tokens, copies and evictions. Any thread adds, and any thread reads.

    Args:
        client: has the tiers' own figures.
        tokens_of: returns the tokens of a prompt that the page of a key holds.
    """

    def __init__(self, client: IOClient, tokens_of: Callable[[bytes], int]) -> None:
        self._client = client
        self._tokens_of = tokens_of
        self._lock = threading.Lock()
        self._found: Counter[str] = Counter()
        """Pages that lookups found, by tier."""
        self._misses = 0
        self._hit_tokens: Counter[str] = Counter()
        self._removed = {name: Counter(evicted=0) for name in client.tiers}
        """Tier → reason → pages that left it."""
        self._loads, self._stores = Traffic(), Traffic()
        """Copies between HiCache's host memory and the slots."""

    def looked_up(self, found: Counter[str], num_asked: int) -> None:
        """Count a lookup, which found pages by tier."""
        with self._lock:
            self._found.update(found)
            self._misses += found.total() < num_asked
            self._take_removals()

    def loaded(self, tier: str, keys: Sequence[bytes]) -> None:
        """Count the tokens of pages that a tier has brought."""
        with self._lock:
            self._hit_tokens[tier] += sum(map(self._tokens_of, keys))

    def copied(self, num_bytes: int, seconds: float, *, into_slot: bool) -> None:
        """Count the copy of a page."""
        with self._lock:
            (self._stores if into_slot else self._loads).add(1, num_bytes, seconds)

    def _take_removals(self) -> None:
        for name, tier in self._client.tiers.items():
            self._removed[name].update(removal.reason for removal in tier.take_removals())

    def samples(self, counters: Mapping[str, int], inflight_bytes: int) -> Iterator[Sample]:
        """Yield the samples of a scrape.

        Args:
            counters: pages by what became of them, such as ``load_missing``.
            inflight_bytes: of the slots in use.
        """
        with self._lock:
            self._take_removals()
        yield "kvoffload_inflight_bytes", ("cpu",), inflight_bytes
        for tier, removed in self._removed.items():
            yield "kvoffload_lookups", (tier, "hit"), self._found[tier]
            yield "kvoffload_hit_tokens", (tier,), self._hit_tokens[tier]
            for reason, count in removed.items():
                yield "kvoffload_evictions", (tier, reason), count
        yield "kvoffload_lookups", ("", "miss"), self._misses
        yield "kvoffload_saved_prefill_tokens", (), sum(self._hit_tokens.values())
        failed: Counter[str] = Counter()
        for name, count in {"store_deadline": 0, **counters}.items():
            verb, _, reason = name.partition("_")
            if verb == "store":
                yield "kvoffload_stores_dropped", ("", reason), count
            if verb in ("load", "store") and reason != "barred":
                failed[reason] += count  # of all tiers: another one may have had the page
        yield from samples_of_worker(self._worker(failed))

    def _worker(self, failed: dict[str, int]) -> WorkerFigures:
        client = self._client
        return WorkerFigures(
            tiers={name: tier.figures for name, tier in client.tiers.items()},
            loads=self._loads,
            stores=self._stores,
            failed=failed,
            io_restarts=client.counters["died"],
            loop_delays=client.loop_delays,
            namespaces=[short(client.opening.namespace)],
        )
