"""Evicts the least recently used files of all hosts, and says how much each host may store.

One process at a time does so. If two do for a moment, chunks leave too early: that costs hits.
"""

import heapq
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.disk.paths import is_namespace
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import walk
from kvoffload.backends.folder.places import HOSTS, NEW, is_temporary
from kvoffload.backends.folder.records import HostRecord, LeaseRecord, Records
from kvoffload.backends.header import ALIGNED_BYTES

log = logging.getLogger(__name__)

LEFTOVER_S = 600.0
"""A file that is being written is this old only if its writer was killed."""
DEAD_S = 60.0
"""The process of an older record has ended or hangs; its next word counts it again."""
LEAST_FREE, FREED = 0.05, 0.10
"""Shares of the capacity: eviction begins below the first, and ends at the second."""
_OF_A_FULL_MOUNT = 0.03
"""Share of the stored bytes to evict when the mount is full although the capacity is not."""
_CANDIDATES = 200_000
"""Files that one scan remembers, the least recently used: some 50 MB."""
_EVICT_S = 1.0
"""Time of eviction in one turn; the lease is renewed after it."""
_SCAN_SHARE = 0.1
"""Scans take at most this part of the time."""


class Candidate(NamedTuple):
    """A file that may be evicted."""

    mtime_ns: int
    stored_bytes: int
    folder: str
    shard: str
    key: bytes


class Evictor:
    """The evictor's knowledge. Used by one thread.

    Args:
        vfs: makes the system calls.
        root: where.
        records: of the root.
        capacity_bytes: of all files.
        evicted: called with the namespace's folder and the key of each chunk that left.
        pulse: called now and then in a scan; returns whether to go on.
    """

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        records: Records,
        capacity_bytes: int,
        evicted: Callable[[str, bytes], None],
        pulse: Callable[[], bool],
    ) -> None:
        self._vfs = vfs
        self._root = root
        self._records = records
        self._capacity_bytes = capacity_bytes
        self._evicted = evicted
        self._pulse = pulse
        self.resident_bytes: int | None = None
        """Bytes of files, as far as their writers have told; None before the first scan."""
        self.counted: dict[str, int] = {}
        self.granted_bytes = 0
        self._out_of_space: dict[str, int] = {}
        self._candidates: list[Candidate] = []
        """The least recently used last."""
        self._scan_due_s = 0.0
        self._goal_bytes: int | None = None
        """Eviction goes on, over several turns, until no more bytes are left."""
        self.scans = 0

    def begin(self, lease: LeaseRecord | None, *, is_new: bool) -> None:
        """Take over from the last evictor, as its lease tells; ``is_new``: the root is empty."""
        self._candidates, self._scan_due_s, self._goal_bytes = [], 0.0, None
        self.resident_bytes, self.counted = 0 if is_new else None, {}
        if lease is not None and lease.resident_bytes is not None:
            self.resident_bytes, self.counted = lease.resident_bytes, dict(lease.counted)

    def turn(self, hosts: Mapping[str, tuple[HostRecord, float]], *, is_full: bool = False) -> None:
        """Count what the processes stored, evict if there is need, and grant what is free.

        ``is_full``: the mount is full, although this process could not write that down.
        """
        if self.resident_bytes is None:
            self._scan()
        if self.resident_bytes is None:
            return
        self._count(hosts)
        alive = {token for token, (_, age_s) in hosts.items() if age_s < DEAD_S}
        # One share is for a process that has not told of itself yet.
        shares = len(alive) + 1
        largest = max((host.largest_bytes for host, _ in hosts.values()), default=0)
        least = max(int(self._capacity_bytes * LEAST_FREE), shares * largest)
        wanted = max(int(self._capacity_bytes * FREED), 2 * shares * largest)
        surplus = self._surplus(hosts, is_full=is_full)
        if self._free_bytes < least or surplus:
            wanted = min(wanted, self._capacity_bytes // 2)
            self._goal_bytes = min(self._capacity_bytes - wanted, self.resident_bytes - surplus)
        self._evict()
        self.granted_bytes = max(0, self._free_bytes) // shares

    @property
    def _free_bytes(self) -> int:
        return self._capacity_bytes - (self.resident_bytes or 0)

    def _count(self, hosts: Mapping[str, tuple[HostRecord, float]]) -> None:
        """Add what each process stored since it was counted last."""
        resident = self.resident_bytes or 0
        for token, (host, age_s) in hosts.items():
            resident += host.stored_bytes - self.counted.get(token, 0)
            self.counted[token] = host.stored_bytes
            if host.is_closed or age_s > LEFTOVER_S:
                self._records.remove_host(token)
                del self.counted[token]
                if not host.is_closed:  # it may have stored more than it told
                    self._candidates = []
        for token in self.counted.keys() - hosts.keys():
            del self.counted[token]
        self.resident_bytes = max(0, resident)

    def _surplus(self, hosts: Mapping[str, tuple[HostRecord, float]], *, is_full: bool) -> int:
        """Return what to evict because stores failed on a full mount since the last turn."""
        told = {token: host.out_of_space for token, (host, _) in hosts.items()}
        known, self._out_of_space = self._out_of_space, told
        is_full = is_full or any(count > known.get(token, 0) for token, count in told.items())
        return int((self.resident_bytes or 0) * _OF_A_FULL_MOUNT) + 1 if is_full else 0

    # ---- eviction ------------------------------------------------------------------------------

    def _evict(self) -> None:
        """Remove the least recently used files until the goal is reached, or the turn is over."""
        until_s = time.monotonic() + _EVICT_S
        while self._goal_bytes is not None and time.monotonic() < until_s:
            if (self.resident_bytes or 0) <= self._goal_bytes:
                self._goal_bytes = None
                return
            if not self._candidates:
                if time.monotonic() < self._scan_due_s:
                    return
                self._scan()
            if not self._candidates:
                return
            self._remove(self._candidates.pop())

    def _remove(self, file: Candidate) -> None:
        """Remove a file, unless it was used or replaced since the scan."""
        path = f"{self._root}/{file.folder}/{file.shard}/{file.key.hex()}"
        try:
            if self._vfs.lstat(path).st_mtime_ns != file.mtime_ns:
                return
            self._vfs.unlink(path)
        except FileNotFoundError:
            pass  # removed by another process; the scan counted it
        else:
            self._evicted(file.folder, file.key)
        self.resident_bytes = max(0, (self.resident_bytes or 0) - file.stored_bytes)

    def _scan(self) -> None:
        """Count all files, and remember the least recently used.

        What processes store during the scan may count twice until the next one: too much, never too
        little.
        """
        began_s, counted = time.monotonic(), dict(self.counted)
        for token, (host, _) in self._records.hosts().items():
            counted[token] = host.stored_bytes
        total, oldest = 0, list[tuple[int, Candidate]]()
        for folder in filter(is_namespace, self._vfs.listdir(self._root)):
            for shard in walk(self._vfs, f"{self._root}/{folder}", _refuse):
                if not self._pulse():
                    return
                for key, facts in shard.chunks:
                    size = bytes_on_disk(max(0, facts.st_size - ALIGNED_BYTES))
                    total += size
                    each = Candidate(facts.st_mtime_ns, size, folder, shard.name, key)
                    if len(oldest) < _CANDIDATES:
                        heapq.heappush(oldest, (-each.mtime_ns, each))
                    elif each.mtime_ns < -oldest[0][0]:
                        heapq.heapreplace(oldest, (-each.mtime_ns, each))
                for name in filter(is_temporary, shard.strays):
                    total += self._leftover(f"{shard.path}/{name}")
        for folder in (self._root, f"{self._root}/{HOSTS}"):
            for name in self._vfs.listdir(folder):
                if name.startswith(NEW):
                    self._leftover(f"{folder}/{name}")
        self._candidates = sorted((each for _, each in oldest), reverse=True)
        self.resident_bytes, self.counted = total, counted
        now_s = time.monotonic()
        self._scan_due_s = now_s + (now_s - began_s) / _SCAN_SHARE
        self.scans += 1

    def _leftover(self, path: str) -> int:
        """Remove a file whose writer was killed; return the bytes of one that is being written."""
        try:
            facts = self._vfs.lstat(path)
            if self._records.age_s(facts.st_mtime_ns) < LEFTOVER_S:
                return int(facts.st_size)
            self._vfs.unlink(path)
        except OSError:
            pass
        return 0


def _refuse(shard: str, error: OSError) -> None:
    """End a scan that would count too little."""
    raise error
