"""Where a chunk is: in host memory, on its way there, or on a tier that is worth reading."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvoffload.config import HARMLESS_HINTS
from kvoffload.messages import OffloadKey
from kvoffload.offload.base import ReqContext
from kvoffload.offload.events import CPU
from kvoffload.offload.hints import NO_HINTS, HintReader, Hints
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.stats import Stats
from kvoffload.offload.tiers import Tier, first_holder

ASKED_AHEAD = 1024
"""Chunks after one whose answer is on its way that tiers are asked about in the same step."""


class Lookups:
    """Answers questions and counts the answers; changes nothing."""

    def __init__(
        self,
        host: HostCache,
        figures: Stats,
        counters: Counter[str],
        client_hints: Iterable[str] = HARMLESS_HINTS,
    ) -> None:
        self.tiers: tuple[Tier, ...] = ()
        """Set by the manager."""
        self._host = host
        self._figures = figures
        self._counters = counters
        self._hints = HintReader(counters, client_hints)

    # ---- which tiers ----

    def hints(self, req_context: ReqContext | None) -> Hints:
        """Return what a request asks for."""
        if req_context is None:
            return NO_HINTS
        if not req_context.kv_transfer_params:  # answers of transfers name the request alone
            return self._hints.known(req_context.req_id)
        return self._hints.hints(req_context, frozenset(tier.name for tier in self.tiers))

    def forget_hints(self, req_context: ReqContext | None) -> None:
        """Drop what a request asked for: the request ended."""
        if req_context is not None:
            self._hints.forget(req_context.req_id)

    def tiers_for(self, req_context: ReqContext | None) -> tuple[Tier, ...]:
        """Return the tiers that a request may be served from or stored to."""
        wanted = self.hints(req_context).tiers
        if wanted is None:
            return self.tiers
        return tuple(tier for tier in self.tiers if tier.name in wanted)

    def _worth_reading(self, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """Leave out tiers from which loading takes longer than computing."""
        if not self._figures.load_rates:
            return tiers
        slow = self._figures.slower_than_computing
        return tuple(tier for tier in tiers if not slow(tier.medium))

    # ---- one chunk ----

    def find(self, key: OffloadKey, req_context: ReqContext | None) -> bool | None:
        """Say whether a chunk that is not ready in host memory can be loaded."""
        if key in self._host.fetching:
            return None
        if self._host.moving(key):
            return False
        return first_holder(key, self._worth_reading(self.tiers_for(req_context)))[1]

    def whereabouts(self, key: OffloadKey, req_context: ReqContext | None) -> str:
        """Name the place of a chunk; "" if it is nowhere."""
        host = self._host
        if host.is_ready(key):
            return CPU
        if key in host.fetching:
            return "fetching"
        if host.moving(key):
            return "storing"
        allowed = self.tiers_for(req_context)
        quick = self._worth_reading(allowed)
        tier, answer = first_holder(key, quick)
        if tier is not None:
            return tier.medium
        if answer is None:
            return "pending"
        return "too_slow" if any(t.holds(key) for t in allowed if t not in quick) else ""

    # ---- a prompt ----

    def find_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> tuple[int, bool]:
        """See :meth:`OffloadingManager.lookup_prefix`."""
        hits = self._ready_prefix(keys)
        if hits == len(keys):
            self._counters["lookup_hits"] += hits
            return hits, False
        in_host = hits
        answer: bool | None = False
        allowed = self.tiers_for(req_context)
        tiers = self._worth_reading(allowed)
        if tiers or self._host.fetching:
            hits, answer = self._find_below(keys, hits, tiers)
        self._counters["lookup_hits"] += in_host
        if hits == len(keys):
            return hits, False
        pending = answer is None
        self._counters["lookup_pending" if pending else "lookup_misses"] += 1
        if len(tiers) < len(allowed) and not pending:
            self._note_declined(keys[hits], [tier for tier in allowed if tier not in tiers])
        return hits, pending

    def _ready_prefix(self, keys: Sequence[OffloadKey]) -> int:
        return sum(takewhile(bool, map(self._host.resident.__contains__, keys)))

    def _find_below(
        self, keys: Sequence[OffloadKey], start: int, tiers: tuple[Tier, ...]
    ) -> tuple[int, bool | None]:
        """Go on where the first chunk is not in host memory; return hits, and what ended them."""
        host = self._host
        # Idle chunks of the prompt itself are not what makes room for the rest of it.
        ready, pinned = host.resident, host.pinned
        idle_hits = start - sum(map(pinned.__contains__, keys[:start])) if pinned else start
        from_below = 0
        found: Counter[str] = Counter()
        answer: bool | None = False
        hits = start
        for key in keys[start:]:
            if key in ready:
                idle_hits += key not in pinned
            else:
                if key in host.fetching:
                    answer = None
                    break
                tier, answer = (None, False) if host.moving(key) else first_holder(key, tiers)
                if tier is None:
                    break
                from_below += 1
                found[tier.medium] += 1
            if from_below and not self._fits(key, from_below + idle_hits):
                answer = False
                break
            hits += 1
        if answer is None:
            # What comes after is asked now, too, so that questions to slow tiers travel together.
            for key in keys[hits + 1 : hits + 1 + ASKED_AHEAD]:
                if not host.is_ready(key) and first_holder(key, tiers)[1] is False:
                    break
        for medium, count in found.items():
            self._counters[f"lookup_hits_{medium}"] += count
        self._counters["lookup_hits"] += hits - start
        return hits, answer

    def _fits(self, key: OffloadKey, count: int) -> bool:
        """Whether host memory can receive that many chunks of this one's size in one load."""
        return count <= self._host.room_for(key)

    def has_room(self, keys: Sequence[OffloadKey]) -> bool:
        """See :meth:`HostCache.has_room`."""
        return self._host.has_room(keys)

    def _note_declined(self, key: OffloadKey, slow: Iterable[Tier]) -> None:
        """A lookup ended at this chunk: was it because a tier that has it is too slow?"""
        for tier in slow:
            if tier.holds(key):
                self._counters[f"load_declined_{tier.name}"] += 1
                self._figures.declined(tier.medium)
