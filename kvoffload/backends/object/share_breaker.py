"""The circuit breaker: when to leave a bucket alone, by the share of requests that fail.

Object stores refuse single requests when they are busy, and serve the next ones. So a count of
failures in a row would open too late under load, and too early in quiet times.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST_PAUSE = 16
"""Longest pause, in multiples of ``pause_s``."""


@dataclass(eq=False)
class ShareBreaker:
    """Opens when half of the latest requests failed; a single request then tests each pause.

    Any thread may call the methods.
    """

    latest: int = 20
    """Requests that are looked at."""
    least: int = 4
    """Failures that open it."""
    share: float = 0.5
    """Part of the latest requests that must have failed."""
    pause_s: float = 1.0
    """From the opening to the first test; doubled with each test that fails."""
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    is_open: bool = field(default=False, init=False)
    _outcomes: deque[bool] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_on_probation: bool = field(default=False, init=False)
    _pauses: int = field(default=1, init=False)
    _test_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._outcomes = deque(maxlen=self.latest)

    @property
    def is_due(self) -> bool:
        """Whether it is open, and the next request would test the bucket."""
        return self.is_open and self.clock() >= self._test_at

    def admits(self) -> bool:
        """Return whether a request may be sent; while it is open, one a pause may."""
        if not self.is_open:
            return True
        with self._lock:
            if self.is_open and self.clock() < self._test_at:
                return False
            if self.is_open:
                self._schedule()
            return True

    def succeeded(self, *, is_test: bool = False) -> bool:
        """Count a request that was answered; return True if that closed the breaker.

        Args:
            is_test: it moved no chunk, so the breaker closes on probation: the next failure opens
                it, for a longer time.
        """
        with self._lock:
            if not is_test:
                self._outcomes.append(True)
                self._is_on_probation, self._pauses = False, 1
            if not self.is_open:
                return False
            self.is_open, self._is_on_probation = False, is_test
            self._outcomes.clear()
            return True

    def failed(self, *, at_once: bool = False) -> bool:
        """Count a failure; return True if it opened the breaker.

        Args:
            at_once: open it although no other request failed, as when a right is missing.
        """
        with self._lock:
            self._outcomes.append(False)
            failures = self._outcomes.count(False)
            if self.is_open:
                return False
            enough = failures >= max(self.least, self.share * len(self._outcomes))
            if not (at_once or enough or self._is_on_probation):
                return False
            self.is_open = True
            self._schedule()
            return True

    def _schedule(self) -> None:
        # A random third more, so that many engines do not test at the same time.
        pause_s = self.pause_s * self._pauses * (1 + self.jitter() / 3)
        self._test_at = self.clock() + pause_s
        self._pauses = min(2 * self._pauses, _LONGEST_PAUSE)
