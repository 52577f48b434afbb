"""A scan of all files of a root, in steps: how many bytes there are, and which files are oldest."""

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Set
from itertools import chain
from typing import NamedTuple

from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.disk.paths import SHARDS, is_namespace
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import shard_of_files
from kvoffload.backends.folder.places import HOSTS, LEFTOVERS, is_temporary, is_temporary_of
from kvoffload.backends.folder.records import Records
from kvoffload.backends.folder.tenants import Tag, Tags
from kvoffload.backends.header import ALIGNED_BYTES

LEFTOVER_S = 600.0
"""A file that is being written is this old only if its writer was killed."""
MOST_OLDEST = 200_000
"""Files that one scan remembers, the least recently used: some 50 MB."""


_FILES_A_STEP = 1024
"""A slow mount needs a second for their facts."""


class OldFile(NamedTuple):
    """A file that may be evicted."""

    mtime_ns: int
    stored_bytes: int
    folder: str
    shard: str
    key: bytes
    tag: Tag = 0


_Oldest = list[tuple[int, OldFile]]
"""A heap; the most recently used first."""


class Scan:
    """One scan. Of files that are stored meanwhile it counts some.

    Args:
        vfs: makes the system calls.
        root: what is scanned.
        records: of the root.
        tags: whose the files are; None: that is not asked.
        above: tags whose files are remembered apart, so many again in all.
    """

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        records: Records,
        tags: Tags | None = None,
        above: Set[Tag] = frozenset(),
    ) -> None:
        self._vfs = vfs
        self._root = root
        self._records = records
        self._tags = tags
        self._may_read = True
        self._busy_s = 0.0
        self._read_before_s = 0.0 if tags is None else tags.reading_s
        self.counted = {token: host.stored_bytes for token, (host, _) in records.hosts().items()}
        """What each process had stored as the scan began."""
        self.total_bytes = 0
        self.num_unfinished = 0
        """Files that are being written, or that a process left that was killed lately."""
        self.num_unread = 0
        """Files of which it is not known yet whose they are."""
        self.bytes_of: Counter[Tag] = Counter()
        """Bytes of all files of each tag."""
        self._oldest: _Oldest = []
        self._oldest_of: dict[Tag, _Oldest] = {tag: [] for tag in above}
        self.passed: set[tuple[str, str]] = set()
        """Folder and shard of all files that the scan has seen."""
        self._gone: set[tuple[str, bytes]] = set()
        """Folder and key of files that were removed during the scan."""
        self.new: Set[tuple[str, bytes]] = frozenset()
        """Of those that are stored during the scan, as far as that is known: it counts none."""
        self._steps = self._scan()

    def advance(self, until_s: float, *, may_read: bool = True) -> bool:
        """Go on until a moment; return whether the scan is complete; raise OSError if it broke.

        ``may_read``: headers that tell of tenants may be read, which takes longer than to list.
        """
        self._may_read, began_s = may_read, time.monotonic()
        try:
            while next(self._steps, False):
                if time.monotonic() > until_s:
                    return False
            return True
        finally:
            self._busy_s += time.monotonic() - began_s

    def listing_s(self) -> float:
        """Return how long the scan has worked, without the part that it read headers."""
        read_s = 0.0 if self._tags is None else self._tags.reading_s - self._read_before_s
        return max(0.0, self._busy_s - read_s)

    def removed(self, file: OldFile) -> None:
        """Count a file no more, and remember it no more, that was removed during the scan."""
        if (file.folder, file.shard) in self.passed:
            self.total_bytes -= file.stored_bytes
            if file.tag:
                self.bytes_of[file.tag] -= file.stored_bytes
        self._gone.add((file.folder, file.key))

    def oldest(self) -> list[OldFile]:
        """Return the least recently used files, the oldest of all last."""
        found = self._oldest
        if self._oldest_of:
            found = [*{*found, *chain(*self._oldest_of.values())}]
        there = (each for _, each in found if (each.folder, each.key) not in self._gone)
        return sorted(there, reverse=True)

    def _scan(self) -> Iterator[bool]:
        token = self._records.token
        for folder in filter(is_namespace, self._vfs.listdir(self._root)):
            for name in SHARDS:
                listed, path = [], f"{self._root}/{folder}/{name}"
                try:
                    for file in self._vfs.listfacts(path):
                        listed.append(file)
                        if not len(listed) % _FILES_A_STEP:
                            yield True
                except FileNotFoundError:
                    continue
                shard = shard_of_files(name, path, listed)
                self.passed.add((folder, shard.name))
                tag_of: dict[bytes, Tag] = {}
                if self._tags is not None:
                    tag_of, unread = yield from self._tags.of(folder, shard, lambda: self._may_read)
                    self.num_unread += unread
                for key, facts in shard.chunks:
                    if (folder, key) in self._gone or (folder, key) in self.new:
                        continue  # it left in mid-listing; one stored since counts as new
                    size = bytes_on_disk(max(0, facts.st_size - ALIGNED_BYTES))
                    self.total_bytes += size
                    used_ns, tag = facts.st_mtime_ns, tag_of.get(key, 0)
                    self._remember(OldFile(used_ns, size, folder, shard.name, key, tag))
                for stray in filter(is_temporary, shard.strays):
                    unfinished = self._unfinished(f"{shard.path}/{stray}")
                    if not is_temporary_of(stray, token):  # its process counts what it stores
                        self.total_bytes += unfinished
                yield True
        for folder in (self._root, f"{self._root}/{HOSTS}"):
            for name in self._vfs.listdir(folder):
                if name.startswith(LEFTOVERS):
                    self._unfinished(f"{folder}/{name}")

    def _remember(self, file: OldFile) -> None:
        _push(self._oldest, file, MOST_OLDEST)
        if file.tag:
            self.bytes_of[file.tag] += file.stored_bytes
        if (of_tenant := self._oldest_of.get(file.tag)) is not None:
            _push(of_tenant, file, MOST_OLDEST // len(self._oldest_of))

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


def _push(oldest: _Oldest, file: OldFile, most: int) -> None:
    entry = (-file.mtime_ns, file)
    if len(oldest) < most:
        heapq.heappush(oldest, entry)
    elif entry > oldest[0]:
        heapq.heapreplace(oldest, entry)
