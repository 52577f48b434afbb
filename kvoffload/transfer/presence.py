"""Presence for backends that can only answer asynchronously: probe in batches, remember briefly."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvoffload.backends.base import Backend, Presence, RunsOnLoop
from kvoffload.transfer.io_loop import IOLoop

log = logging.getLogger(__name__)

MAX_VERDICTS = 200_000
"""Verdicts remembered; beyond it the oldest go first and are asked for again."""
FORGOTTEN_S = 60.0
"""How long a chunk that could not be loaded is not promised again. A store that goes on saying it
has it would otherwise cost every request a failed load."""


class PresenceCache:
    """Answers :class:`~kvoffload.backends.base.Presence` for any backend through ``contains``.

    The first question about a key is answered None and starts a probe; questions of one scheduling
    step travel together. A probe that has no answer by ``timeout_s`` counts as False.

    Args:
        io: the loop the backend lives on.
        backend: whose ``contains`` is asked.
        timeout_s: how long a key may stay at None.
        verdict_s: how long an answer is believed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        io: IOLoop,
        backend: Backend,
        timeout_s: float,
        verdict_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._io = io
        self._backend = backend
        self._timeout_s = timeout_s
        self._verdict_s = verdict_s
        self._clock = clock
        # Key → (answer, or None while asked; until when). In order of age. Only the engine's thread
        # adds keys; the loop's thread replaces values, which is atomic.
        self._verdicts: dict[bytes, tuple[bool | None, float]] = {}
        self._wanted: list[bytes] = []

    def holds(self, key: bytes) -> bool | None:
        """See :meth:`Presence.holds`."""
        answer, until = self._verdicts.get(key, (False, 0.0))
        if self._clock() < until:
            return answer
        if answer is None:  # asked, and no answer in time
            self._remember(key, False)
            return False
        self._verdicts.pop(key, None)
        while len(self._verdicts) >= MAX_VERDICTS:
            self._verdicts.pop(next(iter(self._verdicts)))
        self._verdicts[key] = (None, self._clock() + self._timeout_s)
        # The probe takes keys away from the front on its own thread. Whoever makes the list one
        # long starts it, after the key is in: started before, it could find nothing and end.
        self._wanted.append(key)
        if len(self._wanted) == 1:
            self._io.start(self._probe)
        return None

    def forget(self, keys: Sequence[bytes]) -> None:
        """See :meth:`Presence.forget`."""
        for key in keys:
            self._verdicts[key] = (False, self._clock() + FORGOTTEN_S)

    def _remember(self, key: bytes, answer: bool) -> None:
        self._verdicts[key] = (answer, self._clock() + self._verdict_s)

    async def _probe(self) -> None:
        while count := len(self._wanted):
            keys = self._wanted[:count]
            del self._wanted[:count]
            try:
                asked = asyncio.wait_for(self._backend.contains(keys), self._timeout_s)
                answers = same_length(await asked, keys)
            except Exception as error:
                log.warning("probing %d keys failed: %s", count, str(error) or type(error).__name__)
                answers = [False] * count
            for key, answer in zip(keys, answers, strict=True):
                if self._verdicts.get(key, (True, 0.0))[0] is None:  # not forgotten meanwhile
                    self._remember(key, answer)


def same_length(answers: list[bool], keys: Sequence[bytes]) -> list[bool]:
    """Return a store's answers; raise ValueError if they are not one for each key."""
    if len(answers) != len(keys):
        raise ValueError(f"{len(answers)} answers for {len(keys)} keys")
    return answers


def presence_on(io: IOLoop, backend: Backend, timeout_s: float) -> Presence:
    """Tell a store just opened its loop, and return what answers "is this chunk here?" at once."""
    if isinstance(backend, RunsOnLoop):
        backend.bind(io.loop)
    return backend if isinstance(backend, Presence) else PresenceCache(io, backend, timeout_s)
