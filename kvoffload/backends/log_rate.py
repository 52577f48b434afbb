"""Throttled warnings about single chunks: a bad device causes 100,000 of them a minute."""

import logging
import threading
import time

PERIOD_S = 1.0
LASTING_S = 60.0
"""Period of what a device or a file system refuses until an operator mends it."""


class Throttle:
    """Logs one kind of warning at most once a period, with the number left out. Thread-safe.

    The counters of a backend count every occurrence.
    """

    def __init__(self, log: logging.Logger, period_s: float = PERIOD_S) -> None:
        self._log = log
        self._period_s = period_s
        self._lock = threading.Lock()
        self._silent_until = 0.0
        self._left_out = 0

    def warning(self, text: str, *values: object, traceback: bool = False) -> None:
        """Log this line, or count it for the next one."""
        with self._lock:
            now = time.monotonic()
            if now < self._silent_until:
                self._left_out += 1
                return
            self._silent_until = now + self._period_s
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text, values = text + " (%d more like it before)", (*values, left_out)
        self._log.warning(text, *values, exc_info=traceback)
