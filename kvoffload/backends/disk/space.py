"""Room under a root: reserved before the writes of a job, made by eviction."""

import contextlib
import errno
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvoffload.backends.disk.chunk_file import bytes_on_disk, reason_of
from kvoffload.backends.disk.chunk_forms import Draft
from kvoffload.backends.disk.index import Name
from kvoffload.backends.disk.root_checks import remedy_of
from kvoffload.backends.log_rate import LASTING_S, Throttle

if TYPE_CHECKING:
    from kvoffload.backends.disk.store import DiskStore

log = logging.getLogger(__name__)

_FULL = {
    f"io_{errno.errorcode[number]}": remedy_of(OSError(number, ""))
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
}
"""Reason why nothing can be written → the remedy."""
_FULL_PAUSE_S = 1.0
_ROOM_TRIES = 4
"""Another process may take the room that an eviction made."""
_MOST_CHUNKS, _MOST_BYTES, _MOST_SHARE = 8, 32 << 20, 16
"""One reservation has so many chunks and bytes at most, and this part of the capacity."""
_MOST_SMALL_BYTES = 4 << 20
"""Of small chunks one has so many bytes: evicted together, slots that follow one another are
overwritten by chunks that do. Else each generation would split the runs of the last one."""
_MAX_SPARED = 64
_MAX_UNDELETABLE = 64
"""One eviction gives up after so many failed removals."""
_HEADROOM_SHARE, _HEADROOM_CHUNKS = 8, 4
"""The background keeps an eighth of ``min_free`` more free, and room for a few chunks at least."""
_FREE_SHARE, _FREE_S = 64, 0.5
"""One round of the background evicts this part of the capacity at most, for so long. Some file
systems free space only seconds after a removal."""


Room = Draft | None
"""The reserved room of one chunk: the place of an evicted chunk to overwrite; None: a new one."""


class Space:
    """The room of one root, on behalf of one process. Thread-safe; never raises OSError."""

    def __init__(self, store: "DiskStore") -> None:
        """Make room for a store, which has its root and its index already."""
        self._store = store
        self._root = store.root
        self._index = store.index
        self.in_flight_bytes = 0
        """Of files being written or removed: folders and quota may differ by these."""
        self.largest_bytes = 0
        """The largest reservation of this process."""
        self.oldest_use_ns = time.time_ns()
        """When the last evicted chunk had been used."""
        self.lacks_victims = threading.Event()
        """Set when a store needs room and no known chunk can leave: a scan may find some, and the
        process that evicted may have ended."""
        self._tells_in_flight = False
        """Whether another process may correct the quota."""
        self._lock = threading.Lock()
        self._evicting = threading.Lock()
        self._waiting = 0
        """Stores that wait for an eviction."""
        self._paused_until = 0.0
        self._full = Throttle(log, LASTING_S)

    def reserve(self, chunk_bytes: int, most: int = 1) -> list[Room]:
        """Make room for a chunk, or for up to ``most``, and count it; empty: do not try.

        Above the high watermark a chunk gets the place of an evicted one.
        """
        allocated_bytes = bytes_on_disk(chunk_bytes)
        if allocated_bytes > self._root.limits.capacity_bytes:
            self._store.count("refused_size")
            return []
        if time.monotonic() < self._paused_until:
            self._store.count("refused_full")
            return []
        self.largest_bytes = max(self.largest_bytes, allocated_bytes)
        rooms: list[Room] = []
        for count in sorted({1, min(most, self._most_at_once(allocated_bytes))}, reverse=True):
            rooms = rooms or self._reserve(chunk_bytes, count)
        return rooms

    def _most_at_once(self, allocated_bytes: int) -> int:
        """Return for how many chunks to reserve at once.

        With a writer of 0.1 on the root it is one. If that one evicts, its full scan knows of a
        reservation only when its file exists.
        """
        if self._root.has_older_writers:
            return 1
        most_bytes = min(_MOST_BYTES, self._root.limits.capacity_bytes // _MOST_SHARE)
        most = max(_MOST_CHUNKS, _MOST_SMALL_BYTES // allocated_bytes)
        return max(1, min(most, most_bytes // allocated_bytes))

    def _reserve(self, chunk_bytes: int, count: int) -> list[Room]:
        """Reserve for all of these chunks, or for none."""
        allocated_bytes = bytes_on_disk(chunk_bytes)
        untold = self.add_in_flight(count * allocated_bytes)
        spares: list[Draft] = []
        granted = False
        try:
            if untold is not None:
                if count == 1:
                    self._refused(untold)
                return []
            if not self._has_free():
                if count == 1:
                    self._store.count("refused_min_free")
                return []
            if self._is_evictor():
                self._collect_spares(spares, chunk_bytes, count)
            wanted = (count - len(spares)) * allocated_bytes
            # Fairness: stores that wait for an eviction get the freed space first.
            granted = not self._waiting and self._fits(wanted, count)
            granted = granted or self._evict_for(wanted, count)
            if not granted and count == 1:
                self._refused(self._root.quota.failure)  # before a release changes that
        finally:
            if not granted:
                for spare in spares:
                    if spare.drop():
                        self._root.quota.release(allocated_bytes)
                self.add_in_flight(-count * allocated_bytes)
        if not granted:
            return []
        return [*spares, *[None] * (count - len(spares))]

    def _refused(self, failure: OSError | None) -> None:
        """Count a chunk without room; where the disk refuses, no capacity is to blame."""
        if failure is None:
            self._store.count("refused_capacity")
        else:
            self.write_failed(reason_of(failure))

    def _collect_spares(self, spares: list[Draft], chunk_bytes: int, count: int) -> None:
        """Evict what would exceed the high watermark; add places that chunks can overwrite."""
        quota, high_bytes = self._root.quota, self._root.limits.high_bytes
        allocated_bytes, undeletable = bytes_on_disk(chunk_bytes), 0

        def excess() -> int:
            return quota.resident_bytes + (count - len(spares)) * allocated_bytes - high_bytes

        if excess() <= 0:
            return
        with self._waiting_for_eviction():
            while len(spares) < count and excess() > 0 and undeletable < _MAX_UNDELETABLE:
                most = min(count - len(spares), -(-excess() // allocated_bytes))
                if not (names := self._victims(most, allocated_bytes)):
                    return
                taken = self._store.take_over(names, chunk_bytes)
                spares += taken.values()
                for name in names:
                    if name not in taken:
                        undeletable += not self._store.discard(name, "evicted")

    def _fits(self, allocated_bytes: int, chunks: int) -> bool:
        capacity_bytes = self._root.limits.capacity_bytes
        return self._root.quota.reserve(allocated_bytes, capacity_bytes, chunks)

    def _evict_for(self, allocated_bytes: int, chunks: int) -> bool:
        if not self._is_evictor():
            fits = self._fits(allocated_bytes, chunks)
            if not (fits or self._root.evictor.held):
                self.lacks_victims.set()
            return fits
        with self._waiting_for_eviction():
            for _ in range(_ROOM_TRIES):
                self._evict_to(self._root.limits.capacity_bytes - allocated_bytes)
                if self._fits(allocated_bytes, chunks):
                    return True
        return False

    def cancel(self, allocated_bytes: int, draft: Draft | None) -> None:
        """Free the place of a chunk that was not stored, and release its reservation."""
        if draft is None or draft.drop():
            self._root.quota.release(allocated_bytes)
        self.add_in_flight(-allocated_bytes)

    def commit(self, reserved: int, allocated: int, replaced: int) -> None:
        """Turn a reservation into a file of ``allocated`` bytes that replaced ``replaced``."""
        if surplus := reserved - allocated + replaced:
            self._root.quota.release(surplus)
        self.add_in_flight(-reserved)

    def write_failed(self, reason: str) -> None:
        """Count a failed write, and say why; pause writes for a while if the disk is full."""
        self._store.count(f"write_{reason}")
        if remedy := _FULL.get(reason):
            self._paused_until = time.monotonic() + _FULL_PAUSE_S
            self._full.warning("disk %s: writing paused, %s; %s", self._root.path, reason, remedy)
        elif reason != "missing":  # the root's folders are made again
            self._store.say("write to", self._root.path, reason)

    def removal_failed(self, reason: str) -> None:
        """Pause writes where nothing can leave for them, as on a read-only file system."""
        if reason == "io_EROFS" and time.monotonic() >= self._paused_until:
            self.write_failed(reason)

    def add_in_flight(self, allocated_bytes: int) -> OSError | None:
        """Count bytes of chunks that a write or removal is moving: a scan may not see them right.

        It begins before quota or folder change, and ends after both have. Returns why another
        process that corrects the quota could not be told.
        """
        with self._lock:
            self.in_flight_bytes += allocated_bytes
            return self._tell_in_flight()

    def end_evicting(self) -> None:
        """Give up the right to evict, and with it the one to correct the quota."""
        with self._lock:
            self._tells_in_flight = True
            self._tell_in_flight()
        self._root.evictor.end()

    def _tell_in_flight(self) -> OSError | None:
        if self._tells_in_flight or not self._root.evictor.held:
            try:
                self._root.writer.tell_in_flight(self.in_flight_bytes)
            except OSError as error:
                return error
        return None

    def _is_evictor(self) -> bool:
        # Before, the index is not complete enough to choose victims from.
        return self._root.evictor.held and self._store.ready.is_set()

    def _short_bytes(self) -> int:
        """Return what the file system lacks for its minimum and all writes; raises OSError."""
        space = self._root.vfs.statvfs(self._root.path)
        needed = self._root.limits.min_free_bytes + self.in_flight_bytes
        return needed - space.f_bavail * space.f_frsize

    def _has_free(self) -> bool:
        """Return whether the minimum stays free after the writes in flight; evict if need be."""
        try:
            if self._short_bytes() <= 0:
                return True
            if not self._is_evictor():
                return False
            with self._waiting_for_eviction():
                for _ in range(_ROOM_TRIES):
                    # Measured again: another store may have evicted for this one as well.
                    short = self._short_bytes()
                    if short <= 0:
                        return True
                    self._evict_to(self._root.quota.resident_bytes - short)
            return self._short_bytes() <= 0
        except OSError:
            return False

    def keep_free(self, is_stopping: Callable[[], bool]) -> None:
        """Evict a bounded part of what the minimum and some headroom lack.

        Writers that cannot evict need it, and so do other programs that fill the file system.
        """
        if not self._is_evictor():
            return
        limits, quota = self._root.limits, self._root.quota
        most_bytes = limits.capacity_bytes // _FREE_SHARE
        mean_bytes = quota.resident_bytes // max(1, len(self._index))
        # A damaged quota may count far too much.
        headroom = min(_HEADROOM_CHUNKS * mean_bytes, most_bytes)
        headroom = max(headroom, limits.min_free_bytes // _HEADROOM_SHARE)
        try:
            short = self._short_bytes() + headroom
        except OSError:
            return  # the next round tries again
        if short <= 0:
            return
        goal_bytes = quota.resident_bytes - min(short, most_bytes)
        ends_at = time.monotonic() + _FREE_S
        while quota.resident_bytes > goal_bytes and time.monotonic() < ends_at:
            if is_stopping() or not self.evict_one():
                return

    def evict_one(self) -> bool:
        """Evict one chunk unless stores wait to evict themselves; return whether to continue."""
        if self._waiting:
            return False
        with self._evicting:
            return self._evict_to(self._root.quota.resident_bytes - 1, is_wanted=False)

    @contextlib.contextmanager
    def _waiting_for_eviction(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            with self._evicting:
                yield
        finally:
            with self._lock:
                self._waiting -= 1

    def _evict_to(self, goal_bytes: int, *, is_wanted: bool = True) -> bool:
        """Evict down to so many allocated bytes; return False if too little could leave.

        ``is_wanted``: a store waits, so a lack of victims justifies a scan.
        """
        undeletable = 0
        while self._root.quota.resident_bytes > goal_bytes:
            name = self._victim()
            if name is None:
                if is_wanted:
                    self.lacks_victims.set()
                return False
            # An undeletable chunk stays out of the order until the next full scan.
            undeletable += not self._store.discard(name, "evicted")
            if undeletable == _MAX_UNDELETABLE:
                return False
        return True

    def _victims(self, most: int, allocated_bytes: int) -> list[Name]:
        """Return the next chunks to evict; one of another size is the last.

        With shares of tenants it is one, as the next victim depends on what is dropped.
        """
        names, most = list[Name](), 1 if self._index.has_shares else most
        try:
            while len(names) < most and (name := self._victim()) is not None:
                names.append(name)
                if self._index.size(name) != allocated_bytes:
                    break
        except BaseException:
            for name in names:
                self._index.put_back(name)
            raise
        return names

    def _victim(self) -> Name | None:
        """Return the next chunk to evict; spare those that other processes used lately.

        This process's order knows of no use by another process, but access times do. A chunk used
        in the younger half of the stored past gets a second chance.
        """
        for spared in range(_MAX_SPARED + 1):
            taken = self._index.victims(1)
            if not taken:
                return None
            name = taken[0]
            if not self._root.other_writers:
                return name
            try:
                used_ns = self._store.used_ns(name)
            except OSError:
                return name
            if spared == _MAX_SPARED or used_ns <= (self.oldest_use_ns + time.time_ns()) // 2:
                self.oldest_use_ns = max(self.oldest_use_ns, used_ns)
                return name
            self._index.put_back(name)
        return None


class Reservation:
    """Room for the stores of one job, reserved as they begin and handed out chunk by chunk.

    Thread-safe; never raises OSError. A reservation takes five system calls: two locks, a read and
    a write of the quota file, and the free space. One serves several chunks.
    """

    def __init__(self, space: Space, chunk_bytes: Iterable[int]) -> None:
        """Prepare; ``chunk_bytes``: the length of each chunk that the job will probably store."""
        self._space = space
        self._expected = Counter(chunk_bytes)
        self._rooms: defaultdict[int, list[Room]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, chunk_bytes: int, count: int) -> list[Room]:
        """Return room for up to so many chunks of this length, of one reservation.

        Another one, before these chunks are stored, would evict without counting them.
        """
        with self._lock:
            rooms = self._rooms[chunk_bytes]
            if not rooms:
                rooms += self._space.reserve(chunk_bytes, max(1, self._expected[chunk_bytes]))
                self._expected[chunk_bytes] -= len(rooms)
            # Places to overwrite come first: it costs less to give new room back.
            taken, rooms[:count] = rooms[:count], []
            return taken

    def give_back(self, chunk_bytes: int, rooms: Iterable[Room]) -> None:
        """Take back rooms that no store used, for those that follow."""
        with self._lock:
            self._rooms[chunk_bytes][:0] = rooms

    @property
    def is_used_up(self) -> bool:
        """Whether stores used all that was reserved."""
        return not any(self._rooms.values())

    def close(self) -> None:
        """Release what no store used. No store may follow."""
        for chunk_bytes, rooms in self._rooms.items():
            while rooms:
                self._space.cancel(bytes_on_disk(chunk_bytes), rooms.pop())
