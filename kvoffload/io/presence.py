"""A presence cache: which chunks a store has, as far as that was known a short while ago.

It serves stores without an index. The engine's thread asks and never waits; another thread answers.
A key is asked for once, in one batch with the other keys of that moment. Until the answer comes the
presence is None; after the deadline it is False. Entries expire quickly, because other engines
store and stores evict.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_ENTRIES = 200_000
"""The oldest entries beyond this number are dropped; their keys are asked for again."""
FORGOTTEN_S = 60.0
"""How long a chunk that could not be loaded counts as absent, unless it is written again. A store
that keeps announcing it would otherwise cost every request a failed load."""


class PresenceEntry(NamedTuple):
    """The presence of one key; None while it is being asked for."""

    present: bool | None
    until: float


class PresenceCache:
    """Answers lookups from memory.

    Two threads share one dictionary without a lock, because each step on it is atomic. The later of
    two answers stands. An answer to a question never replaces an entry made after the question.

    Args:
        ask: called on the engine's thread when there are new questions; must return at once.
        timeout_s: how long a key may stay at None.
        answer_s: how long an answer is believed, whatever it is.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        timeout_s: float,
        answer_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._answer_s = answer_s
        self._clock = clock
        self._entries: dict[bytes, PresenceEntry] = {}
        self._questions: list[bytes] = []

    def holds(self, key: bytes) -> bool | None:
        """Return True, False, or None for "ask again"; ask the store for an unknown key."""
        now = self._clock()
        entry = self._entries.get(key)
        if entry is not None:
            if now < entry.until:
                return entry.present
            if entry.present is None:  # no answer by the deadline
                self.set(key, False)
                return False
            self._entries.pop(key, None)  # so that the new entry is the youngest
        self._put(key, None, self._timeout_s)
        if len(self._questions) >= MAX_ENTRIES:  # the loop takes none
            return False
        # Appended first. If the loop takes the key before the check below, it needs no call.
        self._questions.append(key)
        if len(self._questions) == 1:
            self._ask()
        return None

    def forget(self, keys: Sequence[bytes]) -> None:
        """Count chunks that could not be loaded as absent."""
        for key in keys:
            self._put(key, False, FORGOTTEN_S)

    def take_questions(self) -> list[bytes]:
        """Return the keys asked for since the last call; on the answering thread."""
        taken: list[bytes] = []
        # Until none is left: only the first key of a batch causes a call.
        while questions := self._questions[:]:
            del self._questions[: len(questions)]
            taken += questions
        return taken

    def answer(self, keys: Sequence[bytes], present: Sequence[bool]) -> None:
        """Fill in the answers to questions; entries made meanwhile stand."""
        for key, there in zip(keys, present, strict=True):
            entry = self._entries.get(key)
            if entry is not None and entry.present is None:
                self.set(key, there)

    def set(self, key: bytes, present: bool) -> None:
        """Note that a chunk was written, found, or found missing."""
        self._put(key, present, self._answer_s)

    def _put(self, key: bytes, present: bool | None, seconds: float) -> None:
        while len(self._entries) >= MAX_ENTRIES:
            try:
                self._entries.pop(next(iter(self._entries)), None)
            except (StopIteration, RuntimeError):  # the other thread changed the dictionary
                break
        self._entries[key] = PresenceEntry(present, self._clock() + seconds)
