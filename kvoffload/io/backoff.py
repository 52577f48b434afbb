"""When a server that died is started again: at once, then after ever longer times."""

import time
from collections.abc import Callable

SHORTEST_S = 0.1
"""The time before the second start in a row; it doubles with each further one."""
LONGEST_S = 5.0
STEADY_S = 10.0
"""How long a server must have run for its death to count as a first one."""


class Backoff:
    """The time before the next start of a server.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = self._due_s = clock()
        self._pause_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the next server may be started."""
        return self._clock() >= self._due_s

    def started(self) -> None:
        """Take in that a server was started."""
        self._started_s = self._clock()

    def died(self) -> None:
        """Take in that the server died; nothing keeps the one after a steady server waiting."""
        if self._clock() >= self._started_s + STEADY_S:
            self._pause_s = 0.0
        self.failed()

    def failed(self) -> None:
        """Take in that there is no server, because it died or could not be started."""
        self._due_s = self._clock() + self._pause_s
        self._pause_s = min(LONGEST_S, max(SHORTEST_S, 2 * self._pause_s))
