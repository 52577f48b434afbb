"""What a process does for the folder it uses: room for writes, eviction, scans, cleaning.

Called from the backend's worker threads and from one housekeeping thread of its own. Nothing here
raises OSError: what cannot be done now is counted and tried again.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvoffload.backends.base import Removal
from kvoffload.backends.disk_index import Index, Name, name_of, split_name
from kvoffload.backends.disk_io import reason_of
from kvoffload.backends.disk_layout import (
    LEDGER,
    QUARANTINE,
    SHARDS,
    chunk_path,
    is_namespace,
    key_of,
    make_folder,
)
from kvoffload.backends.disk_ledger import Ledger
from kvoffload.backends.disk_writers import Ownership, Writer, clean_up, temporary_bytes
from kvoffload.backends.vfs import Vfs
from kvoffload.offload.policies.base import Policy

log = logging.getLogger(__name__)

_MAX_REMOVALS = 1 << 16
_FULL_PAUSE_S = 1.0
_STATVFS_EVERY_S = 0.05
_REMOUNT_OR_FULL = ("io_ENOSPC", "io_EDQUOT", "io_EROFS")


class Bounds:
    """The limits a keeper keeps, in bytes."""

    def __init__(self, capacity: int, min_free: int, high: float, low: float) -> None:
        self.capacity = capacity
        self.min_free = min_free
        self.high_bytes = int(capacity * high)
        self.low_bytes = int(capacity * low)


class Keeper:
    """Looks after one root on behalf of one process. Thread-safe."""

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        namespace: str,
        bounds: Bounds,
        make_policy: Callable[[int], Policy],
        quarantine: int,
    ) -> None:
        """Open the root for the namespace folder of this name.

        Raises:
            OSError: the folder cannot be used.
        """
        self.vfs = vfs
        self.root = root
        self.bounds = bounds
        self.index = Index(make_policy, bounds.capacity)
        self.namespaces = [namespace]
        self._quarantine = quarantine
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._evicting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._removals: deque[Removal] = deque(maxlen=_MAX_REMOVALS)
        self._writes_off_until = 0.0
        self._free_bytes = 0
        self._free_seen = 0.0
        self._mtimes: dict[tuple[int, str], int] = {}
        self.others = 0
        """Other writers alive under the root, as of the last look."""
        fresh = not any(map(is_namespace, vfs.listdir(root)))
        make_folder(vfs, self.folder(0))
        self.writer = Writer(vfs, root)
        self.ownership = Ownership(vfs, root)
        self.ledger = Ledger(vfs, f"{root}/{LEDGER}", fresh=fresh)
        self.ready = threading.Event()
        if self.ownership.take() and fresh:
            self.ready.set()

    def folder(self, number: int) -> str:
        """The folder of a namespace."""
        return f"{self.root}/{self.namespaces[number]}"

    def path(self, name: Name) -> str:
        """Where a chunk lies."""
        number, key = split_name(name)
        return chunk_path(self.folder(number), key)

    def count(self, reason: str, by: int = 1) -> None:
        """Count something that happened."""
        with self._lock:
            self._counts[reason] += by

    def counters(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)

    def take_removals(self) -> list[Removal]:
        """What left this process's namespace since the last call."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._removals.popleft())
        return taken

    # ---- room ------------------------------------------------------------------------------

    def reserve(self, allocated_bytes: int) -> bool:
        """Make room for a write and count it; False: there is none, do not try."""
        if time.monotonic() < self._writes_off_until:
            self.count("refused_full")
            return False
        if not self._has_free(allocated_bytes):
            self.count("refused_min_free")
            return False
        capacity = self.bounds.capacity
        if self.ledger.reserve(allocated_bytes, capacity):
            return True
        if allocated_bytes <= capacity and self.ownership.held and self.ready.is_set():
            self.evict_to(capacity - allocated_bytes)
            if self.ledger.reserve(allocated_bytes, capacity):
                return True
        self.count("refused_capacity")
        return False

    def unreserve(self, allocated_bytes: int, reason: str) -> None:
        """A write failed: give its bytes back; on a full disk leave writing alone for a while."""
        self.ledger.give_back(allocated_bytes)
        self.count(f"write_{reason}")
        if reason in _REMOUNT_OR_FULL:
            self._writes_off_until = time.monotonic() + _FULL_PAUSE_S
            log.warning("disk %s: writing paused, %s", self.root, reason)

    def publish(self, name: Name, temporary: str, reserved: int, allocated: int) -> str | None:
        """Give a wholly written file its name; say why that failed, or None."""
        path = self.path(name)
        with self._publishing:
            try:
                replaced = self._allocated(path)
                try:
                    self.vfs.rename(temporary, path)
                except FileNotFoundError:
                    make_folder(self.vfs, os.path.dirname(path))
                    self.vfs.rename(temporary, path)
            except OSError as error:
                return reason_of(error)
            self.index.add(name, allocated)
        if reserved - allocated + replaced:
            self.ledger.give_back(reserved - allocated + replaced)
        return None

    def discard(self, name: Name, reason: str) -> int:
        """Remove a chunk's file; return the bytes freed, -1 if it cannot be removed."""
        path = self.path(name)
        freed = 0
        with self._publishing:
            try:
                freed = self._allocated(path)
                self.vfs.unlink(path)
            except FileNotFoundError:
                freed = 0
            except OSError as error:
                self.count("undeletable")
                log.warning("disk: cannot remove %s: %s", path, error)
                return -1
            self.index.drop(name)
        if freed:
            self.ledger.give_back(freed)
        self.left(name, reason)
        return freed

    def left(self, name: Name, reason: str) -> None:
        """Note that a chunk is gone."""
        self.index.drop(name)
        self.count(reason)
        number, key = split_name(name)
        if number == 0:
            self._removals.append(Removal(key, reason))

    def evict_to(self, goal_bytes: int) -> None:
        """Evict until no more than ``goal_bytes`` are allocated, or nothing more can be evicted."""
        with self._evicting:
            while self.ledger.resident_bytes > goal_bytes:
                victims = self.index.victims(1)
                if not victims:
                    return
                self.discard(victims[0], "evicted")

    def set_aside(self, name: Name, facts: os.stat_result | None, reason: str) -> None:
        """Take a damaged file out of every reader's sight, keeping a few for a look at them."""
        path = self.path(name)
        log.warning("disk: %s failed verification: %s", path, reason)
        self.count(reason)
        with self._publishing:
            try:
                if facts is not None and self.vfs.lstat(path).st_ino != facts.st_ino:
                    return  # replaced by a newer file meanwhile
                kept = f"{self.root}/{QUARANTINE}/{time.time_ns()}-{os.path.basename(path)}"
                self.vfs.rename(path, kept)
            except OSError:
                kept = ""
        if not kept:
            self.discard(name, "corrupt")
            return
        self.left(name, "corrupt")
        self._trim_quarantine()

    def _trim_quarantine(self) -> None:
        folder = f"{self.root}/{QUARANTINE}"
        try:
            names = sorted(self.vfs.listdir(folder))
            for old in names[: max(0, len(names) - self._quarantine)]:
                freed = self._allocated(f"{folder}/{old}")
                self.vfs.unlink(f"{folder}/{old}")
                self.ledger.give_back(freed)
        except OSError as error:
            log.warning("disk: cannot trim %s: %s", folder, error)

    def _has_free(self, allocated_bytes: int) -> bool:
        """Whether the file system keeps its minimum free after this write."""
        for attempt in range(2):
            now = time.monotonic()
            if now - self._free_seen > _STATVFS_EVERY_S or attempt:
                try:
                    space = self.vfs.statvfs(self.root)
                except OSError:
                    return False
                self._free_bytes = space.f_bavail * space.f_frsize
                self._free_seen = now
            short = self.bounds.min_free + allocated_bytes - self._free_bytes
            if short <= 0:
                self._free_bytes -= allocated_bytes
                return True
            if not (self.ownership.held and self.ready.is_set()):
                continue
            self.evict_to(self.ledger.resident_bytes - short)
        return False

    def _allocated(self, path: str) -> int:
        try:
            return self.vfs.lstat(path).st_blocks * 512
        except FileNotFoundError:
            return 0

    # ---- looking ---------------------------------------------------------------------------

    def look(self, *, full: bool) -> None:
        """Compare the index with the folders; a full look also sets the ledger right."""
        if self.ownership.held:
            self._follow_all()
        changes = self.ledger.changes if self.ledger.refresh() is not None else None
        total = 0
        found: list[tuple[int, Name, int]] = []
        suspects: set[tuple[int, str]] = set()
        present: set[Name] = set()
        for number, shard, names in self._listings(full=full):
            suspects.add((number, shard))
            present.update(names)
            for name in names:
                if not full and name in self.index:
                    continue
                try:
                    facts = self.vfs.lstat(self.path(name))
                except OSError:
                    continue
                total += facts.st_blocks * 512
                found.append((facts.st_atime_ns, name, facts.st_blocks * 512))
        found.sort()
        self.index.found((name, size) for _, name, size in found)
        self._forget_vanished(suspects, present)
        if full and self.ownership.held:
            self._settle(total, changes)

    def _settle(self, chunk_bytes: int, changes: int | None) -> None:
        try:
            total = chunk_bytes + temporary_bytes(self.vfs, self.root)
            folder = f"{self.root}/{QUARANTINE}"
            for name in self.vfs.listdir(folder):
                total += self._allocated(f"{folder}/{name}")
        except OSError:
            return
        if not self.ledger.settle(total, changes) and self.ledger.refresh() is None:
            self.ledger.settle(total)

    def _follow_all(self) -> None:
        with contextlib.suppress(OSError):
            for entry in self.vfs.listdir(self.root):
                if is_namespace(entry) and entry not in self.namespaces:
                    self.namespaces.append(entry)

    def _listings(self, *, full: bool) -> Iterator[tuple[int, str, list[Name]]]:
        """Names in each shard folder, those unchanged since the last look left out unless full."""
        for number in range(len(self.namespaces)):
            for shard in SHARDS:
                folder = f"{self.folder(number)}/{shard}"
                try:
                    mtime = self.vfs.lstat(folder).st_mtime_ns
                    if not full and self._mtimes.get((number, shard)) == mtime:
                        continue
                    keys = map(key_of, self.vfs.listdir(folder))
                    names = [name_of(number, key) for key in keys if key is not None]
                except OSError:
                    continue
                # A folder changed within the clock's last tick may change again unseen.
                settled = time.time_ns() - mtime > 1_000_000_000
                self._mtimes[number, shard] = mtime if settled else -1
                yield number, shard, names

    def _forget_vanished(self, suspects: set[tuple[int, str]], present: set[Name]) -> None:
        if not suspects:
            return
        for name in self.index.names():
            if name in present:
                continue
            path = self.path(name)
            shard = os.path.basename(os.path.dirname(path))
            if (split_name(name)[0], shard) not in suspects:
                continue
            try:
                self.vfs.lstat(path)
            except FileNotFoundError:
                self.left(name, "vanished")
            except OSError:
                continue

    def clean(self) -> None:
        """Remove what dead writers left."""
        try:
            self.others, freed = clean_up(self.vfs, self.root, self.writer.token)
        except OSError as error:
            log.warning("disk: cannot clean %s: %s", self.root, error)
            return
        if freed:
            self.ledger.give_back(freed)

    def close(self) -> None:
        """Let go of everything; the housekeeping thread has ended."""
        self.writer.close()
        self.ownership.close()
        self.ledger.close()
