"""Throttled warnings about single chunks: a bad device causes 100,000 of them a minute."""

import logging
import threading
import time
from collections.abc import Hashable

PERIOD_S = 1.0
LASTING_S = 60.0
"""Period of what a device or a file system refuses until an operator mends it."""


class Throttle:
    """Logs each kind of warning at most once a period, with the number left out. Thread-safe.

    The counters of a backend count every occurrence.
    """

    def __init__(self, log: logging.Logger, period_s: float = PERIOD_S) -> None:
        self._log = log
        self._period_s = period_s
        self._lock = threading.Lock()
        self._told: dict[Hashable, tuple[float, int]] = {}
        """By kind: until when it is silent, and the number left out."""

    def warning(
        self, text: str, *values: object, kind: Hashable = None, traceback: bool = False
    ) -> None:
        """Log this line, or count it for the next one of its kind."""
        with self._lock:
            now = time.monotonic()
            silent_until, left_out = self._told.get(kind, (0.0, 0))
            if now < silent_until:
                self._told[kind] = silent_until, left_out + 1
                return
            self._told[kind] = now + self._period_s, 0
        if left_out:
            text, values = text + " (%d more like it before)", (*values, left_out)
        self._log.warning(text, *values, exc_info=traceback)
