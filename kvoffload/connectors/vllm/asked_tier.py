"""What one tier of all ranks holds, where its stores list nothing: the workers ask them.

A question goes to every worker with the next step, and the answers come with later reports.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvoffload.backends.base import Removal
from kvoffload.connectors.vllm.presence_messages import Question
from kvoffload.io.presence import PresenceCache
from kvoffload.io.remote_tier import ANSWER_S

MAX_ANNOUNCED = 1_000_000
"""Chunks whose removal this engine tells of; of older ones it does not."""


@dataclass
class _Open:
    """A question that some ranks have not answered."""

    keys: list[bytes]
    present: list[bool]
    num_ranks: int


class AskedTier:
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
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._cache = PresenceCache(self._note_question, timeout_s, ANSWER_S, ANSWER_S, clock)
        self.has_questions = False
        """Whether :meth:`take_question` has something to return."""
        self._open: dict[int, _Open] = {}
        self._number = 0
        self._until_s = 0.0
        """When the last question counts as lost."""
        self._announced: dict[bytes, None] = {}
        self._removals: list[Removal] = []

    def holds(self, key: bytes) -> bool | None:
        """Return whether every rank has a chunk; None while it is being asked for."""
        return self._cache.holds(key)

    def _note_question(self) -> None:
        self.has_questions = True

    def take_question(self) -> Question | None:
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
        return Question(self._number, keys)

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

    def take_removals(self) -> list[Removal]:
        """Return what was told of as stored and left since, once each."""
        taken, self._removals = self._removals, []
        return taken
