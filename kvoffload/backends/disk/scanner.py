"""Scans the folders: keeps index and quota in agreement with the files, and purges namespaces."""

import contextlib
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import TypeVar

from kvoffload.backends.disk import snapshot
from kvoffload.backends.disk.index import Name, name_of, split_name
from kvoffload.backends.disk.locks import bytes_in_flight
from kvoffload.backends.disk.paths import SHARDS, SNAPSHOT, is_namespace, shard_of
from kvoffload.backends.disk.root import ABANDONED_S
from kvoffload.backends.disk.root_checks import remedy_of
from kvoffload.backends.disk.segments import Found
from kvoffload.backends.disk.store import DiskStore
from kvoffload.backends.disk.walker import remove_namespace, walk

log = logging.getLogger(__name__)
T = TypeVar("T")

_RESERVED = 16
"""Chunks that a writer may have reserved at a time; more than its usual threads."""
_CLOCK_STEP_NS = 1_000_000_000
"""More than any file system's resolution of modification times."""
_PURGE_STEP = 64
_PURGE_PAUSE_S = 0.001
"""Sleep after each step, so that a purge neither starves I/O nor holds the GIL."""


class Scanner:
    """Compares a store's index with the folders. Used by the housekeeping thread."""

    def __init__(self, store: DiskStore, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._is_stopping = is_stopping
        self._mtimes: dict[str, dict[str, int]] = {}
        """By namespace folder and shard, to skip unchanged shards."""
        self.vanished = 0
        """How many known chunks the last scan found gone."""
        self._is_complete = True
        """Whether the current scan could list everything so far."""
        self._is_cut_off = False
        """Whether the store was closed while its snapshot was loaded."""
        self._are_slots_in_order = False
        """Whether the index was just filled with slots, in the order of their last uses."""

    def load_snapshot(self) -> None:
        """Fill the index from snapshot and tables, until the first scan."""
        store = self._store
        if store.root.evictor.held:
            self._follow_all()
        sizes = snapshot.load(store.vfs, f"{store.folder(0)}/{SNAPSHOT}")
        listed = ((name_of(0, key), allocated) for key, allocated in sizes)
        store.index.found(self._until_stopped(listed))
        self._refresh_slots()
        self._are_slots_in_order = True
        self._is_cut_off = self._is_stopping()

    def save_snapshot(self) -> None:
        """Save this process's namespace for the next start, unless the last snapshot has more."""
        store = self._store
        if self._is_cut_off:
            return
        own = name_of(0, b"")
        sizes = [
            (name[2:], size)
            for name, size in store.index.sizes()
            if name.startswith(own) and name not in store.segments
        ]
        try:
            temporary = store.root.temporary(counted=False)
            snapshot.save(store.vfs, f"{store.folder(0)}/{SNAPSHOT}", temporary, sizes)
        except OSError as error:
            store.count("snapshot_failed")
            log.warning("disk %s: no snapshot: %s", store.path, error)

    def scan(self, *, full: bool, by_age: bool = False) -> bool:
        """Compare the index with the folders; return False if the quota needs another full scan.

        Args:
            full: measure every file, not only those in changed shards. The evicting process then
                corrects the quota, exactly unless other processes write at the same time.
            by_age: the index has no order yet; take the access times of the files for it.
        """
        self._store.index.begin_scan()
        try:
            return self._scan(full=full, by_age=by_age)
        finally:
            self._store.index.end_scan()

    def _scan(self, *, full: bool, by_age: bool) -> bool:
        store, index, quota = self._store, self._store.index, self._store.root.quota
        self._is_complete = True
        self.vanished = 0
        is_evictor = store.root.evictor.held
        if is_evictor:
            self._follow_all()
        # Before all else: what begins later changes the quota, or still moves at the end.
        begun = None if (figure := quota.refresh()) is None else (figure, quota.changes)
        moving_bytes = self._in_flight_bytes() if full else 0
        self._refresh_slots()
        store.segments.clean_up()
        moving_bytes += self._slot_bytes_in_flight() if full else 0
        found: list[Found] = []
        scanned: set[tuple[int, str]] = set()
        present: set[Name] = set()
        for number in range(len(store.namespaces)):
            shards, files = self._list(number, full=full)
            scanned.update((number, shard) for shard in shards)
            present.update(name for _, name, _ in files)
            found += files if full else [file for file in files if file[1] not in index]
        if self._is_stopping():
            return False
        files = found[:]
        if full and self._must_list_slots(len(files), by_age=by_age):
            found += self._until_stopped(store.segments.listing())
        found.sort(key=itemgetter(0))
        store.uses.seen((name, used_ns) for used_ns, name, _ in self._until_stopped(found))
        sizes = ((name, size) for _, name, size in self._until_stopped(found))
        index.found(sizes, again=by_age, measure=full and not by_age)
        self._drop_vanished(None if full else scanned, present)
        if self._is_stopping():
            return False
        self._are_slots_in_order = False
        if not (full and is_evictor):
            return True
        counted_from = quota.changes if quota.refresh() is not None else None
        held = store.segments.held()
        oldest = [each.oldest_ns for each in held] + [used_ns for used_ns, _, _ in found[:1]]
        store.space.oldest_use_ns = min(oldest, default=time.time_ns())
        in_use = {name[:2] for name in present}.union(name_of(each.number, b"") for each in held)
        self._remove_abandoned(in_use)
        chunk_bytes = sum(size for _, name, size in files if not index.was_dropped(name))
        chunk_bytes += sum(each.chunks * each.slot_bytes for each in held)
        # The scan may have found nothing while a chunk was being stored.
        largest = max((size for _, _, size in files), default=store.space.largest_bytes)
        largest = max(largest, store.space.largest_bytes, *(each.slot_bytes for each in held))
        return self._correct_quota(chunk_bytes, moving_bytes, begun, counted_from, largest)

    def _must_list_slots(self, num_files: int, *, by_age: bool) -> bool:
        """Return whether the index may lack chunks in slots, or have another order of them."""
        index = self._store.index
        is_in_order = not by_age or (self._are_slots_in_order and not num_files)
        # Two processes may have stored a chunk: when the one leaves, the other stays.
        return not (is_in_order and index.is_whole and len(index) >= num_files + self._num_slots())

    def _num_slots(self) -> int:
        return sum(each.chunks for each in self._store.segments.held())

    def _until_stopped(self, files: Iterable[T]) -> Iterator[T]:
        """Yield these until the thread is to stop: a million of them take seconds."""
        return takewhile(lambda _: not self._is_stopping(), files)

    def _list(self, number: int, *, full: bool) -> tuple[set[str], list[Found]]:
        """Return a namespace's listed shards, and last use, name and size of the chunks in them.

        Skips unchanged shards unless ``full``. A shard that is missing, or no folder, counts as
        empty: the next use of one that is no folder removes it.
        """
        vfs, folder, prefix = self._store.vfs, self._store.folder(number), name_of(number, b"")
        if not self._exists(folder):
            return set(self._mtimes.pop(folder, ())), []
        mtimes = self._mtimes.setdefault(folder, {})
        skipped = set()

        def is_due(shard: str) -> bool:
            if self._is_stopping():
                skipped.add(shard)
                return False
            known = mtimes.pop(shard, None)
            facts = vfs.lstat(f"{folder}/{shard}")
            if not stat.S_ISDIR(facts.st_mode):
                return False
            # Within one step of the clock a folder may change again and keep its time.
            is_old = time.time_ns() - facts.st_mtime_ns > _CLOCK_STEP_NS
            mtimes[shard] = facts.st_mtime_ns if is_old else -1
            if known == facts.st_mtime_ns and not full:
                skipped.add(shard)
            return shard not in skipped

        def failed(shard: str, error: OSError) -> None:
            mtimes.pop(shard, None)
            skipped.add(shard)
            self._missed(f"{folder}/{shard}", error)

        files = [
            (facts.st_atime_ns, prefix + key, facts.st_blocks * 512)
            for shard in walk(vfs, folder, failed, is_due)
            for key, facts in shard.chunks
            if shard_of(key) == shard.name
        ]
        return set(SHARDS) - skipped, files

    def _refresh_slots(self) -> None:
        """Let store and index learn which chunks appeared in slots, and which left."""
        with self._looking():
            self._store.segments.refresh(*range(len(self._store.namespaces)))

    def _exists(self, folder: str) -> bool:
        """Return whether a namespace still has a folder: a removed one keeps its number."""
        try:
            return stat.S_ISDIR(self._store.vfs.lstat(folder).st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _drop_vanished(self, scanned: set[tuple[int, str]] | None, present: set[Name]) -> None:
        """Drop names whose file is gone, in these shards (None: in all)."""
        store = self._store
        if scanned is None and len(store.index) == len(present) + self._num_slots():
            return
        known = store.index.sizes() if scanned is None or scanned else ()
        for name, _ in self._until_stopped(known):
            if name in present or name in store.segments:
                continue
            number, key = split_name(name)
            if scanned is not None and (number, shard_of(key)) not in scanned:
                continue
            self.vanished += store.drop_if_gone(name)

    def _remove_abandoned(self, in_use: set[bytes]) -> None:
        """Remove namespace folders that are empty and that no live process touched for long.

        ``in_use``: how the names of all chunks begin.
        """
        store = self._store
        for number in range(1, len(store.namespaces)):
            with contextlib.suppress(OSError):
                age_s = time.time() - store.vfs.lstat(store.folder(number)).st_mtime
                if name_of(number, b"") not in in_use and age_s > ABANDONED_S:
                    remove_namespace(store.vfs, store.folder(number))

    def _correct_quota(
        self,
        chunk_bytes: int,
        moving_bytes: int,
        begun: tuple[int, int] | None,
        counted_from: int | None,
        largest: int,
    ) -> bool:
        """Correct the quota: exactly if nothing moved during the scan, else within limits.

        ``begun`` are figure and changes of the quota when the scan began. ``counted_from`` are its
        changes when the scan began to count the chunks that did not leave. A change is one chunk:
        so many may have left since they were counted, or are unseen. So is what writers have
        reserved without beginning to write. An unseen chunk may be larger than all that were seen:
        the figure of the beginning has none that came since.
        """
        quota, total = self._store.root.quota, chunk_bytes
        with self._looking("quarantine"):
            total += self._store.quarantine.allocated_bytes()
        is_quiet = self._is_complete and not moving_bytes
        if is_quiet and begun is not None and quota.correct(total, begun[1], self._is_quiet):
            return True
        resident = quota.refresh()
        if resident is None and self._is_complete:
            quota.mend(total + moving_bytes)
        elif resident is not None and begun is not None and counted_from is not None:
            left = quota.changes - counted_from
            if (lack := total - resident - left * largest) > 0:
                quota.release(-lack)
            writers = self._store.root.other_writers + 1
            unseen = quota.changes - begun[1] + _RESERVED * writers
            excess = min(begun[0], resident) - total - moving_bytes - unseen * largest
            if excess > 0 and self._is_complete and largest:
                quota.release(excess)
        return False

    def _is_quiet(self) -> bool:
        return not self._in_flight_bytes() + self._slot_bytes_in_flight() and self._is_complete

    def _in_flight_bytes(self) -> int:
        """Return the bytes of chunks that this and other processes are storing or removing."""
        root, total = self._store.root, self._store.space.in_flight_bytes
        with self._looking("writers"):
            total += bytes_in_flight(root.vfs, root.path, root.writer.token)
        return total

    def _slot_bytes_in_flight(self) -> int:
        """Return the bytes of slots that are neither free nor a chunk's."""
        total = 0
        with self._looking():
            total = self._store.segments.moving_bytes()
        return total

    def _follow_all(self) -> None:
        """Number all namespaces: the evicting process evicts in each of them."""
        store = self._store
        with self._looking(store.path):
            store.follow(filter(is_namespace, store.vfs.listdir(store.path)))

    @contextlib.contextmanager
    def _looking(self, where: str = "") -> Iterator[None]:
        """Note what a look of the scan could not see, and go on."""
        try:
            yield
        except OSError as error:
            self._missed(where or error.filename or self._store.path, error)

    def _missed(self, where: str, error: OSError) -> None:
        """Note that the scan may not have seen everything."""
        if not isinstance(error, FileNotFoundError):
            self._is_complete = False
            self._store.count("look_failed")
            self._store.say("scan", where, str(error.strerror), f"; {remedy_of(error)}")


def purge(store: DiskStore, namespaces: Sequence[str], is_stopping: threading.Event) -> int:
    """Remove all chunks of these namespace folders; return how many were removed.

    Then remove the folders, but for the store's own.

    Releases the bytes of each file at once, so that a concurrent scan counts right. A folder in
    which an engine keeps storing stays with its new chunks.
    """
    removed = 0
    store.follow(namespaces)
    for namespace in filter(store.namespaces.__contains__, namespaces):
        number = store.namespaces.index(namespace)
        # All are listed first: what an engine stores from then on stays.
        walked = walk(store.vfs, store.folder(number))
        names = [name_of(number, key) for each in walked for key, _ in each.chunks]
        with contextlib.suppress(OSError):
            store.segments.refresh(number)
        for name in (*names, *store.segments.names(number)):
            if is_stopping.is_set():
                return removed
            removed += store.discard(name, "purged")
            if removed % _PURGE_STEP == 0:
                is_stopping.wait(_PURGE_PAUSE_S)
        if number:  # the own folder is in use
            store.segments.clean_up()
            remove_namespace(store.vfs, store.folder(number))
    return removed
