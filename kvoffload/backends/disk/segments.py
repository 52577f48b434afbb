"""The open segments of a root: read again as they change, made, taken over and tidied.

A process stores in segments of its own, one for each size of slot, and reads those of all. It takes
over a segment that no process has locked before it makes one. Room that is freed goes back to the
file system, so slots are counted and evicted like files.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kvoffload.backends.disk.descriptors import Descriptors
from kvoffload.backends.disk.index import Name, name_of
from kvoffload.backends.disk.paths import SEGMENTS, stems_of
from kvoffload.backends.disk.segment import (
    ENTRY_BYTES,
    FREE,
    WRITING,
    Segment,
    key_in,
    make_segment,
    open_segment,
    remove_damaged,
    stored_in,
    used_in,
)
from kvoffload.backends.disk.slot_places import MOST_SEGMENTS, At, Places
from kvoffload.backends.header import OTHER_VERSION

if TYPE_CHECKING:
    from kvoffload.backends.disk.store import DiskStore

MOST_SIZES = 16
"""So many sizes of slots a process has at most: each has an open segment."""
_ABANDONED_S = 60.0
"""Longer than any living process takes to free a slot."""
_REST = 10
"""Between two searches on behalf of unknown keys: so many times the length of one."""

Found = tuple[int, Name, int]
"""Last use in ns since the epoch, name and size of a chunk."""


class Held(NamedTuple):
    """The chunks of one segment."""

    number: int
    """Of the namespace."""
    chunks: int
    slot_bytes: int
    oldest_ns: int
    """The first of their last uses."""


class Segments(Places):
    """The segments that one process has open, and the places in them. Thread-safe."""

    def __init__(self, store: "DiskStore", *, durable: bool) -> None:
        """Open nothing yet."""
        super().__init__()
        self.vfs = store.vfs
        self._durable = durable
        self._files = Descriptors(store.vfs)
        self._store = store
        self._refreshing = threading.Lock()
        self._damaged: set[str] = set()
        """Segments whose table has no valid head."""
        self._own: dict[int, Segment] = {}
        """By size of a slot."""
        self._look_at = 0.0

    # ---- a slot to store in ----------------------------------------------------------------

    def take_slots(self, slot_bytes: int, count: int) -> list[At]:
        """Return free slots of an own segment, marked as being written."""
        if self._must_look(slot_bytes):
            with contextlib.suppress(OSError):  # one segment that is unreadable stops no store
                self.refresh(0)  # the lock must not be held: a refresh takes it
        with self.lock:
            segment = self._own_segment(slot_bytes)
            slots = [segment.free.pop() for _ in range(min(count, len(segment.free)))]
            end = len(segment.table) // ENTRY_BYTES
            new = range(end, end + count - len(slots))
            try:
                for slot in slots:
                    segment.set_entry(slot, WRITING)
                if new:
                    if new.stop * slot_bytes > segment.file_bytes:
                        segment.lengthen(new.stop)
                    segment.set_entry(end, WRITING * len(new))
            except BaseException:
                segment.free += reversed(slots)
                raise
            segment.taken += count
        return [At(segment, slot) for slot in (*slots, *new)]

    def _must_look(self, slot_bytes: int) -> bool:
        """Return whether there may be a free slot or segment that this process does not know."""
        if (segment := self._own.get(slot_bytes)) is None:
            return True
        return bool(self._store.root.other_writers and segment.may_have_free)

    def has_room_for(self, slot_bytes: int) -> bool:
        """Return whether the process has, or may have, a segment of slots of this size."""
        return slot_bytes in self._own or len(self._own) < MOST_SIZES

    # ---- all chunks ------------------------------------------------------------------------

    def refresh(self, *numbers: int, only_foreign: bool = False) -> None:
        """Read what changed in the tables of these namespaces, and tell the store; raises OSError.

        ``only_foreign``: in those of other processes, in which alone new chunks can appear.
        """
        failed, found = None, list[Found]()
        with self._refreshing:
            for number in numbers:
                folder = f"{self._store.folder(number)}/{SEGMENTS}"
                try:
                    self._look(number, folder)
                except OSError as error:
                    failed = error
                for segment in self._known(number):
                    try:
                        if not (only_foreign and segment.is_own) and segment.has_changed():
                            found += self._update(segment)
                    except OSError as error:
                        failed = error
            found.sort(key=itemgetter(0))
            self._store.appeared(found)
        if failed is not None:
            raise failed

    def _look(self, number: int, folder: str) -> None:
        """Open new segments of a namespace, and forget removed ones; raises OSError."""
        with self.lock:  # a segment is made and added under it
            known = self._known(number)
            there = {f"{folder}/{stem}" for stem in self._stems(folder)}
        for segment in known:
            if segment.stem not in there:
                self._lose(segment)
        there.difference_update(segment.stem for segment in known)
        failed = None
        for stem in sorted(there - self._damaged):
            try:
                self._add(open_segment(self._files, stem, number))
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = error
            except ValueError as error:
                if str(error) != OTHER_VERSION:
                    self._store.count("corrupt_header")
                    self._damaged.add(stem)
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

    def listing(self) -> Iterator[Found]:
        """Yield last use, name and size of each chunk, as of the last refresh."""
        places = self._places
        for segment in self._known():
            prefix, slot_bytes = name_of(segment.number, b""), segment.slot_bytes
            for slot, entry in segment.chunks():
                name = prefix + entry.key
                if name not in places:
                    # Two processes may have stored it: when the one leaves, the other stays.
                    with self.lock:
                        if key_in(segment.known(slot)) == entry.key:
                            places.setdefault(name, At(segment, slot).place)
                yield entry.used_ns, name, slot_bytes

    def held(self) -> list[Held]:
        """Return what each segment with chunks holds, as of the last refresh."""
        with self.lock:
            known = [(segment, *segment.count()) for segment in self._known()]
        return [
            Held(segment.number, chunks, segment.slot_bytes, oldest_ns)
            for segment, chunks, oldest_ns in known
            if chunks
        ]

    def moving_bytes(self) -> int:
        """Return the bytes that are counted and are no chunk's; raises OSError.

        They are those of slots that other processes are writing or freeing, or this one could not
        free yet.
        """
        total = 0
        for segment in self._known():
            total += sum(list(segment.stuck.values())) + len(segment.leaving) * segment.slot_bytes
            if not segment.is_own:
                self._read_changes(segment)
                total += len(segment.written_slots()) * segment.slot_bytes
        return total

    # ---- segments --------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Free slots that could not be freed before, and those that dead processes were writing.

        The evicting process removes segments that are empty or damaged.
        """
        is_evictor, released = self._store.root.evictor.held, 0
        for stem in list(self._damaged if is_evictor else ()):
            with contextlib.suppress(OSError):  # as of a folder: it stays, and is not read again
                with contextlib.suppress(FileNotFoundError):
                    remove_damaged(self.vfs, stem)
                self._damaged.discard(stem)
        for segment in self._known():
            with contextlib.suppress(OSError), self.lock:  # the next clean-up tries again
                segment.take_abandoned(_ABANDONED_S)
                for slot in list(segment.stuck):
                    self.free(segment, slot)
                    released += segment.stuck.pop(slot)
                is_done = segment.is_tidy and not segment.has_changed()
                if segment.is_own or is_done or not is_evictor or not segment.lock():
                    continue
                try:
                    self._read_changes(segment)
                    self._tidy(segment)
                    segment.is_tidy = not segment.freeing
                    if not segment.num_used:
                        segment.unlink()
                        self._lose(segment)
                finally:
                    segment.unlock()
        if released:  # without the lock: the quota may be waiting for it
            self._store.root.quota.release(released)

    def close(self) -> None:
        """Close all segments, and remove own ones without chunks."""
        for segment in self._known():
            if segment.is_own and not segment.num_used:
                with contextlib.suppress(OSError):
                    segment.unlink()
            self._open[segment.place] = None
            segment.close()
        self._files.close()
        self._places.clear()
        self._own.clear()

    # ---- inside ----------------------------------------------------------------------------

    def _stems(self, folder: str) -> list[str]:
        try:
            return stems_of(self.vfs.listdir(folder))
        except FileNotFoundError:
            return []

    def _own_segment(self, slot_bytes: int) -> Segment:
        """Return the segment to store in: a dead process's, or a new one."""
        if (own := self._own.get(slot_bytes)) is not None:
            return own
        for segment in self._known(0):
            if segment.slot_bytes == slot_bytes and segment.lock():
                self._read_changes(segment)
                if self._store.root.is_alone():
                    self._tidy(segment)
                # Another process may be about to free the blocks of the rest.
                rest = set(segment.written_slots()).difference(segment.freeing)
                segment.leaving = dict.fromkeys(rest, time.monotonic())
                if self._durable:  # its last process may not have been
                    self.vfs.sync(os.path.dirname(segment.stem))
                segment.free = segment.free_slots()[::-1]
                segment.is_own = True
                self._own[slot_bytes] = segment
                return segment
        stem = f"{self._store.folder(0)}/{SEGMENTS}/{secrets.token_hex(8)}"
        temporary = self._store.root.temporary(counted=False)
        made = make_segment(self._files, stem, temporary, slot_bytes, durable=self._durable)
        self._add(made)
        self._own[slot_bytes] = made
        return made

    def _update(self, segment: Segment) -> list[Found]:
        """Read a table, tell which chunks left, and return those that appeared."""
        prefix, places, slot_bytes = name_of(segment.number, b""), self._places, segment.slot_bytes
        found, vanished = list[Found](), list[Name]()
        with self.lock:
            for slot, before, now in segment.take_changes():
                place = slot * MOST_SEGMENTS + segment.place
                if before != FREE:
                    name = prefix + (key_in(before) or b"")
                    if name[2:] != key_in(now) and places.get(name) == place:
                        del places[name]
                        vanished.append(name)
                    if segment.is_own:
                        segment.note_change(slot, before, now)
                if (new := key_in(now)) is not None:
                    name = prefix + new
                    if name not in places or self._is_newest(name, now):
                        places[name] = place
                    found.append((used_in(now), name, slot_bytes))
        self._store.vanished(vanished)
        return found

    def _is_newest(self, name: Name, entry: bytes) -> bool:
        """Return whether no known entry of a chunk is younger: an old one may lead to damage."""
        try:
            segment, slot = self.find(name)
        except FileNotFoundError:
            return True
        return stored_in(segment.known(slot)) < stored_in(entry)

    def _lose(self, segment: Segment) -> None:
        """Forget a segment whose files are gone."""
        with self.lock:
            if self._open[segment.place] is not segment:
                return
            self._open[segment.place] = None
            segment.close()
            if self._own.get(segment.slot_bytes) is segment:
                del self._own[segment.slot_bytes]
            prefix, lost = name_of(segment.number, b""), []
            for slot, entry in segment.chunks():
                name = prefix + entry.key
                if self._places.get(name) == At(segment, slot).place:
                    del self._places[name]
                    lost.append(name)
        self._store.vanished(lost)

    def _read_changes(self, segment: Segment) -> None:
        if segment.has_changed():
            self._store.appeared(self._update(segment))

    def _tidy(self, segment: Segment) -> None:
        """Free what a dead process was writing into a segment that this one has locked."""
        for slot in segment.written_slots():
            if slot not in segment.freeing:
                self.free(segment, slot)
