"""Which chunk is in which slot of the segments that a process has open."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvoffload.backends.disk.index import Name, name_of
from kvoffload.backends.disk.segment import FREE, WRITING, Segment

Place = int
"""Slot times ``MOST_SEGMENTS``, plus the place of the segment: less memory than a pair."""
MOST_SEGMENTS = 1 << 16


class At(NamedTuple):
    """Where a chunk is."""

    segment: Segment
    slot: int

    @property
    def place(self) -> Place:
        """The same as a number."""
        return self.slot * MOST_SEGMENTS + self.segment.place

    def after(self, slots: int) -> "At":
        """Return the place so many slots further."""
        return At(self.segment, self.slot + slots)


class Places:
    """Places by the names of their chunks, and segments by theirs. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards tables and places."""
        self._open: list[Segment | None] = []
        self._places: dict[Name, Place] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._places

    def find(self, name: Name) -> At:
        """Return where a chunk is; raises FileNotFoundError."""
        if (place := self._places.get(name)) is None:
            raise gone(name)
        return self.at(place)

    def in_order(self, names: Iterable[Name]) -> list[Name]:
        """Return names segment by segment, in the order of their slots."""

        def order(name: Name) -> tuple[int, int]:
            place = self._places.get(name, -1)
            return place % MOST_SEGMENTS, place

        return sorted(names, key=order)

    def runs(self, names: Sequence[Name], most: int) -> list[range]:
        """Return these chunks in parts that are in slots which follow one another."""
        runs, start, due, find = list[range](), 0, None, self._places.get
        for i, name in enumerate(names):
            place = find(name)
            if i > start and (place is None or place != due or i - start >= most):
                runs.append(range(start, i))
                start = i
            due = None if place is None else place + MOST_SEGMENTS
        return [*runs, range(start, len(names))] if names else []

    def at(self, place: Place) -> At:
        """Return a slot by its place; FileNotFoundError: its segment is gone."""
        slot, at = divmod(place, MOST_SEGMENTS)
        if (segment := self._open[at]) is None:
            raise FileNotFoundError(errno.ENOENT, "the segment is gone")
        return At(segment, slot)

    def enter(self, names: Sequence[Name], at: At, entries: bytes) -> At | None:
        """Enter chunks into the table of slots that follow one another.

        Returns where the first of them was before. Of several chunks, none is in a place yet.
        """
        with self.lock:
            if self._open[at.segment.place] is not at.segment:
                raise gone(names[0])  # with its segment
            at.segment.set_entry(at.slot, entries)
            before = self._places.get(names[0])
            places = itertools.count(at.place, MOST_SEGMENTS)
            self._places.update(zip(names, places, strict=False))
        with contextlib.suppress(FileNotFoundError):  # its segment is gone
            return None if before is None else self.at(before)
        return None

    def hide(self, name: Name, at: At) -> None:
        """Take a chunk out of the table again: its slot is being written."""
        with self.lock:
            self._places.pop(name, None)  # even if the table cannot be written
            at.segment.set_entry(at.slot, WRITING)

    @contextlib.contextmanager
    def taken(self, *names: Name) -> Iterator[At]:
        """Hide chunks of slots that follow one another, and mark the slots as being written.

        All of them or none; if the rest fails, they are back.

        Raises:
            FileNotFoundError: a chunk is gone.
        """
        at = self.find(names[0])
        with contextlib.ExitStack() as claim, contextlib.ExitStack() as undo:
            with self.lock:
                for i, name in enumerate(names):
                    if self._places.get(name) != (place := at.after(i).place):
                        raise gone(name)
                    undo.callback(self._places.setdefault, name, place)
                    del self._places[name]
                entries = claim.enter_context(self.claimed(at, *(name[2:] for name in names)))
            if entries is None:
                if len(names) == 1:
                    undo.pop_all()  # another process removed this one, and frees its slot
                raise gone(names[0])
            undo.callback(self._restore, at, entries)
            yield at
            undo.pop_all()

    def _restore(self, at: At, entries: bytes) -> None:
        with contextlib.suppress(OSError), self.lock:
            at.segment.set_entry(at.slot, entries)

    @contextlib.contextmanager
    def claimed(self, at: At, *keys: bytes) -> Iterator[bytes | None]:
        """See :meth:`Segment.claim`; callers keep the chunks' names out of the places.

        Until the end no other thread takes a slot for one that a dead process was writing.
        """
        segment, slots = at.segment, range(at.slot, at.slot + len(keys))
        with self.lock:
            if (entries := segment.claim(at.slot, *keys)) is not None:
                segment.freeing += slots
        try:
            yield entries
        finally:
            for slot in slots if entries is not None else ():
                segment.freeing.remove(slot)

    def forget(self, name: Name, at: At) -> None:
        """Forget a chunk that another process removed; that one frees its slot."""
        with self.lock:
            if self._places.get(name) == at.place:
                del self._places[name]

    def free(self, segment: Segment, slot: int) -> None:
        """Free a slot of which no name tells; raises OSError: it stays out of use."""
        with self.lock:
            # No key must lead to a hole, or it would hide a chunk that is stored later. A process
            # that is killed before the end leaves a slot that the next one frees.
            if segment.known(slot) != WRITING:
                segment.set_entry(slot, WRITING)
        segment.free_blocks(slot)
        with self.lock, contextlib.suppress(FileNotFoundError):  # without the table, it is free
            segment.set_entry(slot, FREE)
            if segment.is_own:
                segment.free.append(slot)

    def names(self, number: int) -> list[Name]:
        """Return the names of a namespace's chunks, as of the last refresh."""
        prefix = name_of(number, b"")
        return [name for name in list(self._places) if name.startswith(prefix)]

    def _known(self, number: int | None = None) -> list[Segment]:
        """Return the segments of a namespace, or all."""
        known = [segment for segment in list(self._open) if segment is not None]
        return [each for each in known if number in (None, each.number)]

    def _add(self, segment: Segment) -> None:
        with self.lock:
            if None not in self._open:
                self._open.append(None)
            segment.place = self._open.index(None)
            self._open[segment.place] = segment


def gone(name: Name) -> FileNotFoundError:
    """Return the error that says that a chunk is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name[2:].hex())
