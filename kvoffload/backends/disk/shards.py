"""Shard folders are folders: a link or a file in place of one gives way before it is used."""

import logging
import stat
from collections.abc import Callable

from kvoffload.backends.disk.chunk_file import strangeness
from kvoffload.backends.disk.vfs import Vfs

log = logging.getLogger(__name__)


class Shards:
    """Remembers which shard folders were looked at, for about a second. Thread-safe.

    A look at each use would cost every load one system call more.
    """

    def __init__(self, vfs: Vfs, count: Callable[[str], None]) -> None:
        """``count`` is told the kind of what was found in place of a folder."""
        self._vfs = vfs
        self._count = count
        self._seen: set[str] = set()

    def forget(self) -> None:
        """Look again at the next use of each."""
        self._seen.clear()

    def check(self, shard: str) -> None:
        """Remove what lies in place of a shard folder; the next store makes the folder."""
        if shard in self._seen:
            return
        try:
            facts = self._vfs.lstat(shard)
            if not stat.S_ISDIR(facts.st_mode):
                self._vfs.unlink(shard)
                kind = "corrupt_link" if stat.S_ISLNK(facts.st_mode) else strangeness(facts)
                self._count(kind or "corrupt_special")
                log.warning("disk: %s was no folder and is removed", shard)
        except OSError:
            return  # not made yet, or not to be used: what opens files in it says so
        self._seen.add(shard)
