"""A store below host memory, as the manager uses it."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvoffload.backends.base import LocalIndex, Removal
from kvoffload.messages import OffloadKey

log = logging.getLogger(__name__)


class RemovalSource(Protocol):
    """What reports the chunks that left a tier."""

    def take_removals(self) -> list[Removal]: ...


@runtime_checkable
class PrefixCount(Protocol):
    """Optional for a presence: looks up a prompt in one call."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys for which ``holds`` answers True."""
        ...


@dataclass(frozen=True)
class Tier:
    """A store below host memory; an exception of a plug-in counts as a miss."""

    name: str
    presence: LocalIndex
    removals: RemovalSource | None = None

    @property
    def medium(self) -> str:
        """The name in events."""
        return self.name.upper()

    def holds(self, key: OffloadKey) -> bool | None:
        """Ask the store's presence: True, False, or None for "ask again"."""
        try:
            return self.presence.holds(key)
        except Exception:
            log.exception("%s: looking up a chunk failed; taken as a miss", self.name)
            return False

    def num_leading(self, keys: Sequence[OffloadKey]) -> int:
        """Count leading chunks that the store has; 0 if they must be asked for one by one."""
        if not isinstance(self.presence, PrefixCount):
            return 0
        try:
            return self.presence.num_leading(keys)
        except Exception:
            log.exception("%s: looking up chunks failed; taken as a miss", self.name)
            return 0

    def forget(self, key: OffloadKey) -> None:
        """Let the store's presence answer False for a chunk that could not be loaded."""
        try:
            self.presence.forget([key])
        except Exception:
            log.exception("%s: forgetting a chunk failed", self.name)

    def take_removals(self) -> list[Removal]:
        """Return the chunks that the store removed by itself."""
        try:
            return self.removals.take_removals() if self.removals else []
        except Exception:
            log.exception("%s: reporting removals failed", self.name)
            return []


def first_holder(key: OffloadKey, tiers: Iterable[Tier]) -> tuple[Tier | None, bool | None]:
    """Return the first tier that has a key, with True; or None with False or "ask again"."""
    answer: bool | None = False
    for tier in tiers:
        holds = tier.holds(key)
        if holds:
            return tier, True
        if holds is None:
            answer = None
    return None, answer
