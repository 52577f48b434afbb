"""When to leave a server alone, and when to ask again whether it is back."""

import random
import time
from collections.abc import Callable


class Breaker:
    """Opens after a few failures in a row or a second of them; one good probe closes it.

    Closed, everything is allowed. Open, nothing is, but for the probe that :meth:`probe_in` times.
    After a good probe one more failure opens it again at once: a server that answers probes but not
    requests is not let in anew each second.

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
        self._failures = 0
        self._since = 0.0
        self._probe_at = 0.0

    def failure(self, lasted_s: float = 0.0) -> bool:
        """Count a failure that took ``lasted_s`` to show; True if it opened the breaker."""
        if self.is_open:
            return False
        now = self._clock()
        if self._failures == 0:
            self._since = now - lasted_s
        self._failures += 1
        if self._failures < self._max_failures and now - self._since < self._patience_s:
            return False
        self.is_open = True
        self._schedule(now)
        return True

    def success(self) -> None:
        """A request was answered as it should."""
        if not self.is_open:
            self._failures = 0

    def probe_in(self) -> float:
        """Seconds until the next probe may start."""
        return max(0.0, self._probe_at - self._clock())

    def probe_failed(self) -> None:
        """The server is still away: ask again later."""
        self._schedule(self._clock())

    def probe_succeeded(self) -> None:
        """The server answers again: close, and let the next failure count for all of them."""
        self.is_open = False
        self._failures = self._max_failures - 1
        self._since = self._clock()

    def _schedule(self, now: float) -> None:
        self._probe_at = now + self._probe_every_s * (1 + self._jitter() / 3)
