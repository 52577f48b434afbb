"""The chunks of one root on behalf of one process: stored, loaded, removed, evicted, counted.

The backend's worker threads and its housekeeping thread call these methods. A method counts what it
cannot do, and answers False; it raises no OSError. Other errors, as a lack of memory, leave the
accounting right.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvoffload.backends.base import ReadResult, WriteResult, Written
from kvoffload.backends.counted import Counts
from kvoffload.backends.disk import expiry
from kvoffload.backends.disk.cache_room import CacheRoom
from kvoffload.backends.disk.chunk_file import (
    MOST_IN_RUN,
    PAGE,
    ChunkFiles,
    bytes_on_disk,
    choose_io,
    probe_holes,
    reason_of,
)
from kvoffload.backends.disk.chunk_forms import Draft, Form
from kvoffload.backends.disk.files import Files, Seen
from kvoffload.backends.disk.index import Index, Name, name_of, split_name
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.quarantine import Quarantine
from kvoffload.backends.disk.root import RootHandle
from kvoffload.backends.disk.root_checks import remedy_of, unusable
from kvoffload.backends.disk.segments import Segments
from kvoffload.backends.disk.slots import MOST_RUN_BYTES, SlotDraft, Slots, runs_of
from kvoffload.backends.disk.space import Reservation, Room, Space
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import (
    NOT_DAMAGED,
    OTHER_KEY,
    OTHER_VERSION,
    is_key,
    namespace_digest,
)
from kvoffload.backends.log_rate import LASTING_S, Throttle
from kvoffload.policies.tenant_order import TenantShares
from kvoffload.registry import load_policy

log = logging.getLogger(__name__)

_LARGE_BYTES, _LARGE_WRITES = 1 << 20, 2
"""By default so many chunks above this length are written at once: more delay loads."""
_REMEDIES = {
    OTHER_VERSION: "; engines of two versions use the root: upgrade all",
    OTHER_KEY: "; this engine lacks its key: give all engines of the root the same keys",
    "io_EIO": "; see whether the device is well",
    **{
        f"io_{errno.errorcode[number]}": f"; {remedy_of(OSError(number, ''))}"
        for number in (errno.EMFILE, errno.EFBIG, errno.ENOMEM)
    },
}
"""Reason why a chunk cannot be read or written → the remedy, where there is one."""
_MAX_NAMESPACES = 1 << 16
"""A name has two bytes for the number."""


class DiskStore(Counts):
    """One root, open for one namespace. Thread-safe."""

    def __init__(self, vfs: Vfs, options: DiskOptions, namespace: str) -> None:
        """Open the root, made if missing; ConfigError: a bad setting, or an unsafe root."""
        super().__init__()
        self.vfs = vfs
        self.path = os.path.abspath(os.path.expanduser(options.root))
        self.namespace = namespace
        digest = namespace_digest(namespace)
        self.namespaces = [digest.hex()]
        """Folder names by number; 0 is this backend's own."""
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._large_writes = threading.BoundedSemaphore(options.write_threads or _LARGE_WRITES)
        self._damaged = Throttle(log)
        self._lasting = Throttle(log, LASTING_S)
        self._durable = options.durability == "fsync"
        make_policy = load_policy(options.policy)
        try:
            self.root = RootHandle(vfs, self.path, self.namespaces[0], options, self.count)
        except OSError as error:
            raise unusable(vfs, self.path, error) from error
        try:
            scratch = self.root.temporary(counted=False)
            self.io_mode, self.io_reason = choose_io(vfs, self.path, scratch, options.io)
        except BaseException:
            self.root.close()
            raise
        self.room = CacheRoom(self.path) if self.io_mode == "auto" else None
        direct = self.io_mode != "buffered"
        chunks = ChunkFiles(vfs, digest, direct=direct, room=self.room, durable=self._durable)
        temporary = self.root.temporary
        self.files = Files(chunks, self.folder, temporary, self.count)
        self.segments = Segments(self, durable=self._durable)
        uncounted = partial(temporary, counted=False)
        self.slots = Slots(chunks, self.segments, uncounted)
        self.why_no_slots = probe_holes(vfs, scratch)
        """Why the file system cannot have chunks in slots; None: it can."""
        if self.why_no_slots is not None:
            text = "disk %s: parts of a file cannot be freed (%s): small chunks are files"
            log.info(text, self.path, self.why_no_slots)
        tenants = TenantShares(options.tenant_share) if options.tenant_share < 1 else None
        capacity_bytes = self.root.limits.capacity_bytes
        self.index = Index(make_policy, capacity_bytes, tenants)
        self.uses = expiry.UseTimes(self.root.limits.ttl_s, self.index.note)
        self.space = Space(self)
        self.quarantine = Quarantine(self.root)
        self.ready = threading.Event()
        """Set once the index knows everything that was on disk at the start."""
        # Of a root that was emptied, the quota may count what it had, until a scan corrects it.
        if self.root.evictor.held and self.root.fresh and not self.root.quota.resident_bytes:
            self.ready.set()

    def close(self) -> None:
        """Close the root; no other call may follow."""
        self.segments.close()
        self.root.close()

    # ---- names -----------------------------------------------------------------------------

    def folder(self, number: int) -> str:
        return f"{self.path}/{self.namespaces[number]}"

    def follow(self, namespaces: Iterable[str]) -> None:
        """Give these namespace folders numbers."""
        with self._lock:
            for namespace in namespaces:
                if namespace not in self.namespaces and len(self.namespaces) < _MAX_NAMESPACES:
                    self.namespaces.append(namespace)

    def used_ns(self, name: Name) -> int:
        """Return when any process used a chunk last; raises OSError."""
        return self._form_of(name).used_ns(name)

    def _form_of(self, name: Name) -> Form:
        return self.slots if name in self.segments else self.files

    def _form_for(self, key: bytes, chunk_bytes: int) -> Form:
        """Return the form in which to store a chunk."""
        has_slots = self.why_no_slots is None and not self.root.has_older_writers
        return self.slots if has_slots and self.slots.suits(key, chunk_bytes) else self.files

    def appeared(self, found: list[tuple[int, Name, int]]) -> None:
        """Note last use, name and size of chunks that another process stored."""
        self.uses.seen((name, used_ns) for used_ns, name, _ in found)
        self.index.found(((name, size) for _, name, size in found), again=False)

    def vanished(self, names: Iterable[Name]) -> None:
        """Note that other processes removed chunks."""
        for name in names:
            self.note_removed(name, "vanished")

    # ---- one chunk: load and store ---------------------------------------------------------

    def load(self, key: bytes, target: memoryview) -> ReadResult:
        if not is_key(key):
            return ReadResult.MISSING
        name = name_of(0, key)
        if self.uses.expires and not self.is_fresh(name):
            return self._missed(name, "missing", None)
        reason, seen = self._form_of(name).read(name, key, target)
        if reason == "missing" and self.segments.look_again(name):
            reason, seen = self.slots.read(name, key, target)
        if reason is not None and reason.startswith("corrupt"):
            # A store may have overwritten the place of an evicted chunk under this load.
            reason, seen = self._form_of(name).read(name, key, target)
        return ReadResult.HIT if reason is None else self._missed(name, reason, seen)

    def load_run(
        self, names: Sequence[Name], keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> list[bool | ReadResult]:
        """Load chunks of this namespace as :meth:`Slots.runs` returned them."""
        are_read = len(keys) > 1 and not self.uses.expires
        sound = self.slots.read_run(names, keys, targets) if are_read else [False] * len(keys)
        if all(sound):
            return [True] * len(keys)
        tried = zip(keys, targets, sound, strict=True)
        return [fine or self.load(key, target) for key, target, fine in tried]

    def _missed(self, name: Name, reason: str, seen: Seen | None) -> ReadResult:
        """Count a failed load; drop or quarantine the chunk."""
        if reason == "missing":
            self.count("read_missing")
            if seen is not None:  # a slot without bytes, as after a power loss
                if not self.discard(name, "vanished", seen):
                    self.index.hide([name])
            elif name in self.index and name not in self.segments and self.uses.is_fresh(name):
                self.note_removed(name, "vanished")
        elif reason.startswith("corrupt"):
            if not self._move_to_quarantine(name, seen, reason):
                return self._missed(name, "missing", None)
        else:
            self.count(f"read_{reason}")
            self.say("read", self._where(name), reason)
            if reason in NOT_DAMAGED:
                self._pass_over(name, seen)
        return ReadResult.of(reason)

    def say(self, verb: str, path: str, why: str, remedy: str = "") -> None:
        """Log a failure that may last: one reason does not hide another one's remedy."""
        remedy = remedy or _REMEDIES.get(why, "")
        text = "disk: cannot %s %s: %s%s"
        self._lasting.warning(text, verb, path, why, remedy, kind=(verb, why))

    def _where(self, name: Name) -> str:
        """Return where an operator finds a chunk."""
        with contextlib.suppress(FileNotFoundError):
            return self.slots.path_of(name)
        return self.files.path_of(name)

    def _pass_over(self, name: Name, seen: Seen | None) -> None:
        """Hide a chunk of another version or key until a store replaces it; it can be evicted."""
        with self._publishing:
            form = self._form_of(name)
            with contextlib.suppress(OSError):
                if seen is None or not form.is_still(name, seen):
                    return  # a newer one replaced it meanwhile
                if self.index.size(name) is None:
                    self.index.found([(name, form.allocated_bytes(name))])
                self.index.hide([name])

    def store(
        self,
        key: bytes,
        chunk: memoryview,
        reservation: Reservation | None = None,
        tenant: bytes = b"",
    ) -> Written:
        """Store a chunk, in room of ``reservation`` if it is one of a job."""
        name, repairs = name_of(0, key), self.root.repairs
        if name in self.index and self.exists(key):
            if self.uses.expires:
                self.uses.used([name])
            with contextlib.suppress(FileNotFoundError):  # it has left: store it again
                return self._make_durable(name, is_new=False) and WriteResult.PRESENT
        rooms = (reservation or Reservation(self.space, ())).take(chunk.nbytes, 1)
        return bool(rooms) and self._store_in(rooms[0], key, chunk, tenant, repairs)

    def _store_in(
        self, draft: Room, key: bytes, chunk: memoryview, tenant: bytes, repairs: int
    ) -> Written:
        """Store a chunk in its room; ``repairs``: of the root, before the room was reserved."""
        reserved, name = bytes_on_disk(chunk.nbytes), name_of(0, key)
        try:
            form = self._form_for(key, chunk.nbytes)
            if draft is not None and draft.form is not form:
                spare, draft = draft, None
                if not spare.drop():
                    self.root.quota.release(-reserved)  # both places are taken for now
            draft = draft or form.drafts(chunk.nbytes, 1)[0]
            with self._large_writes if chunk.nbytes > _LARGE_BYTES else contextlib.nullcontext():
                reason, allocated = draft.write(key, chunk, tenant)
            if reason is None:
                # Some file systems (ZFS) allocate later, and report 512 bytes until then.
                self._publish([name], [draft], reserved, max(reserved, allocated))
        except OSError as error:  # no place, or the chunk cannot be published
            reason = reason_of(error)
        except BaseException:
            self.space.cancel(reserved, draft)
            raise
        if reason is not None:
            self.space.cancel(reserved, draft)
            self.space.write_failed(reason)
            if reason == "missing" and (self.root.repair() or self.root.repairs != repairs):
                # Its folder was removed, and exists again.
                return self.store(key, chunk, None, tenant)
            return False
        return self._make_durable(name, is_new=True)

    def store_runs(self, chunks: Sequence[memoryview]) -> list[range]:
        """Return chunks in parts for :meth:`store_run`."""
        most = 1 if self._durable or self.why_no_slots is not None else MOST_IN_RUN
        runs, start = list[range](), 0
        for i in range(1, len(chunks) + 1):
            is_last = i == len(chunks) or chunks[i].nbytes != chunks[start].nbytes
            nbytes = chunks[start].nbytes
            if is_last or i - start >= min(most, max(1, MOST_RUN_BYTES // max(1, nbytes))):
                runs.append(range(start, i))
                start = i
        return runs

    def store_run(
        self,
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        reservation: Reservation,
        tenants: Sequence[bytes],
    ) -> list[Written]:
        """Store a part of :meth:`store_runs`: those that can be in slots by one call each step."""
        stored = list[Written]()
        while (done := len(stored)) < len(keys) - 1:
            rest = keys[done:], chunks[done:], reservation, tenants[done:]
            if not (answers := self._store_in_slots(*rest)):
                break
            stored += answers
        left = range(len(stored), len(keys))
        return [*stored, *(self.store(keys[i], chunks[i], reservation, tenants[i]) for i in left)]

    def _store_in_slots(
        self,
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        reservation: Reservation,
        tenants: Sequence[bytes],
    ) -> list[Written]:
        """Store the first of new chunks of one length; return the answers of those begun."""
        size, names, slots = chunks[0].nbytes, [name_of(0, key) for key in keys], self.slots
        # All that a store can meet is met chunk by chunk; here is what it mostly meets.
        are_new = len({*names}) == len(names) and self._are_new(names)
        if size % PAGE or not are_new or any(self._form_for(k, size) is not slots for k in keys):
            return []
        repairs, rooms = self.root.repairs, reservation.take(size, len(keys))
        reserved = bytes_on_disk(size)
        if not rooms:
            return [False]  # it is counted
        answers, num_begun = list[Written](), 0
        try:
            if not (drafts := self._slots_for(rooms, size)):
                return []
            rooms = [*drafts]
            for run in runs_of(drafts):
                part = slice(run.start, run.stop)
                at = drafts[run.start].at
                if slots.write(at, keys[part], chunks[part], tenants[part]) is None:
                    with contextlib.suppress(OSError):
                        self._publish(names[part], drafts[part], reserved, reserved)
                        answers += [True] * len(run)
                        num_begun = run.stop
                        continue
                for i in run:
                    num_begun, key = i + 1, keys[i]
                    answers.append(self._store_in(rooms[i], key, chunks[i], tenants[i], repairs))
        finally:
            reservation.give_back(size, rooms[num_begun:])
        return answers

    def _slots_for(self, rooms: Sequence[Room], chunk_bytes: int) -> list[SlotDraft]:
        """Return the slots of rooms, new ones included, in order; empty: not each can have one."""
        drafts = [room for room in rooms if isinstance(room, SlotDraft)]
        num_new = rooms.count(None)
        if len(drafts) + num_new < len(rooms):
            return []  # there is a place of another form
        if num_new:
            try:
                drafts += self.slots.drafts(chunk_bytes, num_new)
            except OSError:
                return []
        return sorted(drafts, key=lambda draft: draft.at.place)

    def _are_new(self, names: Sequence[Name]) -> bool:
        size, segments = self.index.size, self.segments
        return not any(size(name) is not None or name in segments for name in names)

    def _publish(
        self, names: Sequence[Name], drafts: Sequence[Draft], reserved: int, allocated: int
    ) -> None:
        """Let readers see complete chunks: one, or new ones in slots that follow one another.

        If it raises, as without memory, the chunks are drafts again.

        Raises:
            OSError: it cannot be done, or one of several chunks is no new one.
        """
        with self._publishing:
            if len(names) > 1 and not self._are_new(names):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            size, form = self.index.size(names[0]), self._form_of(names[0])
            replaced = drafts[0].publish(*names)
            if form is not drafts[0].form and size is not None:
                with contextlib.suppress(FileNotFoundError):
                    there = form.allocated_bytes(names[0])
                    form.remove(names[0])
                    replaced += there
            elif replaced:
                replaced = size or replaced
            try:
                now_ns = expiry.now_ns()
                self.uses.seen((name, now_ns) for name in names)
                self.index.add(names, allocated)
            except BaseException:
                # Outside the order they could never be evicted: take them back.
                for name, draft in zip(names, drafts, strict=True):
                    with contextlib.suppress(OSError):  # its place is freed all the same
                        draft.retract(name)
                    self.index.drop(name)
                self.root.quota.release(replaced)
                raise
        self.space.commit(len(names) * reserved, len(names) * allocated, replaced)
        if overwritten := sum(draft.overwrites for draft in drafts):
            self.count("overwritten", overwritten)

    def _make_durable(self, name: Name, *, is_new: bool) -> bool:
        """Sync a chunk: also an old one, whose writer may not have synced it.

        Raises:
            FileNotFoundError: an old one is not there any more.
        """
        if not self._durable:
            return True
        try:
            self._form_of(name).sync(name, is_new=is_new)
        except OSError as error:
            if not is_new and isinstance(error, FileNotFoundError):
                raise
            # The kernel may have dropped the pages and forgotten: a second fsync proves nothing.
            self.say("sync", self._where(name), reason_of(error))
            self.discard(name, "fsync_failed")
            return False
        return True

    def exists(self, key: bytes) -> bool:
        """Ask the folder, for keys the index does not know or before relying on it."""
        name = name_of(0, key)
        if self.index.is_hidden(name) or not is_key(key):
            return False
        is_there = self._ask(name) or self.segments.look_again(name)
        return is_there and self.uses.is_fresh(name)

    def _ask(self, name: Name) -> bool:
        """Note when a chunk was used last, as the disk tells; False: it is not there."""
        try:
            self.uses.seen([(name, self.used_ns(name))])
        except OSError:
            return False
        return True

    def knows(self, name: Name) -> bool:
        """Return whether the index has a chunk that has not expired; never does I/O."""
        return name in self.index and self.uses.is_fresh(name)

    # ---- use and expiry --------------------------------------------------------------------

    def used(self, names: Sequence[Name]) -> None:
        """Note loads, the last named is the most recent; access times follow a little later."""
        self.index.touch(names)
        self.uses.used(names)

    def record_use(self) -> None:
        """Write access times, where other processes and the next start find them."""
        in_files = self.uses.take_unwritten()
        in_slots = {n: in_files.pop(n) for n in [*in_files] if n in self.segments}
        self.slots.record_uses(in_slots)
        self.files.record_uses(in_files)

    def is_fresh(self, name: Name) -> bool:
        """Return whether a chunk has not expired; asks the disk if no late use is known."""
        return self.uses.is_fresh(name) or (self._ask(name) and self.uses.is_fresh(name))

    # ---- removal ---------------------------------------------------------------------------

    def discard(self, name: Name, reason: str, seen: Seen | None = None) -> bool:
        """Remove a chunk; return False if that is impossible.

        ``seen``: by a load; a chunk that was stored since stays.
        """
        form = self._form_of(name)
        with self._publishing:
            try:
                if seen is not None and not form.is_still(name, seen) and name in self.segments:
                    return True
                # File systems may allocate more after a write (extents, compression), so the
                # present size may differ from the counted one.
                size = self.index.size(name)
                allocated = form.allocated_bytes(name) if size is None else size
                self._release(allocated, lambda: form.remove(name))
            except FileNotFoundError:
                pass  # another process removed it, and released its bytes
            except OSError as error:
                self.count("undeletable")
                why = error.strerror or str(error)
                self.say("remove", self._where(name), why, f"; {remedy_of(error)}")
                self.space.removal_failed(reason_of(error))
                return False
            self.note_removed(name, reason)
        return True

    def take_over(self, names: Sequence[Name], chunk_bytes: int) -> dict[Name, Draft]:
        """Evict chunks whose places the next chunks of this length can overwrite.

        Returns the places, still counted; chunks without one stay.
        """
        taken, allocated = dict[Name, Draft](), bytes_on_disk(chunk_bytes)
        with self._publishing:
            in_files = [name for name in names if self.index.size(name) == allocated]
            if in_slots := [name for name in in_files if name in self.segments]:
                in_files = [name for name in in_files if name not in self.segments]
                taken |= self.slots.take_over_all(in_slots, chunk_bytes)
            taken |= self.files.take_over_all(in_files, chunk_bytes)
            for name in taken:
                self.note_removed(name, "evicted")
        return taken

    def _release(self, allocated_bytes: int, remove: Callable[[], None]) -> None:
        """Remove something and release its bytes; raises OSError."""
        untold = self.space.add_in_flight(allocated_bytes)
        try:
            if untold is not None:
                raise untold  # a scan might release the bytes, too
            remove()
            self.root.quota.release(allocated_bytes)
        finally:
            self.space.add_in_flight(-allocated_bytes)

    def note_removed(self, name: Name, reason: str) -> None:
        """Drop a chunk whose file is gone from the index, and report the removal."""
        known = self.index.drop(name)
        self.uses.forget(name)
        self.count(reason)
        number, key = split_name(name)
        if known and number == 0 and reason != "removed":  # callers know of removals they asked for
            self.note_removal(key, reason)

    def drop_if_gone(self, name: Name) -> bool:
        """Drop a chunk that another process removed; return whether it did.

        Own removals hold the lock until the index knows of them.
        """
        with self._publishing, contextlib.suppress(OSError):
            try:
                self.used_ns(name)
            except FileNotFoundError:
                if name in self.index:
                    self.note_removed(name, "vanished")
                    return True
        return False

    def _move_to_quarantine(self, name: Name, seen: Seen | None, reason: str) -> bool:
        """Move a damaged chunk out of every reader's way, and keep a few for inspection.

        Returns False if what a reader found damaged is no longer there: then it may have been
        whole, and overwritten under the reader.
        """
        place, form, kept = self._where(name), self._form_of(name), ""
        with self._publishing:
            try:
                if seen is not None and not form.is_still(name, seen):
                    return False
                path = self.quarantine.path_for(self.files.path_of(name))
                form.set_aside(name, path)
                kept = f"; it is now {path}"
            except FileNotFoundError:
                return False  # as for the second of two readers
            except OSError:
                pass  # removed below, if that is possible
            if kept:
                self.note_removed(name, "corrupt")
        self._damaged.warning("disk: %s failed verification: %s%s", place, reason, kept)
        self.count(reason)
        if kept:
            self.trim_quarantine()
        elif not self.discard(name, "corrupt"):
            self.index.hide([name])
        return True

    def trim_quarantine(self) -> None:
        for path, allocated in self.quarantine.surplus():
            with contextlib.suppress(OSError):  # the next trim tries again
                self._release(allocated, partial(self.vfs.unlink, path))
