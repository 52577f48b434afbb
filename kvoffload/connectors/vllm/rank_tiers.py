"""The tiers of all ranks, as the scheduler knows them: from the workers' reports alone.

The scheduler's process opens no store, so that ranks may be on other machines.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from kvoffload.config import OffloadConfig
from kvoffload.connectors.tier_io import tier_names
from kvoffload.connectors.vllm.asked_tier import AskedTier
from kvoffload.connectors.vllm.presence_messages import Answer, IndexPart, Question
from kvoffload.connectors.vllm.tier_index import TierIndex
from kvoffload.offload.manager import Tier

QUIET_S = 60.0
"""A listing that brings nothing for so long is no reason to keep an idle engine stepping."""


class RankTiers:
    """What each tier of all ranks holds; for the scheduler's thread alone.

    Args:
        config: the settings.
        ranks: the numbers of all ranks.
        listed: the tiers whose stores list their chunks; workers ask the rest.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: OffloadConfig,
        ranks: Sequence[int],
        listed: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._ranks = tuple(ranks)
        self._listed = frozenset(listed)
        self._clock = clock
        self.renew("")

    def renew(self, generation: str) -> None:
        """Begin with empty tiers: stored bytes mean something else from now on.

        Reports of stores that were opened before do not count.
        """
        self._generation = generation
        self._indexes: dict[str, TierIndex] = {}
        self._asked: dict[str, AskedTier] = {}
        config = self._config
        for name, _ in tier_names(config):
            if name in self._listed:
                index = TierIndex(self._ranks, config.lookup_timeout_s, self._clock)
                self._indexes[name] = index
            else:
                timeout_s = config.lookup_timeout_s + config.load_timeout_s
                self._asked[name] = AskedTier(len(self._ranks), timeout_s, self._clock)
        self.presences: dict[str, TierIndex | AskedTier] = {**self._indexes, **self._asked}
        self.tiers = tuple(
            Tier(name, self.presences[name], self.presences[name]) for name, _ in tier_names(config)
        )
        self._heard_s = self._clock()

    def apply(self, parts: Iterable[IndexPart], answers: Iterable[Answer]) -> None:
        """Take in what workers report of their stores."""
        for part in parts:
            index = self._indexes.get(part.tier)
            if index is None or part.generation != self._generation:
                continue
            self._heard_s = self._clock()
            if part.is_first:
                index.restart(part.rank)
            index.apply(part.rank, part.added, part.removed)
            if part.is_complete:
                index.completed(part.rank)
        for answer in answers:
            asked = self._asked.get(answer.tier)
            if asked is not None and answer.generation == self._generation:
                asked.answer(answer.number, answer.present)

    @property
    def has_questions(self) -> bool:
        """Whether workers must ask their stores."""
        return any(asked.has_questions for asked in self._asked.values())

    def take_questions(self) -> dict[str, Question]:
        """Return what workers must ask their stores with this step, by tier."""
        taken = ((name, asked.take_question()) for name, asked in self._asked.items())
        return {name: question for name, question in taken if question is not None}

    @property
    def are_listed(self) -> bool:
        """Whether reports list the chunks of some tier."""
        return bool(self._indexes)

    @property
    def is_waiting(self) -> bool:
        """Whether reports are to come: an idle engine must go on stepping to receive them."""
        if any(asked.is_waiting for asked in self._asked.values()):
            return True
        return (
            not all(index.is_complete for index in self._indexes.values())
            and self._clock() - self._heard_s < QUIET_S
        )
