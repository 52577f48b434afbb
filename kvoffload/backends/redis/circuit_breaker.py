"""When to leave a server alone, and when to ask again whether it is back."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST_PAUSE = 8
"""Times ``probe_every_s``: the longest pause between probes of a server that relapses."""


@dataclass
class _Tally:
    """Failures in a row of one kind of work."""

    since: float
    count: int = 0
    nbytes: int = 0
    on_probation: bool = False


class CircuitBreaker:
    """Opens after a few failures in a row, or a second of them, of any one kind of work.

    Kinds (``"load"``, ``"store"``...) are counted apart, because a line may pass one and not the
    other: small questions are answered while nothing large comes through. For the same reason only
    a success about as large as what failed ends the row.

    Closed, everything is allowed. Open, nothing is, but for the probe that :meth:`probe_in` times.
    After a good probe one more failure of the kind that opened it opens it again at once, and if
    that goes on, without a success in between, probes become rarer: a server that answers probes
    but not requests is not let in anew each second.

    ``is_open`` is a plain attribute that any thread may read; everything else belongs to the
    I/O loop.

    Args:
        max_failures: failures in a row that open it.
        patience_s: so long after the first of them began, the next one opens it too.
        probe_every_s: least seconds between probes; up to a third is added at random, so that
            many engines do not ask a returning server all at once.
        clock: seconds, monotonic.
        jitter: a random number of [0, 1).
    """

    def __init__(
        self,
        max_failures: int = 3,
        patience_s: float = 1.0,
        probe_every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.is_open = False
        self._max_failures = max_failures
        self._patience_s = patience_s
        self._probe_every_s = probe_every_s
        self._clock = clock
        self._jitter = jitter
        self._tallies: dict[str, _Tally] = {}
        self._opened_by = ""
        self._relapses = 0
        self._probe_at = 0.0

    def failure(self, work: str, lasted_s: float = 0.0, nbytes: int = 0) -> bool:
        """Count a failure; True if it opened the breaker.

        Args:
            work: the kind of work that failed.
            lasted_s: how long it took to show.
            nbytes: how large it was.
        """
        if self.is_open:
            return False
        now = self._clock()
        tally = self._tallies.setdefault(work, _Tally(now - lasted_s))
        tally.count += 1
        tally.nbytes = max(tally.nbytes, nbytes)
        if tally.count < self._max_failures and now - tally.since < self._patience_s:
            return False
        self.is_open = True
        self._opened_by = work
        self._relapses = self._relapses + 1 if tally.on_probation else 0
        self._schedule(now)
        return True

    def success(self, work: str, nbytes: int = 0) -> None:
        """A piece of work, ``nbytes`` large, was done as it should be."""
        if not self._tallies or self.is_open:
            return
        tally = self._tallies.get(work)
        if tally is not None and 2 * nbytes >= tally.nbytes:
            del self._tallies[work]
            if tally.on_probation:
                self._relapses = 0

    def probe_in(self) -> float:
        """Seconds until the next probe may start."""
        return max(0.0, self._probe_at - self._clock())

    def probe_failed(self) -> None:
        """The server is still away: ask again later."""
        self._schedule(self._clock())

    def probe_succeeded(self) -> None:
        """The server answers again: close, and let the next failure count for all of them."""
        nbytes = self._tallies[self._opened_by].nbytes
        last = _Tally(self._clock(), self._max_failures - 1, nbytes, on_probation=True)
        self._tallies = {self._opened_by: last}
        self.is_open = False

    def _schedule(self, now: float) -> None:
        # The first relapse is free: it may be a server that was not quite up.
        pause = min(2 ** max(0, self._relapses - 1), _LONGEST_PAUSE)
        self._probe_at = now + self._probe_every_s * pause * (1 + self._jitter() / 3)
