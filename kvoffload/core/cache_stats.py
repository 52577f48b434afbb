"""What the block manager reports: cache events, and how often prefixes were found."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

MEDIUM_GPU = "GPU"


class KVCacheEvent(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A fact about what is cached, stated after it became true."""


class BlockStored(KVCacheEvent, frozen=True, tag=True, gc=False):
    """A run of consecutive blocks of one request can be found from now on.

    ``token_ids`` are exactly the tokens of ``block_hashes``: ``block_size`` for each.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    group_idx: int = 0
    medium: str = MEDIUM_GPU


class BlockRemoved(KVCacheEvent, frozen=True, tag=True, gc=False):
    """These blocks cannot be found any more."""

    block_hashes: list[bytes]
    group_idx: int = 0
    medium: str = MEDIUM_GPU


class AllBlocksCleared(KVCacheEvent, frozen=True, tag=True, gc=False):
    """Nothing is cached any more."""


@dataclass
class PrefixCacheStats:
    """Prefix lookups since the last report.

    Attributes:
        reset: the cache was reset in this time: older figures mean nothing any more.
        requests: requests admitted.
        queries: tokens they had.
        hits: tokens of them found in the cache.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


class PrefixCachingMetrics:
    """Hit rate over about the last ``max_recent_requests`` requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self._recent: deque[PrefixCacheStats] = deque()

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add a report; reports that the window does not need any more are dropped."""
        if stats.reset:
            self.reset()
        if stats.requests:
            self._recent.append(stats)
        while len(self._recent) > 1 and self._sum("requests") > self.max_recent_requests:
            self._recent.popleft()

    def reset(self) -> None:
        self._recent.clear()

    @property
    def hit_rate(self) -> float:
        """Share of tokens found, from 0 to 1; 0 if nothing was asked."""
        queries = self._sum("queries")
        return self._sum("hits") / queries if queries else 0.0

    def _sum(self, name: str) -> int:
        return sum(getattr(stats, name) for stats in self._recent)
