"""One chunk in a slot of a segment: read and verified in the caller's memory, written from it."""

import contextlib
import os
from collections.abc import Sequence

from kvoffload.backends.disk.chunk_file import (
    PAGE,
    ChunkFiles,
    continued,
    is_aligned,
    reason_of,
)
from kvoffload.backends.disk.segment import Segment
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import counted_as

_WRITEBACK_BYTES = 1 << 20
"""The kernel is told to write what has gathered in so large parts: each call takes time."""


def probe_holes(vfs: Vfs, scratch: str) -> str | None:
    """Try whether the file system frees a part of a file; return why not, or None."""
    try:
        fd = vfs.open(scratch, os.O_RDWR | os.O_CREAT)
        try:
            vfs.pwritev(fd, [bytes(PAGE), bytes(PAGE)], 0)
            before = vfs.fstat(fd).st_blocks
            vfs.punch(fd, 0, PAGE)
            # With larger blocks than a page, or no holes at all, it only writes zeros.
            return None if vfs.fstat(fd).st_blocks < before else "their room stays"
        finally:
            vfs.close_quietly(fd)
            vfs.unlink_quietly(scratch)
    except OSError as error:
        return error.strerror or str(error)


class ChunkSlots:
    """Reads and writes chunks in slots, by the way of I/O of ``files``. Thread-safe."""

    def __init__(self, files: ChunkFiles) -> None:
        self._files = files
        self._vfs = files.vfs

    def read(
        self,
        segment: Segment,
        slot: int,
        keys: Sequence[bytes],
        namespace: bytes,
        targets: Sequence[memoryview],
    ) -> list[str | None]:
        """Fill targets with the chunks of slots that follow one another, by one call.

        Returns for each a counter's reason, or None. All but the last one fill their slots.
        """
        files, vfs, slot_bytes = self._files, self._vfs, segment.slot_bytes
        if PAGE + targets[-1].nbytes > slot_bytes:
            return [counted_as("size")] * len(keys)
        headers, offset = files.pages(len(keys)), slot * slot_bytes
        buffers = [buffer for pair in zip(headers, targets, strict=True) for buffer in pair]
        wanted = sum([buffer.nbytes for buffer in buffers])
        try:
            moved = self._read_cached(segment, buffers, wanted, offset) if files.room else 0
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
                is_whole = moved >= PAGE + target.nbytes
                reason = files.seal.fault(header, target, key, namespace) if is_whole else "short"
                reason = "size" if reason == "length" else reason
                reasons.append(None if reason is None else counted_as(reason))
            moved -= slot_bytes
        return reasons

    def write(
        self,
        segment: Segment,
        slot: int,
        keys: Sequence[bytes],
        namespace: bytes,
        chunks: Sequence[memoryview],
        tenants: Sequence[bytes],
    ) -> str | None:
        """Write chunks into slots that follow one another, by one call; return a counter's reason.

        The table names none of the slots. After a failure some of them may have their chunks.
        """
        files, vfs, offset = self._files, self._vfs, slot * segment.slot_bytes
        buffers, packed, wanted = list[memoryview](), list[memoryview](), 0
        try:
            for header, key, chunk, tenant in zip(
                files.pages(len(keys)), keys, chunks, tenants, strict=True
            ):
                header[:], stored = files.seal.pack(
                    key, namespace, chunk, header_bytes=PAGE, tenant=tenant
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

    def _read_cached(
        self, segment: Segment, buffers: list[memoryview], wanted: int, offset: int
    ) -> int:
        """Read chunks if the page cache has all of them; return the bytes read."""
        with contextlib.suppress(OSError):  # the read that follows tells of an error that lasts
            slots = segment.slots(direct=False, to_read=True)
            if self._vfs.is_cached(slots.fd, wanted, offset) and (
                (moved := self._vfs.read_cached(slots.fd, buffers, offset)) >= wanted
            ):
                return moved
        self._files.expect_wait()
        return 0

    def _start_writeback(self, segment: Segment, written: int) -> None:
        segment.unwritten_bytes += written
        if segment.unwritten_bytes >= _WRITEBACK_BYTES:
            segment.unwritten_bytes = 0
            with contextlib.suppress(OSError):
                slots = segment.slots(direct=False)
                self._vfs.start_writeback(slots.fd)
