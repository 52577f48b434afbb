"""Tells of a call that does not return: every transfer waits behind it, and none can end."""

import logging
import threading
import time
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

LATE_S = 10.0
CHECK_S = 2.0
"""Time between two looks at the call."""


class CallWatch:
    """Watches the calls of one thread, each in a ``with``; any thread may end it."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self._begun_s = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._begun_s = None

    def end(self) -> None:
        """Watch no more; the thread, which waits for nothing else, ends at once."""
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        told_s = None
        while not self._has_ended.wait(CHECK_S):
            begun_s = self._begun_s
            if begun_s is None or begun_s == told_s or time.monotonic() - begun_s < LATE_S:
                continue
            told_s = begun_s
            log.warning(
                "a call of the GPU's driver has not returned for %.0f s: no chunk is stored or "
                "loaded until it does. If it never does, restart with "
                '"batched_copies": false. Version 580.159.04 of the driver is known to hang so',
                LATE_S,
            )
