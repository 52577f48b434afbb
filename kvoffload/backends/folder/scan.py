"""A scan of all files of a root, in steps: how many bytes there are, and which files are oldest."""

import heapq
import time
from collections.abc import Iterator
from typing import NamedTuple

from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.disk.paths import is_namespace
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import walk
from kvoffload.backends.folder.places import HOSTS, NEW, is_temporary
from kvoffload.backends.folder.records import Records
from kvoffload.backends.header import ALIGNED_BYTES

LEFTOVER_S = 600.0
"""A file that is being written is this old only if its writer was killed."""
MOST_OLDEST = 200_000
"""Files that one scan remembers, the least recently used: some 50 MB."""


class OldFile(NamedTuple):
    """A file that may be evicted."""

    mtime_ns: int
    stored_bytes: int
    folder: str
    shard: str
    key: bytes


class Scan:
    """One scan. Of files that are stored meanwhile it counts some."""

    def __init__(self, vfs: Vfs, root: str, records: Records) -> None:
        self._vfs = vfs
        self._root = root
        self._records = records
        self.began_s = time.monotonic()
        self.counted = {token: host.stored_bytes for token, (host, _) in records.hosts().items()}
        """What each process had stored as the scan began."""
        self.total_bytes = 0
        self.num_unfinished = 0
        """Files that are being written, or that a process left that was killed lately."""
        self._oldest: list[tuple[int, OldFile]] = []
        self._passed: set[tuple[str, str]] = set()
        self._gone: set[tuple[str, bytes]] = set()
        """Folder and key of files that were removed since the scan passed them."""
        self._steps = self._scan()

    def advance(self, until_s: float) -> bool:
        """Go on until a moment; return whether the scan is complete; raise OSError if it broke."""
        while next(self._steps, False):
            if time.monotonic() > until_s:
                return False
        return True

    def removed(self, file: OldFile) -> None:
        """Count a file no more, and remember it no more, that was removed during the scan."""
        if (file.folder, file.shard) in self._passed:
            self.total_bytes -= file.stored_bytes
            self._gone.add((file.folder, file.key))

    def oldest(self) -> list[OldFile]:
        """Return the least recently used files, the oldest of all last."""
        there = (each for _, each in self._oldest if (each.folder, each.key) not in self._gone)
        return sorted(there, reverse=True)

    def _scan(self) -> Iterator[bool]:
        for folder in filter(is_namespace, self._vfs.listdir(self._root)):
            for shard in walk(self._vfs, f"{self._root}/{folder}", _refuse):
                for key, facts in shard.chunks:
                    size = bytes_on_disk(max(0, facts.st_size - ALIGNED_BYTES))
                    self.total_bytes += size
                    self._remember(OldFile(facts.st_mtime_ns, size, folder, shard.name, key))
                for name in filter(is_temporary, shard.strays):
                    self.total_bytes += self._unfinished(f"{shard.path}/{name}")
                self._passed.add((folder, shard.name))
                yield True
        for folder in (self._root, f"{self._root}/{HOSTS}"):
            for name in self._vfs.listdir(folder):
                if name.startswith(NEW):
                    self._unfinished(f"{folder}/{name}")

    def _remember(self, file: OldFile) -> None:
        entry = (-file.mtime_ns, file)
        if len(self._oldest) < MOST_OLDEST:
            heapq.heappush(self._oldest, entry)
        elif entry > self._oldest[0]:
            heapq.heapreplace(self._oldest, entry)

    def _unfinished(self, path: str) -> int:
        """Remove a file whose writer was killed; return the bytes of one that is being written."""
        try:
            facts = self._vfs.lstat(path)
            if self._records.age_s(facts.st_mtime_ns) < LEFTOVER_S:
                self.num_unfinished += 1
                return int(facts.st_size)
            self._vfs.unlink(path)
        except OSError:
            pass
        return 0


def _refuse(shard: str, error: OSError) -> None:
    """End a scan that would count too little."""
    raise error
