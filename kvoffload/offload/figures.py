"""What a manager counts, and what is read from its parts."""

from collections.abc import Iterable, Iterator

from kvoffload.metrics import names
from kvoffload.metrics.names import HOST
from kvoffload.metrics.samples import Registry, Sample
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import Tier

_EVENTS = (
    "declined_after_short_load", "events_lost", "hints_ignored", "hints_not_allowed",
    "load_refused", "unexpected_completion", "unexpected_release",
)  # fmt: skip
"""Those whose counters begin at 0."""
NO_ROOM = (HOST, "no_room")
"""Chunks that were not stored, because every slot was in use."""
_NOT_STORED = (NO_ROOM, (HOST, "not_admitted"), (HOST, "not_wanted"), (HOST, "failed"))


class ManagerFigures(Registry):
    """The registry of a manager and of the connector that uses it.

    Args:
        host: host memory.
    """

    def __init__(self, host: HostCache) -> None:
        super().__init__()
        self._host = host
        self.events = self.counter(names.EVENTS, *_EVENTS)
        self.lookups = self.counter(names.LOOKUPS, (HOST, "hit"), ("", "miss"), ("", "pending"))
        self.hit_tokens = self.counter(names.HIT_TOKENS, HOST)
        """Tokens of prompts that the connector has loaded, by tier."""
        self.removals = self.counter(names.EVICTIONS, (HOST, "evicted"))
        self.not_stored = self.counter(names.STORES_DROPPED, *_NOT_STORED)
        self.read(self._of_host)

    def begin(self, tiers: Iterable[Tier]) -> None:
        """Let the counters of these tiers begin at 0, or go on."""
        for tier in (each.name for each in tiers):
            self.counter(names.LOOKUPS, (tier, "hit"), (tier, "declined"), (tier, "not_in_time"))
            self.counter(names.HIT_TOKENS, tier)
            self.counter(names.EVICTIONS, (tier, "evicted"))
            self.counter(names.STORES_DROPPED, (tier, "back_pressure"), (tier, "failed"))

    def _of_host(self) -> Iterator[Sample]:
        host = self._host
        yield names.RESIDENT_BYTES, (HOST,), host.resident_bytes
        yield names.INFLIGHT_BYTES, (HOST,), host.inflight_bytes
        yield names.CAPACITY_BYTES, (HOST,), host.capacity_bytes
        yield names.HOST_CHUNKS, (), host.num_ready
        yield names.HOST_CHUNKS_BUSY, (), host.busy_slots
        yield names.SAVED_PREFILL_TOKENS, (), self.hit_tokens.total()
