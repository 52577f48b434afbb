"""Whether stores may go through the page cache: while memory is free, and no program waits for it.

Reading takes some 0.3 ms. So one store in a second does it, and the rest read its answer.
"""

import logging
import threading
import time

from kvoffload.config import human_bytes
from kvoffload.memory_limits import memories, pressure

log = logging.getLogger(__name__)

LEAST_PART, LEAST_BYTES = 1 / 8, 2 << 30
"""So much of the machine, and of each cgroup with a limit, is left to programs that allocate."""
MOST_PRESSURE = 10.0
"""Percent of the last 10 s in which some program may have waited for memory. The kernel counts its
own work, too: 3 % where it drops 0.75 GiB of old pages a second."""
PERIOD_S = 1.0
CALM_S = 10.0
"""Stores go directly for so long after the last reason: pressure is a mean of as long."""


class CacheRoom:
    """Answers for all threads of a tier.

    Args:
        root: of the tier, for the log.
    """

    def __init__(self, root: str) -> None:
        self.is_free = True
        """The last answer."""
        self._root = root
        self._why = ""
        self._judging = threading.Lock()
        self._judge_at = self._calm_at = 0.0
        self.look()

    def __str__(self) -> str:
        way = "through the page cache" if self.is_free else "directly"
        return f"stores go {way}: {self._why}"

    def look(self) -> bool:
        """Return whether stores may go through the page cache; judge if that is a second old."""
        if time.monotonic() >= self._judge_at and self._judging.acquire(blocking=False):
            try:
                was_free = self.is_free
                self._judge(time.monotonic())
                if self.is_free is not was_free:
                    log.info("disk %s: %s", self._root, str(self))
            finally:
                self._judging.release()
        return self.is_free

    def _judge(self, now_s: float) -> None:
        is_free, why = _judged()
        self._judge_at = now_s + PERIOD_S
        if not is_free:
            self._calm_at = now_s + CALM_S
        if not is_free or now_s >= self._calm_at:
            self.is_free, self._why = is_free, why


def _judged() -> tuple[bool, str]:
    """Return whether the page cache may be filled, and why."""
    known, waits = memories(), pressure()
    if not known:
        return False, "the kernel does not tell how much memory is available"
    for memory in known:
        available, total = map(human_bytes, (memory.available_bytes, memory.total_bytes))
        told = f"{memory.place} has {available} of {total} available"
        if memory.available_bytes < max(LEAST_BYTES, memory.total_bytes * LEAST_PART):
            return False, f"{told}, which is too little"
    if waits is not None and waits[1] > MOST_PRESSURE:
        return False, f"programs of {waits[0]} waited for memory in {waits[1]:g} % of the last 10 s"
    return True, told
