"""The shard folders of chunks, each checked before its first use."""

import logging
import stat
from collections.abc import Callable

from kvoffload.backends.disk.chunk_file import strangeness
from kvoffload.backends.disk.paths import shard_of
from kvoffload.backends.disk.vfs import Vfs

log = logging.getLogger(__name__)


class Shards:
    """Makes paths of chunks. Thread-safe; never raises OSError."""

    def __init__(self, vfs: Vfs, count: Callable[[str], None]) -> None:
        """``count`` increments a counter."""
        self._vfs = vfs
        self._count = count
        self._checked: set[str] = set()

    def path_of(self, folder: str, key: bytes) -> str:
        """Return where a chunk lies below the folder of its namespace."""
        shard = f"{folder}/{shard_of(key)}"
        if shard not in self._checked:
            self._check(shard)
        return f"{shard}/{key.hex()}"

    def forget(self) -> None:
        """Check each shard again at its next use."""
        self._checked.clear()

    def _check(self, shard: str) -> None:
        """Remove a link or file in place of a shard folder; the next store makes the folder."""
        try:
            facts = self._vfs.lstat(shard)
            if not stat.S_ISDIR(facts.st_mode):
                self._vfs.unlink(shard)
                kind = "corrupt_link" if stat.S_ISLNK(facts.st_mode) else strangeness(facts)
                self._count(kind or "corrupt_special")
                log.warning("disk: %s was no folder and is removed", shard)
        except OSError:
            return  # missing or unusable: opening a file in it reports why
        self._checked.add(shard)
