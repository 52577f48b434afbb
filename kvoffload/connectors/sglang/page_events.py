"""Counters by reason on SGLang's own metrics endpoint."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

EVENTS = "sglang:kvoffload_events"


@cache
def _counter() -> Any:
    """Make the metric, once a process: a storage may be attached again."""
    import prometheus_client

    text = "Pages by what became of them, and counters of the tiers."
    return prometheus_client.Counter(EVENTS, text, ["event", "tp_rank", "pp_rank"])


class PageEvents:
    """Passes counters on to Prometheus: what changed since the last call.

    Args:
        tp_rank: of this process.
        pp_rank: of this process.
    """

    def __init__(self, tp_rank: int, pp_rank: int) -> None:
        self._ranks = (str(tp_rank), str(pp_rank))
        self._told: Counter[str] = Counter()

    def tell(self, counts: Mapping[str, int]) -> None:
        """Take in the counters as they are now."""
        for name, count in counts.items():
            if change := max(0, count - self._told[name]):
                _counter().labels(name, *self._ranks).inc(change)
            self._told[name] = count
