"""The quarantine: a few files that failed verification are kept for inspection."""

import contextlib
import logging
import os
import time

from kvoffload.backends.disk.paths import QUARANTINE
from kvoffload.backends.disk.root import RootHandle

log = logging.getLogger(__name__)

QUARANTINE_S = 7 * 86400.0
"""No damaged file stays longer: it holds a user's prompt."""


class Quarantine:
    """Damaged files of one root: the newest few, a sixteenth of the capacity at most."""

    def __init__(self, root: RootHandle) -> None:
        self._vfs = root.vfs
        self._limits = root.limits
        self._folder = f"{root.path}/{QUARANTINE}"

    def path_for(self, path: str) -> str:
        """Return where to move a damaged file; a file's name has at most 255 bytes."""
        return f"{self._folder}/{time.time_ns()}-{os.path.basename(path)[:200]}"

    def allocated_bytes(self) -> int:
        """Return the bytes of all files; raises OSError."""
        total = 0
        for name in self._vfs.listdir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # removed since the listing
                total += self._vfs.lstat(f"{self._folder}/{name}").st_blocks * 512
        return total

    def surplus(self) -> list[tuple[str, int]]:
        """Return surplus files and those older than a week or ``ttl_s``, with their bytes."""
        limits, kept_bytes, surplus = self._limits, 0, list[tuple[str, int]]()
        oldest_ns = time.time_ns() - int(min(QUARANTINE_S, limits.ttl_s or QUARANTINE_S) * 1e9)
        try:
            files = sorted(self._vfs.listdir(self._folder), reverse=True)
        except OSError as error:
            log.warning("disk: cannot trim %s: %s", self._folder, error)
            return []
        for number, file in enumerate(files):
            with contextlib.suppress(OSError):  # the next trim tries again
                facts = self._vfs.lstat(f"{self._folder}/{file}")
                kept_bytes += (allocated := facts.st_blocks * 512)
                too_many = number >= limits.quarantine_files
                too_old = facts.st_ctime_ns < oldest_ns  # its last change was the move here
                if too_many or too_old or kept_bytes * 16 > limits.capacity_bytes:
                    surplus.append((f"{self._folder}/{file}", allocated))
        return surplus
