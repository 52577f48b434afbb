"""PresenceCache: what is known, for a short while, about which chunks the servers hold.

The engine's thread asks and never waits; the I/O loop's thread fills in. A key is asked for once,
with all the others of the same moment; while the question is out the answer is None, and by the
deadline it is False. PresenceCache expire quickly, because others store, and servers evict.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_VERDICTS = 200_000
"""PresenceCache remembered; the oldest go first and are asked for again."""
FORGOTTEN_S = 10.0
"""How long a chunk whose load failed counts as absent, unless it is written again."""


class _Verdict(NamedTuple):
    present: bool | None
    until: float


class PresenceCache:
    """Answers at once, from memory. One dictionary, used by two threads without a lock.

    Each step on the dictionary is atomic by itself. Two threads may answer the same key at the same
    time; the later answer stands, but one that came out of a question never replaces a verdict that
    was written while the question was out.

    Args:
        ask: called on the engine's thread when there are new questions; must return at once.
        timeout_s, present_s, absent_s: see :class:`~kvoffload.backends.redis.options.RedisOptions`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        timeout_s: float,
        present_s: float,
        absent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._present_s = present_s
        self._absent_s = absent_s
        self._clock = clock
        self._verdicts: dict[bytes, _Verdict] = {}
        self._questions: list[bytes] = []

    def holds(self, key: bytes) -> bool | None:
        """The verdict, or None while it is being asked for. On the engine's thread."""
        now = self._clock()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            if now < verdict.until:
                return verdict.present
            if verdict.present is None:  # nobody answered in time
                self._verdicts[key] = _Verdict(False, now + self._absent_s)
                return False
            self._verdicts.pop(key, None)
        self._make_room()
        self._verdicts[key] = _Verdict(None, now + self._timeout_s)
        if len(self._questions) >= MAX_VERDICTS:  # nobody takes them up
            return False
        self._questions.append(key)
        if len(self._questions) == 1:
            self._ask()
        return None

    def take_questions(self) -> list[bytes]:
        """The keys asked for since the last call. On the I/O loop's thread."""
        taken: list[bytes] = []
        # Until none is left: whoever adds one to others does not ask again.
        while questions := self._questions[:]:
            del self._questions[: len(questions)]
            taken += questions
        return taken

    def answer(self, keys: Sequence[bytes], present: Sequence[bool]) -> None:
        """Fill in what a question brought; later verdicts on the same keys stand."""
        for key, there in zip(keys, present, strict=True):
            verdict = self._verdicts.get(key)
            if verdict is not None and verdict.present is None:
                self.set(key, there)

    def set(self, key: bytes, present: bool) -> None:
        """A fact: written, found, or found missing."""
        self._make_room()
        until = self._clock() + (self._present_s if present else self._absent_s)
        self._verdicts[key] = _Verdict(present, until)

    def forget(self, keys: Sequence[bytes]) -> None:
        """A load failed: absent, for longer than a probe could say otherwise."""
        until = self._clock() + FORGOTTEN_S
        for key in keys:
            self._verdicts[key] = _Verdict(False, until)

    def clear(self) -> None:
        """Nothing known holds any more: another server process, or one that is back."""
        for key, verdict in list(self._verdicts.items()):
            if verdict.present is not None:
                self._verdicts.pop(key, None)

    def __len__(self) -> int:
        return len(self._verdicts)

    def _make_room(self) -> None:
        while len(self._verdicts) >= MAX_VERDICTS:
            try:
                self._verdicts.pop(next(iter(self._verdicts)), None)
            except (StopIteration, RuntimeError):  # the other thread changed it under the iterator
                return
