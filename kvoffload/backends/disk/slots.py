"""A slot of a segment a chunk: the form of small chunks, for which a file each costs too much."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.backends.disk.chunk_file import (
    MOST_IN_RUN,
    PAGE,
    ChunkFiles,
    bytes_on_disk,
    continued,
    is_aligned,
    reason_of,
)
from kvoffload.backends.disk.files import Seen
from kvoffload.backends.disk.index import Name
from kvoffload.backends.disk.paths import SLOTS
from kvoffload.backends.disk.segment import MOST_KEY_BYTES, Segment, key_in, pack_entry
from kvoffload.backends.disk.segments import Segments
from kvoffload.backends.disk.slot_places import At, gone
from kvoffload.backends.header import counted_as

MOST_CHUNK_BYTES = 1 << 20
"""Longer chunks have files of their own."""
_MOST_USES = 128
"""So many times of use are written at once: stores wait for it."""
_WRITEBACK_BYTES = 1 << 20
"""The kernel is told to write what has gathered in so large parts: each call takes time."""
MOST_RUN_BYTES = 512 << 10
"""Chunks are hashed before they are written: more would leave the processor's cache between."""
MOST_READ_BYTES = 1 << 20
"""Each read costs as much as a copy of 128 KiB; a chunk is told of when the whole run is read."""


class SlotDraft(NamedTuple):
    """A slot of an own segment, marked in the table as being written."""

    form: "Slots"
    at: At
    overwrites: bool

    def write(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> tuple[str | None, int]:
        reason = self.form.write(self.at, [key], [chunk], [tenant])
        return reason, self.at.segment.slot_bytes

    def publish(self, *names: Name) -> int:
        """Let readers see chunks in this slot and the next ones: one chunk, or all are new."""
        segments, now_ns = self.form.segments, time.time_ns()
        entries = b"".join(pack_entry(name[2:], now_ns) for name in names)
        before = segments.enter(names, self.at, entries)
        if before is None:
            return 0
        segment, slot = before
        try:
            with segments.claimed(before, names[0][2:]) as entry:
                if entry is None:
                    return 0
                segments.free(segment, slot)
        except OSError:
            if segment.is_own:
                segment.stuck[slot] = segment.slot_bytes
            return 0
        return segment.slot_bytes

    def retract(self, name: Name) -> None:
        self.form.segments.hide(name, self.at)

    def drop(self) -> bool:
        segment, slot = self.at
        try:
            self.form.segments.free(segment, slot)
        except OSError:
            segment.stuck[slot] = segment.slot_bytes
            return False
        return True


def runs_of(drafts: Sequence[SlotDraft]) -> list[range]:
    """Return drafts in parts whose slots follow one another."""
    runs, start = list[range](), 0
    for i in range(1, len(drafts) + 1):
        if i == len(drafts) or drafts[i].at != drafts[start].at.after(i - start):
            runs.append(range(start, i))
            start = i
    return runs


class Slots:
    """Chunks in slots; most methods are those of ``Files``. Thread-safe."""

    def __init__(self, files: ChunkFiles, segments: Segments, temporary: Callable[[], str]) -> None:
        """``files`` has the way of I/O, ``temporary`` makes paths that the quota does not count."""
        self.vfs = files.vfs
        self._temporary = temporary
        self._files = files
        self.segments = segments

    def suits(self, key: bytes, chunk_bytes: int) -> bool:
        """Return whether to store a chunk in a slot."""
        is_small = chunk_bytes <= MOST_CHUNK_BYTES and len(key) <= MOST_KEY_BYTES
        return is_small and self.segments.has_room_for(bytes_on_disk(chunk_bytes))

    def path_of(self, name: Name) -> str:
        """Return the path of a chunk's segment, with the number of the slot."""
        segment, slot = self.segments.find(name)
        return f"{segment.stem}{SLOTS}#{slot}"

    def read(self, name: Name, key: bytes, target: memoryview) -> tuple[str | None, Seen | None]:
        try:
            at = self.segments.find(name)
        except FileNotFoundError:
            return "missing", None
        (reason,) = self._read(at, [key], [target])
        return reason, None if reason is None else at.place

    def runs(self, names: Sequence[Name], targets: Sequence[memoryview]) -> list[range]:
        """Return chunks in parts that :meth:`read_run` reads by one call, or that have one."""
        size = targets[0].nbytes
        if not size or size % PAGE or len({target.nbytes for target in targets}) > 1:
            return [range(i, i + 1) for i in range(len(names))]
        return self.segments.runs(names, min(MOST_IN_RUN, max(1, MOST_READ_BYTES // size)))

    def read_run(
        self, names: Sequence[Name], keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> list[bool]:
        """Fill targets with chunks as :meth:`runs` returned them; return which are sound."""
        try:
            at = self.segments.find(names[0])
        except FileNotFoundError:
            return [False] * len(names)
        is_run = at.segment.slot_bytes == bytes_on_disk(targets[0].nbytes)
        if not is_run or self.segments.runs(names, len(names)) != [range(len(names))]:
            return [False] * len(names)  # some have moved meanwhile
        return [why is None for why in self._read(at, keys, targets)]

    def _read(
        self, at: At, keys: Sequence[bytes], targets: Sequence[memoryview]
    ) -> list[str | None]:
        """Fill targets with the chunks of slots that follow one another, by one call.

        Returns for each a counter's reason, or None. All but the last one fill their slots.
        """
        files, vfs, (segment, slot) = self._files, self.vfs, at
        slot_bytes = segment.slot_bytes
        if PAGE + targets[-1].nbytes > slot_bytes:
            return [counted_as("size")] * len(keys)
        try:
            headers, offset = files.pages(len(keys)), slot * slot_bytes
            buffers = [buffer for pair in zip(headers, targets, strict=True) for buffer in pair]
            wanted, moved = sum([buffer.nbytes for buffer in buffers]), 0
            if files.room:
                # The read that follows tells of an error that lasts.
                with contextlib.suppress(OSError):
                    slots = segment.slots(direct=False, to_read=True)
                    moved = files.read_cached(slots.fd, buffers, wanted, offset)
            if moved < wanted:
                direct = files.direct and all(map(is_aligned, targets))
                slots = segment.slots(direct=direct, to_read=True)
                moved = vfs.preadv(slots.fd, buffers, offset)
            if 0 < moved < wanted:
                slots = segment.slots(direct=False, to_read=True)
                moved = continued(vfs.preadv, slots.fd, buffers, moved, offset)
        except OSError as error:
            return [reason_of(error)] * len(keys)
        reasons = list[str | None]()
        for header, target, key in zip(headers, targets, keys, strict=True):
            if moved < PAGE or not any(header[:8]):
                reasons.append("missing")  # a hole: another process evicted the chunk
            else:
                reason: str | None = "short"
                if moved >= PAGE + target.nbytes:
                    reason = files.seal.fault(header, target, key, files.namespace)
                reason = "size" if reason == "length" else reason
                reasons.append(None if reason is None else counted_as(reason))
            moved -= slot_bytes
        return reasons

    def drafts(self, chunk_bytes: int, count: int) -> list[SlotDraft]:
        taken = self.segments.take_slots(bytes_on_disk(chunk_bytes), count)
        return [SlotDraft(self, at, overwrites=False) for at in taken]

    def write(
        self,
        at: At,
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        tenants: Sequence[bytes],
    ) -> str | None:
        """Write chunks into slots that follow one another, by one call; return a counter's reason.

        The table names none of the slots. After a failure some of them may have their chunks.
        """
        files, vfs, (segment, slot) = self._files, self.vfs, at
        offset = slot * segment.slot_bytes
        buffers, packed, wanted = list[memoryview](), list[memoryview](), 0
        try:
            for header, key, chunk, tenant in zip(
                files.pages(len(keys)), keys, chunks, tenants, strict=True
            ):
                header[:], stored = files.seal.pack(
                    key, files.namespace, chunk, header_bytes=PAGE, tenant=tenant
                )
                packed.append(stored)
                buffers += header, stored
                wanted += PAGE + chunk.nbytes
            by_cache = files.fills_cache()
            direct = files.direct and not by_cache and all(map(is_aligned, packed))
            slots = segment.slots(direct=direct)
            moved = vfs.pwritev(slots.fd, buffers, offset)
            if 0 < moved < wanted:
                slots = segment.slots(direct=False)
                moved = continued(vfs.pwritev, slots.fd, buffers, moved, offset)
            if moved != wanted:
                return "io_short"
            if by_cache:
                self._start_writeback(segment, wanted)
        except OSError as error:
            return reason_of(error)
        finally:
            for stored in packed:
                files.seal.done(stored)
        return None

    def _start_writeback(self, segment: Segment, written: int) -> None:
        segment.unwritten_bytes += written
        if segment.unwritten_bytes >= _WRITEBACK_BYTES:
            segment.unwritten_bytes = 0
            with contextlib.suppress(OSError):
                slots = segment.slots(direct=False)
                self.vfs.start_writeback(slots.fd)

    def take_over_all(self, names: Sequence[Name], chunk_bytes: int) -> dict[Name, SlotDraft]:
        taken, slot_bytes = dict[Name, SlotDraft](), bytes_on_disk(chunk_bytes)

        def take(run: Sequence[Name]) -> None:
            segment = self.segments.find(run[0]).segment
            if segment.is_own and segment.slot_bytes == slot_bytes:
                with self.segments.taken(*run) as at:
                    for i, name in enumerate(run):
                        taken[name] = SlotDraft(self, at.after(i), overwrites=True)

        self._by_runs(names, MOST_IN_RUN, take)
        return taken

    def _by_runs(
        self, names: Iterable[Name], most: int, work: Callable[[Sequence[Name]], None]
    ) -> None:
        """Do work on chunks in slots that follow one another; one by one, if one of them is gone.

        ``work`` may raise OSError: it has done nothing.
        """
        ordered = self.segments.in_order(names)
        for run in self.segments.runs(ordered, most):
            part = ordered[run.start : run.stop]
            for each in (part, *([name] for name in part)):
                with contextlib.suppress(OSError):
                    work(each)
                    if each is part:
                        break

    def used_ns(self, name: Name) -> int:
        at = self.segments.find(name)
        entry = at.segment.chunk(at.slot)
        if entry is None or entry.key != name[2:]:
            self.segments.forget(name, at)
            raise gone(name)
        return entry.used_ns

    def record_uses(self, uses: Mapping[Name, int]) -> None:
        def record(run: Sequence[Name]) -> None:
            segment, slot = self.segments.find(run[0])
            keys, times = [name[2:] for name in run], [uses[name] for name in run]
            with self.segments.lock:
                if not segment.set_used(slot, keys, times):
                    raise gone(run[0])

        self._by_runs(uses, _MOST_USES, record)

    def allocated_bytes(self, name: Name) -> int:
        try:
            return self.segments.find(name).segment.slot_bytes
        except FileNotFoundError:
            return 0

    def is_still(self, name: Name, seen: Seen) -> bool:
        at = self.segments.find(name)
        if at.place != seen:
            return False
        if key_in(at.segment.entry(at.slot)) != name[2:]:
            self.segments.forget(name, at)
            return False
        return True

    def sync(self, name: Name, *, is_new: bool) -> None:
        self.segments.find(name).segment.sync()

    def remove(self, name: Name) -> None:
        with self.segments.taken(name) as (segment, slot):
            self.segments.free(segment, slot)

    def set_aside(self, name: Name, path: str) -> None:
        segment, slot = self.segments.find(name)
        content = memoryview(bytearray(segment.slot_bytes))
        offset = slot * segment.slot_bytes
        slots = segment.slots(direct=False)
        moved = self.vfs.preadv(slots.fd, [content], offset)
        self.vfs.replace_file(path, self._temporary(), bytes(content[:moved]))
        try:
            self.remove(name)
        except OSError:
            self.vfs.unlink_quietly(path)
            raise
