"""A segment: a file of equal slots, and the table that says which key is in which slot.

The table is a file of its own: file systems let direct writes of one file wait for its buffered
writes. ``docs/reference/format.md`` has the layout.
"""

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from kvoffload.backends.disk.descriptors import Descriptors, OpenFile
from kvoffload.backends.disk.locks import LOCK_WAIT_S, is_at, lock_patiently, open_locked
from kvoffload.backends.disk.paths import SEGMENTS, SLOTS, TABLE, stems_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import names_in
from kvoffload.backends.header import ALIGNED_BYTES, OTHER_VERSION, SEAL_BYTES, sealed

ENTRY_BYTES = 64
# magic, version, bytes of an entry, bytes of a slot; then a seal
_HEAD = struct.Struct("<8sHHQ36x")
_MAGIC, _VERSION = b"KVOSLOTS", 1
# last use and store in ns since the epoch, bytes of the key, key
_ENTRY = struct.Struct("<QQB47s")
_USED = struct.Struct("<Q")
MOST_KEY_BYTES = 47
_IS_KEY_LENGTH = bytes(0 < length <= MOST_KEY_BYTES for length in range(256))
_WRITING = 255
"""In place of a key's length: a chunk is being written."""
_LENGTH_AT, _KEY_AT = 16, 17
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ESPIPE, errno.ENXIO, errno.ENODEV)
"""What opening or reading something else in place of a file fails with."""
_CLOCK_STEP_NS = 1_000_000_000
_MOST_GROWTH_BYTES = 64 << 20
_LEAST_TAKEN, _TAKEN_SHARE = 64, 8
_WORDS = ENTRY_BYTES // 8
_COMPARED_BYTES = 64 * ENTRY_BYTES
FREE = bytes(ENTRY_BYTES)
WRITING = FREE[:_LENGTH_AT] + bytes([_WRITING]) + FREE[_LENGTH_AT + 1 :]


class Entry(NamedTuple):
    """What the table says about a slot with a chunk."""

    used_ns: int
    stored_ns: int
    key: bytes


def pack_entry(key: bytes, now_ns: int) -> bytes:
    """Return the entry of a chunk that is stored now."""
    return _ENTRY.pack(now_ns, now_ns, len(key), key)


def key_in(entry: bytes | bytearray) -> bytes | None:
    """Return the key of an entry's chunk; None: the slot has none."""
    length = entry[_LENGTH_AT]
    if not 0 < length <= MOST_KEY_BYTES:
        return None
    return bytes(entry[_KEY_AT : _KEY_AT + length])


def used_in(entry: bytes | bytearray) -> int:
    """Return when an entry's chunk was used last, in ns since the epoch."""
    used_ns: int = _USED.unpack_from(entry)[0]
    return used_ns


def stored_in(entry: bytes | bytearray) -> int:
    """Return when an entry's chunk was stored, in ns since the epoch."""
    stored_ns: int = _USED.unpack_from(entry, _USED.size)[0]
    return stored_ns


class Segment:
    """One segment, of which nothing stays open but a lock. Callers serialize what they write."""

    def __init__(
        self,
        files: Descriptors,
        stem: str,
        slot_bytes: int,
        number: int,
        locked: OpenFile | None = None,
    ) -> None:
        """Open nothing; ``stem``: path of both files without their endings.

        ``locked``: the table, if it is locked.
        """
        self.vfs = files.vfs
        self._files = files
        self.stem = stem
        self.slot_bytes = slot_bytes
        self.number = number
        """Of the namespace."""
        self.place = 0
        """Among those that the process has open."""
        self.is_own = False
        """Whether this process has it locked to store in it."""
        self.table = bytearray()
        """The entries as this process knows them."""
        self.free: list[int] = []
        """Slots to use next, if it is an own one: the last first."""
        self.stuck: dict[int, int] = {}
        """Own slots to be freed, with the bytes that the quota counts of each."""
        self.leaving: dict[int, float] = {}
        """Own slots that other processes may be freeing, with when this one learnt of each."""
        self.freeing: list[int] = []
        """Slots that threads of this process are freeing."""
        self.is_tidy = False
        """Whether a clean-up has seen the table as it is known."""
        self.taken = 0
        """Slots taken since this process read the table last."""
        self.unwritten_bytes = 0
        """Bytes since the kernel was last told to write them."""
        self.file_bytes = 0
        """The length that this process gave the file of slots."""
        self._mtime_ns = -1
        self._locked = locked
        """The table as it is open for its lock alone; None: it is not locked."""

    # ---- the files -------------------------------------------------------------------------

    def slots(self, *, direct: bool, to_read: bool = False) -> OpenFile:
        """Open the slots; raises OSError."""
        # A reader of a removed segment must not make the file again, for it would stay.
        made = os.O_CREAT if self.is_own else 0
        flags = os.O_RDWR | made | (os.O_DIRECT if direct else 0)
        return self._files.get(self.stem + SLOTS, flags, direct=direct, to_read=to_read)

    def _table(self, *, to_read: bool = False) -> OpenFile:
        return self._files.get(self.stem + TABLE, os.O_RDWR, to_read=to_read)

    def lock(self) -> bool:
        """Lock the segment if it is there and no process has it locked; raises OSError."""
        vfs, path, locked = self.vfs, self.stem + TABLE, self._locked
        try:
            if locked is None:  # else it was locked before an error
                locked = OpenFile(vfs, open_locked(vfs, path, os.O_RDWR, fcntl.LOCK_EX))
        except (BlockingIOError, FileNotFoundError):
            return False
        self._locked = locked if is_at(vfs, locked.fd, path) else None
        return self._locked is not None

    def unlock(self) -> None:
        self._locked = None

    def close(self) -> None:
        """Close what no thread uses."""
        self.unlock()
        self._files.drop(self.stem + SLOTS, self.stem + TABLE)

    def sync(self) -> None:
        for file in (self.slots(direct=False), self._table()):
            self.vfs.fsync(file.fd)

    def unlink(self) -> None:
        """Remove both files, of a segment without chunks that the caller has locked."""
        self.vfs.unlink_quietly(self.stem + SLOTS)
        self.vfs.unlink(self.stem + TABLE)

    def lengthen(self, slots: int) -> None:
        """Make the file long enough for twice as many slots, or 64 MiB more; raises OSError.

        XFS gives a file that grows by writing as much room again, 8 GiB at most. The quota does not
        count that room. This call takes none.
        """
        wanted = slots * self.slot_bytes
        file_bytes = wanted + min(wanted, _MOST_GROWTH_BYTES)
        self.vfs.set_length(self.slots(direct=False).fd, file_bytes)
        self.file_bytes = file_bytes

    # ---- one slot --------------------------------------------------------------------------

    def free_blocks(self, slot: int) -> None:
        """Give the room of a slot back to the file system; raises OSError."""
        with contextlib.suppress(FileNotFoundError):  # without the file, no slot has room
            slots = self.slots(direct=False)
            self.vfs.punch(slots.fd, slot * self.slot_bytes, self.slot_bytes)

    def entry(self, slot: int) -> bytearray:
        """Read the entry of a slot from the table."""
        entry = bytearray(ENTRY_BYTES)
        table = self._table(to_read=True)
        self.vfs.preadv(table.fd, [entry], _offset(slot))
        return entry

    def chunk(self, slot: int) -> Entry | None:
        """Read what the table says about a slot; None: it has no chunk."""
        entry = self.entry(slot)
        key = key_in(entry)
        used_ns, stored_ns, _, _ = _ENTRY.unpack(entry)
        return None if key is None else Entry(used_ns, stored_ns, key)

    def set_entry(self, slot: int, entry: bytes) -> None:
        """Write the entry of a slot, or those of slots that follow one another: all or none."""
        start = slot * ENTRY_BYTES
        try:
            self._write(entry, _offset(slot))
        except OSError:
            if len(entry) > ENTRY_BYTES:  # a page of the table may have taken the first of them
                before = self.table[start : start + len(entry)].ljust(len(entry), b"\0")
                with contextlib.suppress(OSError):
                    self._write(before, _offset(slot))
            raise
        if start > len(self.table):
            self.table.extend(bytes(start - len(self.table)))
        self.table[start : start + len(entry)] = entry

    def claim(self, slot: int, *keys: bytes) -> bytes | None:
        """Mark a slot with a chunk as being written, and return its entry; raises OSError.

        None: the slot has no such chunk. Of several processes, one claims it. With several keys
        it is that slot and the next ones: all of them, or none.
        """
        with self._locked_entries(slot, keys) as entries:
            if entries is None:
                return None
            self.set_entry(slot, WRITING * len(keys))
            return bytes(entries)

    @contextlib.contextmanager
    def _locked_entries(self, slot: int, keys: Sequence[bytes]) -> Iterator[bytearray | None]:
        """Keep other processes from the entries of chunks in slots that follow one another.

        Yields the entries; None: a slot has no such chunk. Callers keep other threads from them.
        """
        table, part = self._table(), (_offset(slot), len(keys) * ENTRY_BYTES)
        if not lock_patiently(LOCK_WAIT_S, self.vfs.lock_part, table.fd, fcntl.F_WRLCK, *part):
            raise BlockingIOError(errno.EAGAIN, "locked by another process", self.stem + TABLE)
        try:
            entries = bytearray(part[1])
            self.vfs.preadv(table.fd, [entries], part[0])
            starts = range(0, part[1], ENTRY_BYTES)
            found = [key_in(entries[start : start + ENTRY_BYTES]) for start in starts]
            yield entries if found == [*keys] else None
        finally:
            self.vfs.lock_part(table.fd, fcntl.F_UNLCK, *part)

    def set_used(self, slot: int, keys: Sequence[bytes], uses_ns: Sequence[int]) -> bool:
        """Note uses of the chunks of slots that follow one another; False: one is gone.

        While the part is locked, no other process changes an entry that has a chunk.
        """
        with self._locked_entries(slot, keys) as entries:
            if entries is None:
                return False
            for i, used_ns in enumerate(uses_ns):
                _USED.pack_into(entries, i * ENTRY_BYTES, used_ns)
            self._write(entries, _offset(slot))
            return True

    def _write(self, data: bytes | bytearray, offset: int) -> None:
        table = self._table()
        _write(self.vfs, table.fd, data, offset)

    def note_change(self, slot: int, before: bytes, now: bytes) -> None:
        """Note what another process changed in an own segment.

        Until it says that a slot is free, it may be about to free the blocks. A chunk that was
        stored there meanwhile would be lost.
        """
        if key_in(now) is not None:
            return
        if key_in(before) is not None and slot not in self.stuck:
            self.leaving[slot] = time.monotonic()
        if not now[_LENGTH_AT] and self.leaving.pop(slot, None) is not None:
            self.free.append(slot)

    def take_abandoned(self, after_s: float) -> None:
        """Count slots as stuck that a process did not free in this time: it is dead."""
        for slot, since in list(self.leaving.items()):
            if time.monotonic() - since > after_s:
                del self.leaving[slot]
                self.stuck.setdefault(slot, 0)

    # ---- all slots -------------------------------------------------------------------------

    def take_changes(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Read the table; yield each slot whose entry changed, the entry before, and the new."""
        changed_ns = self.vfs.lstat(self.stem + TABLE).st_mtime_ns
        # Within one step of the clock the table may change again and keep its time.
        self._mtime_ns = changed_ns if time.time_ns() - changed_ns > _CLOCK_STEP_NS else -1
        before, self.is_tidy, self.taken = self.table, False, 0
        self.read_table()
        before.extend(bytes(max(0, len(self.table) - len(before))))
        self.table.extend(bytes(len(before) - len(self.table)))
        old, new = bytes(before), bytes(self.table)
        for start in range(0, len(new), _COMPARED_BYTES):
            if old[start : start + _COMPARED_BYTES] == new[start : start + _COMPARED_BYTES]:
                continue
            for at in range(start, min(start + _COMPARED_BYTES, len(new)), ENTRY_BYTES):
                was, now = old[at : at + ENTRY_BYTES], new[at : at + ENTRY_BYTES]
                if was != now:
                    yield at // ENTRY_BYTES, was, now

    def has_changed(self) -> bool:
        """Return whether the table may have changed since it was read; raises OSError."""
        try:
            return self.vfs.lstat(self.stem + TABLE).st_mtime_ns != self._mtime_ns
        except FileNotFoundError:
            return False  # the next look into its folder forgets it

    def chunks(self) -> Iterator[tuple[int, Entry]]:
        """Yield each slot with a chunk as this process knows them, with its entry."""
        # Of a copy: a table that is being read could not grow, and the store that needs it fails.
        for slot, fields in enumerate(_ENTRY.iter_unpack(bytes(self.table))):
            used_ns, stored_ns, length, key = fields
            if 0 < length <= MOST_KEY_BYTES:
                yield slot, Entry(used_ns, stored_ns, key[:length])

    def count(self) -> tuple[int, int]:
        """Return the number of chunks, and the first of their last uses; callers serialize."""
        has_chunk = self.table[_LENGTH_AT::ENTRY_BYTES].translate(_IS_KEY_LENGTH)
        with memoryview(self.table) as table, table.cast("Q") as words, words[::_WORDS] as used_ns:
            return has_chunk.count(1), min(compress(used_ns, has_chunk), default=0)

    def known(self, slot: int) -> bytearray:
        """Return the entry of a slot as this process knows it."""
        return self.table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]

    def free_slots(self) -> list[int]:
        return [i for i, length in enumerate(self.table[_LENGTH_AT::ENTRY_BYTES]) if not length]

    def written_slots(self) -> list[int]:
        """Return the slots that are being written; damaged entries count as such."""
        lengths = self.table[_LENGTH_AT::ENTRY_BYTES]
        if max(lengths, default=0) <= MOST_KEY_BYTES:
            return []
        return [i for i, length in enumerate(lengths) if length > MOST_KEY_BYTES]

    @property
    def num_used(self) -> int:
        """Slots that are not free, as this process knows them."""
        return len(self.table[_LENGTH_AT::ENTRY_BYTES].replace(b"\0", b""))

    @property
    def may_have_free(self) -> bool:
        """Whether to read the table before it grows: other processes free slots, too.

        Reading it as often as an eighth of its slots is taken bounds both its growth and the reads.
        """
        slots = len(self.table) // ENTRY_BYTES
        return not self.free and self.taken >= max(_LEAST_TAKEN, slots // _TAKEN_SHARE)

    def read_table(self) -> None:
        """Read all entries; raises OSError."""
        file = self._table(to_read=True)
        size = self.vfs.fstat(file.fd).st_size - ENTRY_BYTES
        table, done = bytearray(max(0, size // ENTRY_BYTES * ENTRY_BYTES)), 0
        view = memoryview(table)
        while done < len(table):
            moved = self.vfs.preadv(file.fd, [view[done:]], ENTRY_BYTES + done)
            if moved <= 0:
                break
            done += moved
        view.release()
        self.table = table


def open_segment(files: Descriptors, stem: str, number: int = 0) -> Segment:
    """Open a segment; OSError: it cannot be read.

    Raises:
        ValueError: it is of another version, :data:`OTHER_VERSION`, or damaged: its head is, or its
            table is a folder, a link or a device.
    """
    try:
        head = bytearray(_HEAD.size + SEAL_BYTES)
        table = files.get(stem + TABLE, os.O_RDWR, to_read=True)
        files.vfs.preadv(table.fd, [head], 0)
        return Segment(files, stem, _slot_bytes_in(head), number)
    except ValueError:
        files.drop(stem + TABLE)
        raise
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ValueError("header") from error
        raise


def _slot_bytes_in(head: bytearray) -> int:
    """Return the bytes of a slot by the head of a table; ValueError: it is damaged."""
    magic, version, entry_bytes, slot_bytes = _HEAD.unpack_from(head)
    if magic != _MAGIC or head != sealed(bytes(head[: _HEAD.size])):
        raise ValueError("header")
    is_whole = slot_bytes % ALIGNED_BYTES == 0 and slot_bytes >= ALIGNED_BYTES
    if (version, entry_bytes) != (_VERSION, ENTRY_BYTES) or not is_whole:
        raise ValueError(OTHER_VERSION)
    return int(slot_bytes)


def make_segment(
    files: Descriptors, stem: str, temporary: str, slot_bytes: int, *, durable: bool
) -> Segment:
    """Make a locked segment without chunks; raises OSError.

    It is made under a temporary name: no process sees it unlocked.
    """
    vfs, folder = files.vfs, os.path.dirname(stem)
    vfs.make_folder(folder, durable=durable)
    head = sealed(_HEAD.pack(_MAGIC, _VERSION, ENTRY_BYTES, slot_bytes))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    locked = OpenFile(vfs, open_locked(vfs, temporary, flags, fcntl.LOCK_EX))
    made = Segment(files, stem, slot_bytes, 0, locked)
    try:
        _write(vfs, locked.fd, head, 0)
        vfs.rename(temporary, stem + TABLE)
    except BaseException:
        vfs.unlink_quietly(temporary)
        raise
    made.is_own = True
    if durable:
        made.sync()
        vfs.sync(folder)
    return made


def segments_in(
    files: Descriptors,
    folder: str,
    failed: Callable[[str, OSError | ValueError], None] = lambda stem, e: None,
) -> Iterator[Segment]:
    """Open the segments of a namespace folder one after the other, with their tables read.

    ``failed`` is called with each one that cannot be read, and the error.
    """
    inner = f"{folder}/{SEGMENTS}"
    for stem in sorted(stems_of(names_in(files.vfs, inner))):
        try:
            segment = open_segment(files, f"{inner}/{stem}")
            segment.read_table()
            yield segment
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            failed(f"{inner}/{stem}{TABLE}", error)


def remove_empty(vfs: Vfs, folder: str) -> None:
    """Remove the segments of a namespace folder that are empty and that no process has locked."""
    for segment in segments_in(Descriptors(vfs), folder):
        with contextlib.suppress(OSError):
            if segment.lock() and not segment.num_used:
                segment.unlink()
        segment.close()


def remove_damaged(vfs: Vfs, stem: str) -> None:
    """Remove a segment whose table no process can read, unless one has it locked."""
    fd = open_locked(vfs, stem + TABLE, os.O_RDWR, fcntl.LOCK_EX)
    try:
        vfs.unlink_quietly(stem + SLOTS)
        vfs.unlink(stem + TABLE)
    finally:
        vfs.close_quietly(fd)


def _offset(slot: int) -> int:
    return (1 + slot) * ENTRY_BYTES


def _write(vfs: Vfs, fd: int, data: bytes | bytearray, offset: int) -> None:
    if vfs.pwritev(fd, [data], offset) != len(data):
        raise OSError(errno.EIO, "short write")
