"""One chunk, one file: written under a temporary name, renamed when it is whole.

Methods block, run on threads of the mount, and return a reason instead of raising OSError.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk.chunk_file import continued, reason_of, strangeness
from kvoffload.backends.disk.paths import shard_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.mount import Turn
from kvoffload.backends.folder.places import STORE, temporary_of
from kvoffload.backends.frames import Frames
from kvoffload.backends.header import ALIGNED_BYTES, Header, is_key, parse_header

_NO_FILE = (errno.EISDIR, errno.ESPIPE)
"""What a read of a folder, and one of a pipe, says."""


class Found(NamedTuple):
    """What a read found."""

    reason: str
    """Empty if there is a verdict; else ``missing``, ``io_<ERRNO>`` or ``corrupt_<what>``."""
    facts: os.stat_result | None = None
    """The file's facts, if it could be opened."""
    verdict: ReadResult | None = None
    """Of a file that was read as far as it may be the chunk."""


class ChunkFiles:
    """The chunk files of one namespace.

    A load opens one file. A store makes one file and renames it. The facts of an open file cost a
    FUSE mount one more question, where its kernel has part of them only.

    Args:
        vfs: makes the system calls.
        root: the folder of all namespaces.
        folder: that of this one.
        token: names this process's temporary files.
        frames: makes and checks headers, on the thread that moves the chunk: its core's cache has
            the bytes.
    """

    def __init__(self, vfs: Vfs, root: str, folder: str, token: str, frames: Frames) -> None:
        self._vfs = vfs
        self._root = root
        self._folder = folder
        self._token = token
        self._frames = frames
        self._numbers = itertools.count()
        self.has_new_folder = False
        """Whether a store made a shard: the namespace's folder may be new as well."""

    def path_of(self, key: bytes) -> str:
        return f"{self._folder}/{shard_of(key)}/{key.hex()}"

    def read(self, turn: Turn, key: bytes, into: memoryview, *, is_young: bool) -> Found:
        """Fill ``into`` with the chunk of the key's file, and verify it.

        ``is_young``: a hit needs no facts, because the file's time tells of a use already.
        """
        if not is_key(key):
            return Found("missing")
        vfs, path, header = self._vfs, self.path_of(key), self._frames.blank()
        try:
            fd = vfs.open(path, os.O_RDONLY)
        except OSError as error:
            return Found(reason_of(error))
        facts = verdict = None
        try:
            if is_young:
                verdict = self._verdict_at_once(turn, fd, key, header, into)
            if verdict:
                return Found("", None, verdict)
            facts = vfs.fstat(fd)
            if verdict is not None:
                return Found("", facts, verdict)
            if (strange := strangeness(facts)) is not None:
                return Found(strange, facts)
            is_of_this_length = facts.st_size == len(header) + into.nbytes
            wanted = [header, into] if is_of_this_length else [header]
            with turn.memory():
                moved = continued(vfs.preadv, fd, wanted, 0)
                if is_of_this_length and moved < facts.st_size:
                    return Found("corrupt_short", facts)
                why = _why_of_another_length(header[:moved], facts.st_size)
                if why and not is_of_this_length:
                    return Found(why, facts)
                return Found("", facts, self._frames.verdict(True, key, header, into))
        except OSError as error:
            return Found(reason_of(error), facts)
        finally:
            vfs.close_quietly(fd)

    def _verdict_at_once(
        self, turn: Turn, fd: int, key: bytes, header: memoryview, into: memoryview
    ) -> ReadResult | None:
        """Read and verify a file; None: it has another length, or it is a folder or a pipe.

        A read past the end would be one more question to a FUSE mount, just after a store.

        Raises:
            OSError: it cannot be read.
        """
        with turn.memory():
            try:
                moved = self._vfs.preadv(fd, [header, into], 0)
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                return None
            if moved != len(header) + into.nbytes or moved != self._vfs.known_bytes(fd):
                return None
            return self._frames.verdict(True, key, header, into)

    def write(self, turn: Turn, key: bytes, chunk: memoryview, tenant: bytes) -> str:
        """Store a chunk, in place of what is there; return why that failed, or an empty text."""
        try:
            with turn.memory():
                header, stored = self._frames.pack(key, chunk, tenant)
        except OSError as error:
            return reason_of(error)
        try:
            return self._write(turn, key, header, stored)
        finally:
            self._frames.done(stored)

    def _write(self, turn: Turn, key: bytes, header: bytes, chunk: memoryview) -> str:
        """Write a file, and give it its name.

        Some mounts tell of a full disk only as the file is closed: it gets its name afterwards.
        """
        vfs, path = self._vfs, self.path_of(key)
        shard, name = os.path.split(path)
        temporary = f"{shard}/{temporary_of(name, self._token, next(self._numbers))}"
        try:
            fd = self._create(temporary)
        except OSError as error:
            return reason_of(error)
        reason = "failed"
        try:
            try:
                with turn.memory():
                    moved = continued(vfs.pwritev, fd, [memoryview(header), chunk], 0)
            except BaseException:
                vfs.close_quietly(fd)
                raise
            vfs.close(fd)
            if moved != len(header) + chunk.nbytes:
                reason = "io_short"
            elif turn.is_given_up:
                reason = "late"
            else:
                vfs.rename(temporary, path)
                reason = ""
        except OSError as error:
            reason = reason_of(error)
        finally:  # also if it raises, as without memory
            if reason:
                vfs.unlink_quietly(temporary)
        return reason

    def exist(self, keys: Sequence[bytes], count: Callable[[str], None]) -> list[bool]:
        """Return for each key whether it has a file; ``count`` gets the reasons of failures."""
        return [self._exists(key, count) for key in keys]

    def remove(self, key: bytes) -> None:
        """Remove a chunk's file if there is one; raises OSError."""
        if is_key(key):
            with contextlib.suppress(FileNotFoundError):
                self._vfs.unlink(self.path_of(key))

    def remove_damaged(self, key: bytes, facts: os.stat_result) -> bool:
        """Remove a damaged file unless another one has its name by now; return whether it did."""
        path = self.path_of(key)
        try:
            there = self._vfs.lstat(path)
            if (there.st_ino, there.st_mtime_ns) != (facts.st_ino, facts.st_mtime_ns):
                return False
            self._vfs.unlink(path)
        except OSError:
            return False
        return True

    def _exists(self, key: bytes, count: Callable[[str], None]) -> bool:
        if not is_key(key):
            return False
        try:
            facts = self._vfs.lstat(self.path_of(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            count(f"lookup_{reason_of(error)}")
            return False
        return stat.S_ISREG(facts.st_mode) and facts.st_size > ALIGNED_BYTES

    def _create(self, temporary: str) -> int:
        """Create a file, and first the folders above it that are missing; raises OSError."""
        vfs, flags = self._vfs, os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return vfs.open(temporary, flags)
        except FileNotFoundError:
            # Without its mount the root is an empty folder of this host: nothing belongs there.
            vfs.lstat(f"{self._root}/{STORE}")
            vfs.make_folder(self._folder)
            vfs.make_folder(os.path.dirname(temporary))
            self.has_new_folder = True
            return vfs.open(temporary, flags)


def _why_of_another_length(header: memoryview, file_bytes: int) -> str:
    """Return why a file that is not as long as the chunk wanted is damaged; empty if it is not."""
    found = parse_header(header)
    if found == "short":
        return "corrupt_short"
    if isinstance(found, Header) and found.header_bytes + found.payload_bytes != file_bytes:
        return "corrupt_size"
    return ""
