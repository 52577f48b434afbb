"""Presence for backends that can only answer asynchronously: probe in batches, remember briefly."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvoffload.backends.base import Backend
from kvoffload.transfer.ioloop import IOLoop

log = logging.getLogger(__name__)

MAX_VERDICTS = 200_000
"""Verdicts remembered; beyond it the oldest go first and are asked for again."""


class Prober:
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
        if not self._wanted:
            self._io.start(self._probe)
        self._wanted.append(key)
        return None

    def forget(self, keys: Sequence[bytes]) -> None:
        """See :meth:`Presence.forget`."""
        for key in keys:
            self._remember(key, False)

    def _remember(self, key: bytes, answer: bool) -> None:
        self._verdicts[key] = (answer, self._clock() + self._verdict_s)

    async def _probe(self) -> None:
        keys, self._wanted = self._wanted, []
        try:
            answers = await asyncio.wait_for(self._backend.contains(keys), self._timeout_s)
        except Exception as error:
            log.warning("probing %d keys failed: %s", len(keys), error or type(error).__name__)
            answers = [False] * len(keys)
        for key, answer in zip(keys, answers, strict=True):
            if self._verdicts.get(key, (True, 0.0))[0] is None:  # not forgotten meanwhile
                self._remember(key, answer)
