"""Room for writes, publication, removal and eviction under a root, on behalf of one process.

Called from the backend's worker threads and from its housekeeping thread. Nothing here raises
OSError: what cannot be done is counted, and a caller learns it from the answer. What else is
raised, by a plug-in's eviction policy or for want of memory, leaves the accounting right.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvoffload.backends.base import Removal
from kvoffload.backends.disk.chunk_file import reason_of
from kvoffload.backends.disk.index import Index, Name, split_name
from kvoffload.backends.disk.limits import Limits
from kvoffload.backends.disk.paths import QUARANTINE, make_folder, shard_of
from kvoffload.backends.disk.quarantine import trim
from kvoffload.backends.disk.root import RootHandle
from kvoffload.backends.disk.shards import Shards
from kvoffload.backends.disk.use_times import UseTimes
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.log_rate import Throttle
from kvoffload.policies.base import Policy

log = logging.getLogger(__name__)

_MAX_REMOVALS = 1 << 16
_MAX_NAMESPACES = 1 << 16
"""What a name's two bytes can tell apart."""
_FULL_PAUSE_S = 1.0
_ROOM_TRIES = 4
_MAX_SPARED = 64
_MAX_UNDELETABLE = 64
"""In one eviction: a file system that removes nothing is not to be asked for every file."""
_FULL = ("io_ENOSPC", "io_EDQUOT", "io_EROFS")
_SILENT = ("removed",)
"""Reasons of removals the caller asked for itself: it need not be told."""


class DiskStore:
    """Looks after one root on behalf of one process. Thread-safe."""

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        namespace: str,
        bounds: Limits,
        make_policy: Callable[[int], Policy],
        *,
        durable: bool = False,
        trust_parents: bool = False,
    ) -> None:
        """Open the root, for the namespace folder of this name.

        ``bounds`` are the limits wanted; :attr:`bounds` are those agreed for the root.

        Raises:
            OSError: the folder cannot be used.
        """
        self.vfs = vfs
        self.root = root
        self.namespaces = [namespace]
        """Folder names by number; 0 is this backend's own."""
        self.others = 0
        """Other writers alive under the root, as of the last look."""
        self.horizon_ns = time.time_ns()
        """When the chunk evicted last had been used: how far back the stored past reaches."""
        self.bytes_under_way = 0
        """Of files on their way in or out: folders and ledger may disagree by these."""
        self.largest_bytes = 0
        """Of what this process ever made room for."""
        self.lacks_victims = threading.Event()
        """Set when a store wants room and nothing known can leave: others may have stored it."""
        self._durable = durable
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._evicting = threading.Lock()
        self._wanting = 0
        """Stores that wait for an eviction."""
        self._counts: Counter[str] = Counter()
        self._damaged, self._undeletable = Throttle(log), Throttle(log)
        self._removals: deque[Removal] = deque(maxlen=_MAX_REMOVALS)
        self._writes_off_until = 0.0
        self.hold = RootHandle(
            vfs, root, namespace, bounds, self.count, durable=durable, trust_parents=trust_parents
        )
        self.shards = Shards(vfs, self.count)
        self.bounds = self.hold.bounds
        self.uses = UseTimes(self.bounds.ttl_s)
        self.index = Index(make_policy, self.bounds.capacity_bytes, self._policy_failed)
        self.writer = self.hold.writer
        self.ownership = self.hold.ownership
        self.ledger = self.hold.ledger
        self.ready = threading.Event()
        """Set once everything that was on disk at the start is in the index."""
        if self.ownership.held and self.hold.fresh:
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
        shard = f"{self.folder(number)}/{shard_of(key)}"
        self.shards.check(shard)
        return f"{shard}/{key.hex()}"

    # ---- figures ---------------------------------------------------------------------------

    def count(self, reason: str, times: int = 1) -> None:
        """Count something that happened."""
        with self._lock:
            self._counts[reason] += times

    def counters(self) -> Mapping[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)

    def _policy_failed(self, error: Exception) -> None:
        self.count("policy_failed")
        log.warning("disk %s: the eviction policy failed", self.root, exc_info=error)

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
        self.uses.used(names)

    def record_use(self) -> None:
        """Write access times, where other processes and the next start find them."""
        for name, atime_ns in self.uses.take_unwritten().items():
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
        self.largest_bytes = max(self.largest_bytes, allocated_bytes)
        self._under_way(allocated_bytes)
        granted = False
        try:
            # Whoever waits for an eviction is to get the room it makes: no one passes by.
            if not self._wanting:
                granted = self.ledger.reserve(allocated_bytes, capacity)
            granted = granted or self._evict_for(allocated_bytes)
        finally:
            if not granted:
                self._under_way(-allocated_bytes)
        if not granted:
            self.count("refused_capacity")
        return granted

    def _evict_for(self, allocated_bytes: int) -> bool:
        """Evict until a reservation succeeds; another process may be faster, hence the tries."""
        capacity = self.bounds.capacity_bytes
        if not self._may_evict():
            return self.ledger.reserve(allocated_bytes, capacity)
        with self._wanted_eviction():
            for _ in range(_ROOM_TRIES):
                self._evict_to(capacity - allocated_bytes)
                if self.ledger.reserve(allocated_bytes, capacity):
                    return True
        return False

    def unreserve(self, allocated_bytes: int, temporary: str | None) -> None:
        """A write came to nothing: remove its file, give its bytes back."""
        if temporary is not None:
            self.vfs.unlink_quietly(temporary)
        self.ledger.give_back(allocated_bytes)
        self._under_way(-allocated_bytes)

    def write_failed(self, reason: str) -> None:
        """Count it; on a full disk leave writing alone for a while."""
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
            with self._wanted_eviction():
                self._evict_to(self.ledger.resident_bytes - short)
        return False

    def _under_way(self, allocated_bytes: int) -> None:
        with self._lock:
            self.bytes_under_way += allocated_bytes

    # ---- files come and go -----------------------------------------------------------------

    def publish(self, name: Name, temporary: str, reserved: int, allocated: int) -> str | None:
        """Give a wholly written file its name; say why that failed, or None.

        Whatever else it raises, a policy's errors: the file is back under its temporary name.
        """
        path = self.path(name)
        with self._publishing:
            try:
                replaced = self._allocated(path)
                if replaced:
                    replaced = self.index.size(name) or replaced
                try:
                    self.vfs.rename(temporary, path)
                except FileNotFoundError:
                    make_folder(self.vfs, os.path.dirname(path), durable=self._durable)
                    self.vfs.rename(temporary, path)
            except OSError as error:
                return reason_of(error)
            self.uses.stored(name)
            try:
                self.index.add(name, allocated)
            except BaseException:
                # Nothing would ever evict it: it has to go again.
                self.vfs.rename(path, temporary)
                self.ledger.give_back(replaced)
                raise
        if reserved - allocated + replaced:
            self.ledger.give_back(reserved - allocated + replaced)
        self._under_way(-reserved)
        return None

    def discard(self, name: Name, reason: str) -> bool:
        """Remove a chunk's file; False if that is impossible."""
        path = self.path(name)
        with self._publishing:
            try:
                self.unlink(path, self.index.size(name))
            except FileNotFoundError:
                pass  # someone else was faster, and has booked it
            except OSError as error:
                self.count("undeletable")
                self._undeletable.warning("disk: cannot remove %s: %s", path, error)
                return False
            self.left(name, reason)
        return True

    def unlink(self, path: str, booked: int | None = None) -> None:
        """Remove a file and give back what was booked for it; raises OSError if it stays.

        A file system may go on allocating after the write (extents, compression): what a file
        takes up when it goes is not what it was counted with.
        """
        allocated = self.vfs.lstat(path).st_blocks * 512 if booked is None else booked
        self._under_way(allocated)
        try:
            self.vfs.unlink(path)
            self.ledger.give_back(allocated)
        finally:
            self._under_way(-allocated)

    def left(self, name: Name, reason: str) -> None:
        """Note that a chunk is gone."""
        known = self.index.drop(name)
        self.uses.forget(name)
        self.count(reason)
        number, key = split_name(name)
        if known and number == 0 and reason not in _SILENT:
            self._removals.append(Removal(key, reason))

    def evict_one(self) -> bool:
        """Evict one chunk unless stores wait to do it themselves; say whether to go on."""
        if self._wanting:
            return False
        with self._evicting:
            return self._evict_to(self.ledger.resident_bytes - 1, wanted=False)

    @contextlib.contextmanager
    def _wanted_eviction(self) -> Iterator[None]:
        with self._lock:
            self._wanting += 1
        try:
            with self._evicting:
                yield
        finally:
            with self._lock:
                self._wanting -= 1

    def _evict_to(self, goal_bytes: int, *, wanted: bool = True) -> bool:
        """Evict until no more than this is allocated; False: not enough could leave.

        ``wanted``: a store waits for it, so a lack of victims is worth a look at the folders.
        """
        undeletable = 0
        while self.ledger.resident_bytes > goal_bytes:
            name = self._victim()
            if name is None:
                if wanted:
                    self.lacks_victims.set()
                return False
            # An undeletable one is out of the order until the next look at everything.
            undeletable += not self.discard(name, "evicted")
            if undeletable == _MAX_UNDELETABLE:
                return False
        return True

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
        self._damaged.warning("disk: %s failed verification: %s", path, reason)
        self.count(reason)
        # A file's name has 255 bytes at most.
        kept = f"{self.root}/{QUARANTINE}/{time.time_ns()}-{os.path.basename(path)[:200]}"
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
            trim(self.vfs, self.root, self.bounds, self.unlink)
        elif not self.discard(name, "corrupt"):
            self.index.hide([name])

    def _allocated(self, path: str) -> int:
        try:
            return self.vfs.lstat(path).st_blocks * 512
        except FileNotFoundError:
            return 0
