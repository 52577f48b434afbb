"""The circuit breaker: when to stop using a server, and when to probe whether it is back."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST_PAUSE = 8
"""Longest pause between probes of a relapsing server, in multiples of ``probe_every_s``."""


@dataclass
class _FailureRow:
    """Consecutive failures of one kind of request."""

    since: float
    count: int = 0
    nbytes: int = 0
    on_probation: bool = False


@dataclass(eq=False)
class CircuitBreaker:
    """Opens after a few consecutive failures, or a second of them, of any one kind of request.

    Failures count per kind (``"load"``, ``"store"``...), because a link may carry small requests
    while large transfers fail. For the same reason a success resets the count only if its size is
    about that of the failures.

    A closed breaker allows every request. An open one allows only the probe that :meth:`probe_in`
    times. After a successful probe, one more failure of the same kind opens the breaker at once.
    Repeated relapses without a success make probes rarer: a server that answers probes and fails
    requests does not get new requests each second.

    It has no lock: its owner calls it on one thread at a time.
    """

    max_failures: int = 3
    """Consecutive failures that open the breaker."""
    patience_s: float = 1.0
    """So long after the first failure began, the next one opens the breaker too."""
    probe_every_s: float = 1.0
    """Shortest time between probes. A random third is added, so that many engines do not probe a
    returning server at the same time."""
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    is_open: bool = field(default=False, init=False)
    _failures: dict[str, _FailureRow] = field(default_factory=dict, init=False)
    _opened_by: str = field(default="", init=False)
    _relapses: int = field(default=0, init=False)
    _probe_at: float = field(default=0.0, init=False)

    @property
    def is_failing(self) -> bool:
        """Whether a success would change anything."""
        return bool(self._failures)

    def failure(self, kind: str, lasted_s: float = 0.0, nbytes: int = 0) -> bool:
        """Count a failure that showed after ``lasted_s``; return True if it opened the breaker."""
        if self.is_open:
            return False
        now = self.clock()
        row = self._failures.setdefault(kind, _FailureRow(now - lasted_s))
        row.count += 1
        row.nbytes = max(row.nbytes, nbytes)
        if row.count < self.max_failures and now - row.since < self.patience_s:
            return False
        self.is_open = True
        self._opened_by = kind
        self._relapses = self._relapses + 1 if row.on_probation else 0
        self._schedule(now)
        return True

    def success(self, kind: str, nbytes: int = 0) -> None:
        if not self._failures or self.is_open:
            return
        row = self._failures.get(kind)
        if row is not None and 2 * nbytes >= row.nbytes:
            del self._failures[kind]
            if row.on_probation:
                self._relapses = 0

    def probe_in(self) -> float:
        return max(0.0, self._probe_at - self.clock())

    def probe_failed(self) -> None:
        self._schedule(self.clock())

    def probe_succeeded(self) -> None:
        """Close the breaker on probation: the next failure of the same kind opens it again."""
        nbytes = self._failures[self._opened_by].nbytes
        last = _FailureRow(self.clock(), self.max_failures - 1, nbytes, on_probation=True)
        self._failures = {self._opened_by: last}
        self.is_open = False

    def _schedule(self, now: float) -> None:
        # The first relapse costs no longer pause: the server may not have been quite up.
        pause = min(2 ** max(0, self._relapses - 1), _LONGEST_PAUSE)
        self._probe_at = now + self.probe_every_s * pause * (1 + self.jitter() / 3)
