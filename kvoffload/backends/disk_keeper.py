"""Room for writes, publication, removal and eviction under a root, on behalf of one process.

Called from the backend's worker threads and from its housekeeping thread. Nothing here raises
OSError: what cannot be done is counted, and a caller learns it from the answer.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.backends.base import Removal
from kvoffload.backends.disk_index import Index, Name, split_name
from kvoffload.backends.disk_io import reason_of
from kvoffload.backends.disk_layout import (
    LEDGER,
    QUARANTINE,
    chunk_path,
    is_namespace,
    make_folder,
    prepare_root,
)
from kvoffload.backends.disk_ledger import Ledger
from kvoffload.backends.disk_writers import Ownership, Writer
from kvoffload.backends.vfs import Vfs
from kvoffload.errors import ConfigError
from kvoffload.offload.policies.base import Policy

log = logging.getLogger(__name__)

_MAX_REMOVALS = 1 << 16
_MAX_NAMESPACES = 1 << 16
"""What a name's two bytes can tell apart."""
_FULL_PAUSE_S = 1.0
_ROOM_TRIES = 4
_MAX_SPARED = 64
_FULL = ("io_ENOSPC", "io_EDQUOT", "io_EROFS")
_SILENT = ("removed",)
"""Reasons of removals the caller asked for itself: it need not be told."""


class Bounds(NamedTuple):
    """The limits a keeper keeps."""

    capacity_bytes: int
    min_free_bytes: int
    high_bytes: int
    """Above this the background evicts..."""
    low_bytes: int
    """...down to this."""
    quarantine_files: int


class Keeper:
    """Looks after one root on behalf of one process. Thread-safe."""

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        namespace: str,
        bounds: Bounds,
        make_policy: Callable[[int], Policy],
        *,
        durable: bool = False,
    ) -> None:
        """Open the root, for the namespace folder of this name.

        Raises:
            OSError: the folder cannot be used.
        """
        self.vfs = vfs
        self.root = root
        self.bounds = bounds
        self.index = Index(make_policy, bounds.capacity_bytes)
        self.namespaces = [namespace]
        """Folder names by number; 0 is this backend's own."""
        self.others = 0
        """Other writers alive under the root, as of the last look."""
        self.horizon_ns = time.time_ns()
        """When the chunk evicted last had been used: how far back the stored past reaches."""
        self.bytes_under_way = 0
        """Of files on their way in or out: folders and ledger may disagree by these."""
        self._durable = durable
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._evicting = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._removals: deque[Removal] = deque(maxlen=_MAX_REMOVALS)
        self._used: dict[Name, int] = {}
        self._writes_off_until = 0.0
        self._remaking = threading.Lock()
        self.remakes = 0
        """How often folders that somebody removed were made anew."""
        fresh = self._holds_nothing()
        make_folder(vfs, self.folder(0), durable=durable)
        self.writer = Writer(vfs, root)
        try:
            self.ownership = Ownership(vfs, root)
            self.ledger = Ledger(vfs, f"{root}/{LEDGER}", fresh=fresh)
        except OSError:
            self.writer.close()
            raise
        self.ready = threading.Event()
        """Set once everything that was on disk at the start is in the index."""
        if self.ownership.take() and fresh:
            self.ready.set()

    def folder(self, number: int) -> str:
        """The folder of a namespace."""
        return f"{self.root}/{self.namespaces[number]}"

    def follow(self, namespaces: Iterable[str]) -> None:
        """Number these namespace folders, those that have no number yet."""
        with self._lock:
            for namespace in namespaces:
                if namespace not in self.namespaces and len(self.namespaces) < _MAX_NAMESPACES:
                    self.namespaces.append(namespace)

    def path(self, name: Name) -> str:
        """Where a chunk lies."""
        number, key = split_name(name)
        return chunk_path(self.folder(number), key)

    def close(self) -> None:
        """Let go of everything."""
        self.writer.close()
        self.ownership.close()
        self.ledger.close()

    # ---- what should be there, and may not be -------------------------------------------------

    def remake(self) -> bool:
        """Make anew what somebody removed of folders and shared files; say whether it was that.

        A root that was emptied under a running process is a root with nothing in it, no error.
        """
        with self._remaking:
            try:
                if not self._is_damaged():
                    return False
                prepare_root(self.vfs, self.root, durable=self._durable)
                fresh = self._holds_nothing()
                make_folder(self.vfs, self.folder(0), durable=self._durable)
                if self.writer.is_gone():
                    self.writer.move()
                if self.ownership.is_gone():
                    self.ownership.close()
                    self.ownership.take()
                if self.ledger.is_gone():
                    self.ledger.reopen(fresh=fresh)
            except (OSError, ConfigError) as error:
                self.count("remake_failed")
                log.warning("disk %s: folders are gone and cannot be made: %s", self.root, error)
                return False
            self.remakes += 1
        self.count("remade")
        log.warning("disk %s: folders had been removed, made anew", self.root)
        return True

    def _is_damaged(self) -> bool:
        if any(part.is_gone() for part in (self.writer, self.ownership, self.ledger)):
            return True
        try:
            for folder in (self.folder(0), f"{self.root}/{QUARANTINE}"):
                self.vfs.lstat(folder)
        except FileNotFoundError:
            return True
        return False

    def _holds_nothing(self) -> bool:
        return not any(map(is_namespace, self.vfs.listdir(self.root)))

    # ---- figures ---------------------------------------------------------------------------

    def count(self, reason: str) -> None:
        """Count something that happened."""
        with self._lock:
            self._counts[reason] += 1

    def counters(self) -> Mapping[str, int]:
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

    # ---- recency ---------------------------------------------------------------------------

    def used(self, names: Sequence[Name]) -> None:
        """These were read well, the last named is the most recent.

        Remembered here, and in the files' access times a little later.
        """
        self.index.touch(names)
        with self._lock:
            self._used.update(dict.fromkeys(names, time.time_ns()))

    def record_use(self) -> None:
        """Write access times, where other processes and the next start find them."""
        with self._lock:
            used, self._used = self._used, {}
        for name, atime_ns in used.items():
            path = self.path(name)
            with contextlib.suppress(OSError):
                self.vfs.utime(path, atime_ns, self.vfs.lstat(path).st_mtime_ns)

    # ---- room ------------------------------------------------------------------------------

    def reserve(self, allocated_bytes: int) -> bool:
        """Make room for a write and count it; False: there is none, do not try."""
        capacity = self.bounds.capacity_bytes
        if allocated_bytes > capacity:
            self.count("refused_size")
            return False
        if time.monotonic() < self._writes_off_until:
            self.count("refused_full")
            return False
        if not self._has_free(allocated_bytes):
            self.count("refused_min_free")
            return False
        self._under_way(allocated_bytes)
        # Whoever waits for an eviction is to get the room it makes: no one passes by.
        at_once = not self._evicting.locked() and self.ledger.reserve(allocated_bytes, capacity)
        if not at_once and not self._evict_for(allocated_bytes):
            self._under_way(-allocated_bytes)
            self.count("refused_capacity")
            return False
        return True

    def _evict_for(self, allocated_bytes: int) -> bool:
        """Evict until a reservation succeeds; another process may be faster, hence the tries."""
        capacity = self.bounds.capacity_bytes
        if not self._may_evict():
            return self.ledger.reserve(allocated_bytes, capacity)
        with self._evicting:
            for _ in range(_ROOM_TRIES):
                self._evict_to(capacity - allocated_bytes)
                if self.ledger.reserve(allocated_bytes, capacity):
                    return True
        return False

    def unreserve(self, allocated_bytes: int, reason: str) -> None:
        """A write failed: give its bytes back; on a full disk leave writing alone for a while."""
        self.ledger.give_back(allocated_bytes)
        self._under_way(-allocated_bytes)
        self.count(f"write_{reason}")
        if reason in _FULL:
            self._writes_off_until = time.monotonic() + _FULL_PAUSE_S
            log.warning("disk %s: writing paused, %s", self.root, reason)

    def _may_evict(self) -> bool:
        return self.ownership.held and self.ready.is_set()

    def _has_free(self, allocated_bytes: int) -> bool:
        """Whether the file system keeps its minimum free after this write; evict if it helps."""
        for _ in range(_ROOM_TRIES):
            try:
                space = self.vfs.statvfs(self.root)
            except OSError:
                return False
            needed = self.bounds.min_free_bytes + self.bytes_under_way + allocated_bytes
            short = needed - space.f_bavail * space.f_frsize
            if short <= 0:
                return True
            if not self._may_evict():
                return False
            self.evict_to(self.ledger.resident_bytes - short)
        return False

    def _under_way(self, allocated_bytes: int) -> None:
        with self._lock:
            self.bytes_under_way += allocated_bytes

    # ---- files come and go -----------------------------------------------------------------

    def publish(self, name: Name, temporary: str, reserved: int, allocated: int) -> str | None:
        """Give a wholly written file its name; say why that failed, or None."""
        path = self.path(name)
        with self._publishing:
            try:
                replaced = self._allocated(path)
                try:
                    self.vfs.rename(temporary, path)
                except FileNotFoundError:
                    make_folder(self.vfs, os.path.dirname(path), durable=self._durable)
                    self.vfs.rename(temporary, path)
            except OSError as error:
                return reason_of(error)
            self.index.add(name, allocated)
        if reserved - allocated + replaced:
            self.ledger.give_back(reserved - allocated + replaced)
        self._under_way(-reserved)
        return None

    def discard(self, name: Name, reason: str) -> bool:
        """Remove a chunk's file; False if that is impossible."""
        path = self.path(name)
        with self._publishing:
            try:
                self._unlink(path)
            except FileNotFoundError:
                pass  # someone else was faster, and has booked it
            except OSError as error:
                self.count("undeletable")
                log.warning("disk: cannot remove %s: %s", path, error)
                return False
            self.left(name, reason)
        return True

    def _unlink(self, path: str) -> None:
        """Remove a file and book its bytes; raises OSError if it stays."""
        allocated = self.vfs.lstat(path).st_blocks * 512
        self._under_way(allocated)
        try:
            self.vfs.unlink(path)
            self.ledger.give_back(allocated)
        finally:
            self._under_way(-allocated)

    def left(self, name: Name, reason: str) -> None:
        """Note that a chunk is gone."""
        known = self.index.drop(name)
        self.count(reason)
        number, key = split_name(name)
        if known and number == 0 and reason not in _SILENT:
            self._removals.append(Removal(key, reason))

    def evict_to(self, goal_bytes: int) -> None:
        """Evict until no more than ``goal_bytes`` are allocated, or nothing more can be evicted."""
        with self._evicting:
            self._evict_to(goal_bytes)

    def _evict_to(self, goal_bytes: int) -> None:
        while self.ledger.resident_bytes > goal_bytes:
            name = self._victim()
            if name is None:
                return
            # An undeletable one is out of the order now: the next is tried, not this again.
            self.discard(name, "evicted")

    def _victim(self) -> Name | None:
        """The next to leave; while others share the root, not one they used lately."""
        for spared in range(_MAX_SPARED + 1):
            taken = self.index.victims(1)
            if not taken:
                return None
            name = taken[0]
            if not self.others:
                return name
            try:
                used_ns = self.vfs.lstat(self.path(name)).st_atime_ns
            except OSError:
                return name
            # Its own order knows nothing of reads by others; access times do. Whatever was used
            # in the younger half of the stored past gets a second chance.
            if spared == _MAX_SPARED or used_ns <= (self.horizon_ns + time.time_ns()) // 2:
                self.horizon_ns = max(self.horizon_ns, used_ns)
                return name
            self.index.spare(name)
        return None

    def set_aside(self, name: Name, facts: os.stat_result | None, reason: str) -> None:
        """Take a damaged file out of every reader's sight, keeping a few for a look at them."""
        path = self.path(name)
        log.warning("disk: %s failed verification: %s", path, reason)
        self.count(reason)
        kept = f"{self.root}/{QUARANTINE}/{time.time_ns()}-{os.path.basename(path)}"
        moved = False
        with self._publishing:
            try:
                if facts is not None and self.vfs.lstat(path).st_ino != facts.st_ino:
                    return  # replaced by a newer file meanwhile
                self.vfs.rename(path, kept)
                moved = True
                self.left(name, "corrupt")
            except FileNotFoundError:
                moved = True  # another reader was faster
                self.left(name, "corrupt")
            except OSError:
                pass  # removed below, if that is possible
        if moved:
            self._trim_quarantine()
        elif not self.discard(name, "corrupt"):
            self.index.hide([name])

    def _trim_quarantine(self) -> None:
        """Keep the newest few, and no more than a sixteenth of the capacity."""
        folder = f"{self.root}/{QUARANTINE}"
        kept_bytes = 0
        try:
            files = sorted(self.vfs.listdir(folder), reverse=True)
        except OSError as error:
            log.warning("disk: cannot trim %s: %s", folder, error)
            return
        for number, file in enumerate(files):
            with contextlib.suppress(OSError):  # tried again with the next one set aside
                allocated = self._allocated(f"{folder}/{file}")
                kept_bytes += allocated
                too_many = number >= self.bounds.quarantine_files
                if too_many or kept_bytes * 16 > self.bounds.capacity_bytes:
                    self._unlink(f"{folder}/{file}")

    def _allocated(self, path: str) -> int:
        try:
            return self.vfs.lstat(path).st_blocks * 512
        except FileNotFoundError:
            return 0
