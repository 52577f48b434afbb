"""What the tiers of all ranks hold, as the scheduler knows it: from the workers' reports alone.

The scheduler's process opens no store, so that ranks may be on other machines.

Where stores list their chunks, workers relay what changes: see :mod:`.tier_index`. Where they list
nothing, the workers ask them. A question goes to every worker with the next step, and the answers
come with later reports.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvoffload.backends.base import Removal
from kvoffload.config import OffloadConfig
from kvoffload.connectors.tier_io import tier_names
from kvoffload.connectors.vllm.tier_index import TellsRemovals, TierIndex
from kvoffload.connectors.vllm.worker_presence import IndexPart, PresenceQuery, PresenceReply
from kvoffload.io.presence import PresenceCache
from kvoffload.io.remote_tier import ANSWER_S
from kvoffload.offload.manager import Tier

QUIET_S = 60.0
"""A listing that brings nothing for so long is no reason to keep an idle engine stepping."""


class RankTiers:
    """What each tier of all ranks holds; for the scheduler's thread alone.

    Args:
        config: the settings.
        ranks: the numbers of all ranks.
        listed: the tiers whose stores list their chunks; workers ask the rest.
        generation: by which the workers have opened their stores, or will; "" for none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: OffloadConfig,
        ranks: Sequence[int],
        listed: Collection[str],
        generation: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._ranks = tuple(ranks)
        self._listed = frozenset(listed)
        self._clock = clock
        self._down: dict[int, frozenset[str]] = {}
        """Rank → its tiers that cannot be asked."""
        self.renew(generation)

    def renew(self, generation: str) -> None:
        """Begin with empty tiers: stored bytes mean something else from now on.

        Reports of stores that were opened before do not count.
        """
        self.generation = generation
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
        self.tiers = tuple(Tier(name, self.presences[name]) for name, _ in tier_names(config))
        self._heard_s = self._clock()
        self.note_down({})

    def note_down(self, down: Mapping[int, frozenset[str]]) -> None:
        """Take in which tiers of ranks cannot be asked now."""
        self._down.update(down)
        all_down = frozenset[str]().union(*self._down.values())
        for name, presence in self.presences.items():
            presence.is_up = name not in all_down

    def apply(self, parts: Iterable[IndexPart], answers: Iterable[PresenceReply]) -> None:
        """Take in what workers report of their stores."""
        for part in parts:
            index = self._indexes.get(part.tier)
            if index is None or part.generation != self.generation:
                continue
            self._heard_s = self._clock()
            if part.is_first:
                index.restart(part.rank)
            index.apply(part.rank, part.added, part.removed)
            if part.is_complete:
                index.completed(part.rank)
        for answer in answers:
            asked = self._asked.get(answer.tier)
            if asked is not None and answer.generation == self.generation:
                asked.answer(answer.number, answer.present)

    @property
    def has_questions(self) -> bool:
        """Whether workers must ask their stores."""
        return any(asked.has_questions for asked in self._asked.values())

    def take_questions(self) -> dict[str, PresenceQuery]:
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


# ---- A tier whose stores list nothing ----

MAX_ANNOUNCED = 1_000_000
"""Chunks whose removal this engine tells of; of older ones it does not."""


@dataclass
class _Open:
    """A question that some ranks have not answered."""

    keys: list[bytes]
    present: list[bool]
    num_ranks: int


class AskedTier(TellsRemovals):
    """Presence of chunks in one tier, for the scheduler's thread alone.

    Args:
        num_ranks: workers that answer each question.
        timeout_s: how long a lookup may stay at None. Workers answer sooner, so that it is only
            reached by reports that are lost.
        clock: seconds, monotonic.
    """

    def __init__(
        self, num_ranks: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._cache = PresenceCache(self._note_question, timeout_s, ANSWER_S, clock)
        self.has_questions = False
        """Whether :meth:`take_question` has something to return."""
        self._open: dict[int, _Open] = {}
        self._number = 0
        self._until_s = 0.0
        """When the last question counts as lost."""
        self._announced: dict[bytes, None] = {}

    def holds(self, key: bytes) -> bool | None:
        """Return whether every rank has a chunk; None while it is being asked for."""
        return self._cache.holds(key)

    def _note_question(self) -> None:
        self.has_questions = True

    def take_question(self) -> PresenceQuery | None:
        """Return the chunks to ask for with this step; None for none."""
        now = self._clock()
        if now >= self._until_s:
            self._open.clear()
        keys = self._cache.take_questions() if self.has_questions else []
        self.has_questions = False
        if not keys:
            return None
        self._number += 1
        self._until_s = now + self._timeout_s
        self._open[self._number] = _Open(keys, [True] * len(keys), self._num_ranks)
        return PresenceQuery(self._number, keys)

    def answer(self, number: int, present: Sequence[bool]) -> None:
        """Take in one rank's answer; a chunk is present if all ranks say so."""
        question = self._open.get(number)
        if question is None or len(present) != len(question.keys):
            return
        question.present = [a and b for a, b in zip(question.present, present, strict=True)]
        question.num_ranks -= 1
        if not question.num_ranks:
            del self._open[number]
            self._cache.answer(question.keys, question.present)

    @property
    def is_waiting(self) -> bool:
        """Whether a question is to be sent or has no answer yet, nor is lost."""
        return self.has_questions or (bool(self._open) and self._clock() < self._until_s)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Count chunks as absent for a while, unless they are written again."""
        self._cache.forget(keys)
        for key in keys:
            self._announced.pop(key, None)

    def written(self, keys: Iterable[bytes]) -> None:
        """Note that every rank has just stored these, and that they were told of as stored."""
        for key in keys:
            self._cache.set(key, True)
            self._announced[key] = None
        while len(self._announced) > MAX_ANNOUNCED:
            del self._announced[next(iter(self._announced))]

    def removed(self, removals: Iterable[Removal]) -> None:
        """Note which chunks some rank's store gave up."""
        for removal in removals:
            self._cache.set(removal.key, False)
            if removal.key in self._announced:
                del self._announced[removal.key]
                self._removals.append(removal)
