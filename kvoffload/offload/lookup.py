"""Finds where a chunk is: in host memory, in flight to it, or on a tier."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvoffload.messages import OffloadKey
from kvoffload.metrics.names import HOST
from kvoffload.offload.events import CPU
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import Tier, first_holder

ASKED_AHEAD = 1024
"""Chunks after a pending one that tiers are asked about in the same step."""
_HOST_HIT = (HOST, "hit")


class Lookups:
    """Answers lookups; changes nothing but the counters of :meth:`find_prefix`.

    Args:
        host: host memory.
        found: counts the chunks found, by tier and result, and the lookups that end otherwise.
        caching: False if chunks only pass through host memory: a load then needs one slot, and
            without a free slot the answer is "ask again".
        lacks_room: answers for a chunk that host memory has no room for: False, or "ask again".
    """

    def __init__(
        self,
        host: HostCache,
        found: Counter[tuple[str, str]],
        caching: bool,
        lacks_room: Callable[[], bool | None],
    ) -> None:
        self._host = host
        self._lacks_room = lacks_room
        self._found = found
        self._caching = caching

    # ---- one chunk ----

    def find(self, key: OffloadKey, tiers: tuple[Tier, ...]) -> bool | None:
        """Return whether a chunk that is not ready in host memory can be loaded from these tiers.

        A chunk that another request fetches is None: it will soon be ready. A chunk being stored is
        False: it is still in GPU memory, where the engine's own prefix cache finds it.
        """
        host = self._host
        if key in host.fetching:
            return None
        if host.moving(key):
            return False
        answer = first_holder(key, tiers)[1]
        if answer and not self._caching and not host.room_for(key):
            return None
        return answer

    def place(self, key: OffloadKey, tiers: tuple[Tier, ...], declined: Mapping[Tier, str]) -> str:
        """Name the place of a chunk, or why the tier that has it is declined; "" for nowhere."""
        host = self._host
        if host.is_ready(key):
            return CPU
        if key in host.fetching:
            return "fetching"
        if host.moving(key):
            return "storing"
        tier, answer = first_holder(key, tiers)
        if tier is not None:
            return tier.medium
        if answer is None:
            return "pending"
        return next((why for tier, why in declined.items() if tier.holds(key)), "")

    # ---- a prompt ----

    def find_prefix(
        self, keys: Sequence[OffloadKey], tiers_of: Callable[[], tuple[Tier, ...]]
    ) -> tuple[int, bool]:
        """Count the leading chunks that can be loaded; return also whether the next may follow.

        Args:
            keys: of the chunks.
            tiers_of: returns the tiers that they may come from; called if host memory lacks one.
        """
        if not self._caching and keys and self._waits_for_slot(keys[0], tiers_of()):
            self._found["", "pending"] += 1
            return 0, True
        hits = self._host.num_leading(keys)
        self._found[_HOST_HIT] += hits
        if hits == len(keys):
            return hits, False
        answer: bool | None = False
        if (tiers := tiers_of()) or self._host.fetching:
            hits, answer = self._find_below(keys, hits, tiers)
        if hits == len(keys):
            return hits, False
        self._found["", "pending" if answer is None else "miss"] += 1
        return hits, answer is None

    def _waits_for_slot(self, key: OffloadKey, tiers: tuple[Tier, ...]) -> bool:
        host = self._host
        if host.room_for(key) or host.moving(key):
            return False
        return first_holder(key, tiers)[0] is not None

    def _find_below(
        self, keys: Sequence[OffloadKey], start: int, tiers: tuple[Tier, ...]
    ) -> tuple[int, bool | None]:
        """Go on where the first chunk is not in host memory; return hits and the last answer."""
        host = self._host
        # Idle chunks of the prompt itself are not evicted for the rest of the prompt.
        idle, pinned = host.evictable, host.pinned
        idle_hits = start - sum(map(pinned.__contains__, keys[:start])) if pinned else start
        from_below = 0
        found: Counter[str] = Counter()
        answer: bool | None = False
        hits = start
        if tiers and (from_below := self._run_on(tiers[0], keys[start:], idle_hits)):
            found[tiers[0].name] = from_below
            hits += from_below
        for key in keys[hits:]:
            name = ""
            if key in idle:
                idle_hits += 1
            elif key not in pinned:
                if key in host.fetching:
                    answer = None
                    break
                tier, answer = (None, False) if host.moving(key) else first_holder(key, tiers)
                if tier is None:
                    break
                from_below += 1
                name = tier.name
            if from_below and self._caching and from_below + idle_hits > host.room_for(key):
                answer = self._lacks_room()
                break
            if name:
                found[name] += 1
            hits += 1
        if answer is None:
            # Ask about the following chunks now, so that requests to slow tiers travel together.
            for key in keys[hits + 1 : hits + 1 + ASKED_AHEAD]:
                if not host.is_ready(key) and first_holder(key, tiers)[1] is False:
                    break
        self._found[_HOST_HIT] += hits - start - found.total()
        for name, count in found.items():
            self._found[name, "hit"] += count
        return hits, answer

    def _run_on(self, tier: Tier, keys: Sequence[OffloadKey], idle_hits: int) -> int:
        """Count leading chunks on the nearest tier that need no further look, one by one.

        Host memory has none of them, and room for all.
        """
        run = keys[: tier.num_leading(keys)]
        if self._caching and run:
            run = run[: max(0, self._host.least_room(run) - idle_hits)]
        return len(run) if len(self._host.absent(run)) == len(run) else 0

    def has_room(self, keys: Sequence[OffloadKey]) -> bool | None:
        """Return whether host memory can take all these chunks at once, as one load needs it."""
        if not self._caching:  # chunks of one size take turns in a slot
            keys = list({self._host.bytes_of(key): key for key in keys}.values())
        return self._host.has_room(keys) or self._lacks_room()
