"""Which pages tiers have: by copies of their indexes, or by an answer of the store itself."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvoffload.io.remote_tier import RemoteTier

ASK_AGAIN_S = 0.001
"""Time between two looks for an answer of a store."""


class PageLookup:
    """Asks tiers for pages, and tells them what could not be loaded. Any thread may call.

    Args:
        tiers: in the order in which they are asked.
        timeout_s: how long a store may take to answer.
        asks: whether another process stores the pages of this one. The copy of an index learns of
            them up to 2 s later. So a store that processes share is asked for what the copy lacks.
    """

    def __init__(self, tiers: Sequence[RemoteTier], timeout_s: float, *, asks: bool) -> None:
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._asks = asks
        self._asking = threading.Lock()
        """Held while a tier is asked or told: its methods are for one thread."""

    def deadline_s(self) -> float:
        """Return when a call that begins now waits no more."""
        return time.monotonic() + self._timeout_s

    def leading(
        self, keys: Sequence[bytes], until_s: float | None = None
    ) -> tuple[Counter[str], int]:
        """Count the leading pages that tiers have.

        Args:
            keys: of the pages.
            until_s: when to wait no more, if not by the timeout from now on.

        Returns:
            The pages by tier, and how many of them precede the first one that no index had.
        """
        until_s = until_s or self.deadline_s()
        found: Counter[str] = Counter()
        count, num_listed = 0, len(keys)
        while True:
            before = count
            for tier in self._tiers:
                known = self._known_leading(tier, keys[count:], until_s)
                asked = self._asked_leading(tier, keys[count + known :], until_s)
                if asked:
                    num_listed = min(num_listed, count + known)
                found[tier.name] += known + asked
                count += known + asked
            if count in (before, len(keys)) or len(self._tiers) == 1:
                return found, min(num_listed, count)

    def _known_leading(self, tier: RemoteTier, keys: Sequence[bytes], until_s: float) -> int:
        count = 0
        while True:
            with self._asking:
                if tier.is_listed:
                    count += tier.num_leading(keys[count:])
                    rest = [tier.holds(key) for key in keys[count : count + 1]]
                else:
                    rest = [tier.holds(key) for key in keys[count:]]
            known = next((i for i, held in enumerate(rest) if not held), len(rest))
            count += known
            is_known = known == len(rest) or rest[known] is False
            if is_known or time.monotonic() >= until_s:
                return count
            time.sleep(ASK_AGAIN_S)

    def _asked_leading(self, tier: RemoteTier, keys: Sequence[bytes], until_s: float) -> int:
        """Count the leading pages that a store has; of a prompt that it lacks, ask for one page."""
        if not self.may_lag(tier) or not any(self._ask(tier, keys[:1], until_s)):
            return 0
        rest = self._ask(tier, keys[1:], until_s)
        return 1 + next((i for i, there in enumerate(rest) if not there), len(rest))

    def present(
        self, keys: Sequence[bytes], num_listed: int, until_s: float | None = None
    ) -> list[bool]:
        """Tell of each page whether a tier has it.

        Args:
            keys: of pages that belong to those of a prefix, one each.
            num_listed: those of the prefix that an index had; see :meth:`leading`.
            until_s: see :meth:`leading`.
        """
        until_s = until_s or self.deadline_s()
        found = [False] * len(keys)
        for tier in self._tiers:
            while None in (held := self.holds(tier, keys)) and time.monotonic() < until_s:
                time.sleep(ASK_AGAIN_S)
            found = [bool(before or here) for before, here in zip(found, held, strict=True)]
            if self.may_lag(tier):
                lacking = [i for i in range(num_listed, len(keys)) if not found[i]]
                there = self._ask(tier, [keys[i] for i in lacking], until_s)
                for i, is_there in zip(lacking, there, strict=True):
                    found[i] = is_there
        return found

    def holds(self, tier: RemoteTier, keys: Sequence[bytes]) -> list[bool | None]:
        """Tell what is known of a tier now; None for "not answered yet"."""
        with self._asking:
            return [tier.holds(key) for key in keys]

    def forget(self, tier: RemoteTier, listing: int, keys: Sequence[bytes]) -> None:
        """Let a tier answer False for pages, unless it has been opened again since a listing."""
        with self._asking:
            if tier.listing == listing:
                tier.forget(keys)

    def may_lag(self, tier: RemoteTier) -> bool:
        """Tell whether a page of a lookup may still be in no copy of a tier's index."""
        return self._asks and tier.is_listed and tier.is_shared and tier.is_open

    def _ask(self, tier: RemoteTier, keys: Sequence[bytes], until_s: float) -> list[bool]:
        """Ask the store itself; a page of which it tells nothing in time is absent."""
        if not keys:
            return []
        with self._asking:
            answers = tier.ask_for(keys)
        while None in answers.values() and time.monotonic() < until_s:
            time.sleep(ASK_AGAIN_S)
        with self._asking:
            tier.end_asking(answers)
        return [bool(answers[key]) for key in keys]
