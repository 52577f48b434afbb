"""A slot of a segment a chunk: the form of small chunks, for which a file each costs too much.

A process stores in segments of its own, one for each size of slot, and reads those of all. It takes
over a segment that no process has locked before it makes one. Room that is freed goes back to the
file system, so slots are counted and evicted like files.
"""

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvoffload.backends.disk.chunk_file import PAGE, ChunkFiles, bytes_on_disk
from kvoffload.backends.disk.chunk_forms import Seen
from kvoffload.backends.disk.chunk_slot import ChunkSlots
from kvoffload.backends.disk.index import Name, name_of
from kvoffload.backends.disk.paths import SEGMENTS, stems_of
from kvoffload.backends.disk.root import RootHandle
from kvoffload.backends.disk.segment import (
    FREE,
    MOST_KEY_BYTES,
    WRITING,
    Segment,
    key_in,
    make_segment,
    open_segment,
    pack_entry,
    remove_damaged,
    stored_in,
    used_in,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import OTHER_VERSION

log = logging.getLogger(__name__)

MOST_CHUNK_BYTES = 256 << 10
"""Longer chunks have files of their own."""
_MOST_SIZES = 16
"""So many sizes of slots a process has at most: each has an open segment."""
_MOST_SEGMENTS = 1 << 16
_ABANDONED_S = 60.0
"""Longer than any living process takes to free a slot."""
_REST = 10
"""Between two searches on behalf of unknown keys: so many times the length of one."""

Place = int
"""Slot times ``_MOST_SEGMENTS``, plus the number of the segment: less memory than a pair."""


class SlotDraft(NamedTuple):
    """A slot of an own segment, marked in the table as being written."""

    form: "Slots"
    segment: Segment
    slot: int
    place: Place
    overwrites: bool

    def write(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> tuple[str | None, int]:
        form, segment = self.form, self.segment
        reason = form.chunks.write(segment, self.slot, key, form.digest, chunk, tenant)
        return reason, segment.slot_bytes

    def publish(self, name: Name) -> int:
        return self.form.publish(name, self)

    def retract(self, name: Name) -> None:
        self.form.retract(name, self)

    def drop(self) -> bool:
        try:
            self.form.free(self.segment, self.slot)
        except OSError:
            self.segment.stuck[self.slot] = self.segment.slot_bytes
            return False
        return True


class Host(Protocol):
    """What the form needs of its store."""

    root: RootHandle

    def folder(self, number: int) -> str:
        """Return the folder of a namespace."""
        ...

    def appeared(self, found: list[tuple[int, Name, int]]) -> None:
        """Note last use, name and size of chunks, the least recently used first."""
        ...

    def vanished(self, name: Name) -> None:
        """Note that another process removed a chunk."""
        ...

    def count(self, reason: str) -> None:
        """Count an event."""
        ...


class Slots:
    """Chunks in slots; see ``chunk_forms``. Thread-safe."""

    def __init__(self, vfs: Vfs, files: ChunkFiles, digest: bytes, host: Host) -> None:
        """Open nothing yet; ``files`` has the way of I/O."""
        self.vfs = vfs
        self.chunks = ChunkSlots(files)
        self.digest = digest
        self._durable = files.durable
        self._host = host
        self._damaged: set[str] = set()
        """Segments whose table has no valid head."""
        self._lock = threading.RLock()
        self._refreshing = threading.Lock()
        self._segments: list[Segment | None] = []
        self._own: dict[int, int] = {}
        """By size of a slot."""
        self._places: dict[Name, Place] = {}
        self._look_at = 0.0

    def __contains__(self, name: Name) -> bool:
        return name in self._places

    def suits(self, key: bytes, chunk_bytes: int) -> bool:
        """Return whether to store a chunk in a slot."""
        if chunk_bytes > MOST_CHUNK_BYTES or len(key) > MOST_KEY_BYTES:
            return False
        return bytes_on_disk(chunk_bytes) in self._own or len(self._own) < _MOST_SIZES

    # ---- the form --------------------------------------------------------------------------

    def read(self, name: Name, key: bytes, target: memoryview) -> tuple[str | None, Seen | None]:
        try:
            segment, slot, place = self._find(name)
        except FileNotFoundError:
            return "missing", None
        reason = self.chunks.read(segment, slot, key, self.digest, target)
        if reason == "missing":
            self._forget(name, place)
        return reason, None if reason is None else Seen(place, segment.slot_bytes)

    def draft(self, chunk_bytes: int) -> SlotDraft:
        slot_bytes = bytes_on_disk(chunk_bytes)
        if slot_bytes not in self._own:
            with contextlib.suppress(OSError):  # one segment that is unreadable stops no store
                self.refresh(0)  # the lock must not be held: a refresh takes it
        with self._lock:
            number = self._own_segment(slot_bytes)
            segment = self._segments[number]
            assert segment is not None
            slot = segment.take_slot()
            try:
                segment.set_entry(slot, WRITING)
            except BaseException:
                segment.free.append(slot)
                raise
        return SlotDraft(self, segment, slot, slot * _MOST_SEGMENTS + number, overwrites=False)

    def take_over(self, name: Name, chunk_bytes: int) -> SlotDraft | None:
        segment, slot, place = self._find(name)
        if not segment.is_own or segment.slot_bytes != bytes_on_disk(chunk_bytes):
            return None
        with self._taken(name, segment, slot, place), self._lock:
            segment.set_entry(slot, WRITING)
        return SlotDraft(self, segment, slot, place, overwrites=True)

    def publish(self, name: Name, draft: SlotDraft) -> int:
        """Enter the chunk of a slot into the table; return the bytes of the one it replaces."""
        with self._lock:
            if self._at(draft.place)[0] is not draft.segment:
                raise _gone(name)  # with its segment
            draft.segment.set_entry(draft.slot, pack_entry(name[2:], time.time_ns()))
            before = self._places.get(name)
            self._places[name] = draft.place
        if before is None:
            return 0
        segment, slot = self._at(before)
        try:
            if key_in(segment.entry(slot)) != name[2:]:
                return 0
            self.free(segment, slot)
        except OSError:
            if segment.is_own:
                segment.stuck[slot] = segment.slot_bytes
            return 0
        return segment.slot_bytes

    def retract(self, name: Name, draft: SlotDraft) -> None:
        with self._lock:
            draft.segment.set_entry(draft.slot, WRITING)
            self._places.pop(name, None)

    def used_ns(self, name: Name) -> int:
        segment, slot, place = self._find(name)
        entry = segment.chunk(slot)
        if entry is None or entry.key != name[2:]:
            self._forget(name, place)
            raise _gone(name)
        return entry.used_ns

    def record_use(self, name: Name, used_ns: int) -> None:
        segment, slot, _ = self._find(name)
        segment.set_used(slot, used_ns)

    def allocated_bytes(self, name: Name) -> int:
        try:
            return self._find(name)[0].slot_bytes
        except FileNotFoundError:
            return 0

    def is_still(self, name: Name, seen: Seen) -> bool:
        segment, slot, place = self._find(name)
        if place != seen.identity:
            return False
        if key_in(segment.entry(slot)) != name[2:]:
            self._forget(name, place)
            return False
        return True

    def sync(self, name: Name, *, is_new: bool) -> None:
        self._find(name)[0].sync()

    def remove(self, name: Name) -> None:
        segment, slot, place = self._find(name)
        with self._taken(name, segment, slot, place):
            entry = bytes(segment.entry(slot))
            try:
                self.free(segment, slot)
            except OSError:
                with contextlib.suppress(OSError), self._lock:
                    segment.set_entry(slot, entry)
                raise

    def set_aside(self, name: Name, path: str) -> None:
        segment, slot, _ = self._find(name)
        content = memoryview(bytearray(segment.slot_bytes))
        offset = slot * segment.slot_bytes
        moved = self.vfs.preadv(segment.fd(direct=False), [content], offset)
        temporary = self._host.root.writer.temporary(counted=False)
        self.vfs.replace_file(path, temporary, bytes(content[:moved]))
        try:
            self.remove(name)
        except OSError:
            self.vfs.unlink_quietly(path)
            raise

    # ---- segments --------------------------------------------------------------------------

    def refresh(self, number: int, *, only_foreign: bool = False) -> None:
        """Read what changed in the tables of a namespace; raises OSError.

        ``only_foreign``: in those of other processes, in which alone new chunks can appear.
        """
        failed = None
        with self._refreshing:
            folder = f"{self._host.folder(number)}/{SEGMENTS}"
            with self._lock:  # a segment is made and added under it
                known = self._known(number)
                there = {f"{folder}/{stem}" for stem in self._stems(folder)}
            for i, segment in known:
                if segment.stem not in there:
                    self._lose(i)
            there.difference_update(segment.stem for _, segment in known)
            for stem in sorted(there - self._damaged):
                try:
                    self._add(open_segment(self.vfs, stem, number))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failed = error
                except ValueError as error:
                    if str(error) != OTHER_VERSION:
                        self._host.count("corrupt_header")
                        self._damaged.add(stem)
            for i, segment in self._known(number):
                try:
                    if not (only_foreign and segment.is_own) and segment.has_changed():
                        self._update(i, segment)
                except OSError as error:
                    failed = error
        if failed is not None:
            raise failed

    def look_again(self, name: Name) -> bool:
        """Return whether a chunk is known after a search, unless one has just ended."""
        if time.monotonic() >= self._look_at:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                self.refresh(0, only_foreign=True)
            now = time.monotonic()
            self._look_at = now + (now - began) * _REST
        return name in self._places

    def listing(self, number: int) -> Iterator[tuple[int, Name, int]]:
        """Yield last use, name and size of each chunk of a namespace, as of the last refresh."""
        prefix = name_of(number, b"")
        for i, segment in self._known(number):
            for slot, entry in segment.chunks():
                # Two processes may have stored it: when the one leaves, the other stays.
                with self._lock:
                    if key_in(segment.known(slot)) == entry.key:
                        self._places.setdefault(prefix + entry.key, slot * _MOST_SEGMENTS + i)
                yield entry.used_ns, prefix + entry.key, segment.slot_bytes

    def names(self, number: int) -> list[Name]:
        """Return the names of a namespace's chunks, as of the last refresh."""
        prefix = name_of(number, b"")
        return [name for name in list(self._places) if name.startswith(prefix)]

    def moving_bytes(self) -> int:
        """Return the bytes that are counted and are no chunk's; raises OSError.

        They are those of slots that other processes are writing, or this one could not free yet.
        """
        total = 0
        for i, segment in self._known():
            total += sum(list(segment.stuck.values()))
            if not segment.is_own:
                if segment.has_changed():
                    self._update(i, segment)
                total += len(segment.written_slots()) * segment.slot_bytes
        return total

    def clean_up(self) -> None:
        """Free slots that could not be freed before, and those that dead processes were writing.

        The evicting process removes segments that are empty or damaged.
        """
        is_evictor, released = self._host.root.evictor.held, 0
        for stem in list(self._damaged if is_evictor else ()):
            with contextlib.suppress(OSError):  # as of a folder: it stays, and is not read again
                with contextlib.suppress(FileNotFoundError):
                    remove_damaged(self.vfs, stem)
                self._damaged.discard(stem)
        for i, segment in self._known():
            with contextlib.suppress(OSError), self._lock:  # the next clean-up tries again
                segment.take_abandoned(_ABANDONED_S)
                for slot in list(segment.stuck):
                    self.free(segment, slot)
                    released += segment.stuck.pop(slot)
                is_done = segment.is_tidy and not segment.has_changed()
                if segment.is_own or is_done or not is_evictor or not segment.lock():
                    continue
                try:
                    self._tidy(i, segment)
                    segment.is_tidy = True
                    if not segment.num_used:
                        segment.unlink()
                        self._lose(i)
                finally:
                    segment.unlock()
        if released:  # without the lock: the quota may be waiting for it
            self._host.root.quota.release(released)

    def close(self) -> None:
        """Close all segments, and remove own ones without chunks."""
        for i, segment in self._known():
            if segment.is_own and not segment.num_used:
                with contextlib.suppress(OSError):
                    segment.unlink()
            self._segments[i] = None
            segment.close()
        self._places.clear()
        self._own.clear()

    def disown(self) -> None:
        """Leave all files open: in a forked child, their numbers may be those of other files."""
        for _, segment in self._known():
            segment.close.detach()

    def free(self, segment: Segment, slot: int) -> None:
        """Free a slot of which no name tells; raises OSError: it stays out of use."""
        with self._lock:
            # No key must lead to a hole, or it would hide a chunk that is stored later. A process
            # that is killed before the end leaves a slot that the next one frees.
            segment.set_entry(slot, WRITING)
        segment.free_blocks(slot)
        with self._lock:
            segment.set_entry(slot, FREE)
            if segment.is_own:
                segment.free.append(slot)

    # ---- inside ----------------------------------------------------------------------------

    def _known(self, number: int | None = None) -> list[tuple[int, Segment]]:
        """Return the segments of a namespace, or all."""
        return [
            (i, segment)
            for i, segment in enumerate(list(self._segments))
            if segment is not None and number in (None, segment.number)
        ]

    def _stems(self, folder: str) -> list[str]:
        try:
            return stems_of(self.vfs.listdir(folder))
        except FileNotFoundError:
            return []

    def _at(self, place: Place) -> tuple[Segment, int]:
        slot, number = divmod(place, _MOST_SEGMENTS)
        segment = self._segments[number] if number < len(self._segments) else None
        if segment is None:
            raise FileNotFoundError(errno.ENOENT, "the segment is gone")
        return segment, slot

    def _find(self, name: Name) -> tuple[Segment, int, Place]:
        """Return where a chunk is; raises FileNotFoundError."""
        if (place := self._places.get(name)) is None:
            raise _gone(name)
        return *self._at(place), place

    @contextlib.contextmanager
    def _taken(self, name: Name, segment: Segment, slot: int, place: Place) -> Iterator[None]:
        """Hide a chunk while its slot and entry change; if that fails, it is back.

        Raises:
            FileNotFoundError: the chunk is gone.
        """
        with self._lock:
            if self._places.pop(name, None) != place:
                raise _gone(name)
        try:
            is_there = key_in(segment.entry(slot)) == name[2:]
            if is_there:
                yield
        except BaseException:
            self._places.setdefault(name, place)
            raise
        if not is_there:
            self._places.setdefault(name, place)
            self._forget(name, place)
            raise _gone(name)

    def _forget(self, name: Name, place: Place) -> None:
        """Forget a chunk that is gone.

        What another process removed, it frees. What is lost though the table has it, the next
        clean-up frees, of an own segment.
        """
        with self._lock:
            if self._places.get(name) == place:
                del self._places[name]
                with contextlib.suppress(OSError):
                    segment, slot = self._at(place)
                    if segment.is_own and key_in(segment.entry(slot)) == name[2:]:
                        segment.stuck.setdefault(slot, 0)

    def _own_segment(self, slot_bytes: int) -> int:
        """Return the number of the segment to store in: a dead process's, or a new one."""
        if (number := self._own.get(slot_bytes)) is not None:
            return number
        for i, segment in self._known(0):
            if segment.slot_bytes == slot_bytes and segment.lock():
                self._tidy(i, segment)
                if self._durable:  # its last process may not have been
                    self.vfs.sync(os.path.dirname(segment.stem))
                segment.free = segment.free_slots()[::-1]
                segment.is_own = True
                self._own[slot_bytes] = i
                return i
        writer = self._host.root.writer
        stem = f"{self._host.folder(0)}/{SEGMENTS}/{secrets.token_hex(8)}"
        temporary = writer.temporary(counted=False)
        made = make_segment(self.vfs, stem, temporary, slot_bytes, durable=self._durable)
        self._own[slot_bytes] = number = self._add(made)
        return number

    def _add(self, segment: Segment) -> int:
        with self._lock:
            for i, other in enumerate(self._segments):
                if other is None:
                    self._segments[i] = segment
                    return i
            self._segments.append(segment)
            return len(self._segments) - 1

    def _update(self, number: int, segment: Segment) -> None:
        """Read a table, and note which chunks appeared and left."""
        prefix, found, vanished = name_of(segment.number, b""), [], []
        with self._lock:
            for slot, before, now in segment.take_changes():
                place = slot * _MOST_SEGMENTS + number
                old, new = key_in(before), key_in(now)
                if old is not None and old != new and self._places.get(prefix + old) == place:
                    del self._places[prefix + old]
                    vanished.append(prefix + old)
                if segment.is_own:
                    segment.note_change(slot, before, now)
                if new is not None:
                    if self._is_newest(prefix + new, now):
                        self._places[prefix + new] = place
                    found.append((used_in(now), prefix + new, segment.slot_bytes))
        found.sort()
        self._host.appeared(found)
        for name in vanished:
            self._host.vanished(name)

    def _is_newest(self, name: Name, entry: bytes) -> bool:
        """Return whether no known entry of a chunk is younger: an old one may lead to damage."""
        try:
            segment, slot, _ = self._find(name)
        except FileNotFoundError:
            return True
        return stored_in(segment.known(slot)) < stored_in(entry)

    def _lose(self, number: int) -> None:
        """Forget a segment whose files are gone."""
        with self._lock:
            segment, self._segments[number] = self._segments[number], None
            if segment is None:
                return
            if self._own.get(segment.slot_bytes) == number:
                del self._own[segment.slot_bytes]
            prefix, gone = name_of(segment.number, b""), []
            for slot, entry in segment.chunks():
                name = prefix + entry.key
                if self._places.get(name) == slot * _MOST_SEGMENTS + number:
                    del self._places[name]
                    gone.append(name)
        for name in gone:
            self._host.vanished(name)

    def _tidy(self, number: int, segment: Segment) -> None:
        """Free what a dead process was writing into a segment that this one has locked."""
        if segment.has_changed():
            self._update(number, segment)
        for slot in segment.written_slots():
            self.free(segment, slot)


def can_free(vfs: Vfs, root: str, scratch: str) -> bool:
    """Try on a scratch file whether the file system frees a part of a file; if not, log why."""
    try:
        fd = vfs.open(scratch, os.O_RDWR | os.O_CREAT)
        try:
            vfs.pwritev(fd, [bytes(PAGE), bytes(PAGE)], 0)
            before = vfs.fstat(fd).st_blocks
            vfs.punch(fd, 0, PAGE)
            # With larger blocks than a page, or no holes at all, it only writes zeros.
            problem = "" if vfs.fstat(fd).st_blocks < before else "its room stays"
        finally:
            vfs.close_quietly(fd)
            vfs.unlink_quietly(scratch)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        text = "disk %s: cannot free a part of a file (%s): small chunks are files"
        log.warning(text, root, problem)
    return not problem


def _gone(name: Name) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name[2:].hex())
