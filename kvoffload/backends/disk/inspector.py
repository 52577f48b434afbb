"""Inspects a root without a backend: for ``kvoffload inspect``, ``verify`` and ``gc``.

Any number of engines may run meanwhile. The inspector checks each file again right before it
touches it, and releases the bytes of removed files from the shared quota. It reaches all files from
the descriptor of a root that belongs to its own user: no other user can lead it elsewhere.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from kvoffload.backends.disk import limits, manifest, paths
from kvoffload.backends.disk.chunk_file import PAGE, check, reason_of
from kvoffload.backends.disk.descriptors import Descriptors
from kvoffload.backends.disk.locks import (
    clean_folder,
    count_alive,
    is_at,
    is_dead,
    is_locked,
    is_older,
)
from kvoffload.backends.disk.paths import LEDGER, QUARANTINE, SCRATCH, SLOTS, WRITERS, shard_of
from kvoffload.backends.disk.quota import Quota, recorded_bytes
from kvoffload.backends.disk.root_checks import (
    check_root,
    denied,
    enter_safely,
    refuse_unsafe_inside,
)
from kvoffload.backends.disk.segment import FREE, Segment, remove_empty, segments_in
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import names_in, remove_namespace, walk
from kvoffload.backends.header import OTHER_VERSION, Header, counted_as, parse_header
from kvoffload.backends.seals import Seal

Names = tuple[str, ...]
_SCRATCH_S = 600
"""Longer than any run of ``kvoffload doctor``: the process of an older folder died."""


class Chunk(NamedTuple):
    """One stored chunk, in a file of its own or in a slot of a segment."""

    namespace: str
    """Name of its folder."""
    key: bytes
    file: str
    """Path of the file that has it."""
    allocated_bytes: int
    used_ns: int
    stored_ns: int
    inode: int = 0
    """Of a file of its own."""
    segment: Segment | None = None
    """None: it has a file of its own."""
    slot: int = 0

    @property
    def path(self) -> str:
        """Return the path of its file; in a segment, with the number of the slot."""
        return self.file if self.segment is None else f"{self.file}#{self.slot}"

    def is_in(self, segment: Segment) -> bool:
        """Return whether its slot still has this very chunk; raises OSError."""
        now = segment.chunk(self.slot)
        return now is not None and (now.stored_ns, now.key) == (self.stored_ns, self.key)


class Waste(NamedTuple):
    """A damaged file, or the folder of a dead process."""

    path: str
    allocated_bytes: int


class DiskInspector:
    """One root, inspected from outside."""

    in_root: Names = (paths.BOUNDS, LEDGER, paths.OWNER, QUARANTINE, WRITERS, "lost+found")
    in_namespace: Names = (paths.MANIFEST, paths.SNAPSHOT, paths.SEGMENTS, *paths.SHARDS)
    passing: Names = (SCRATCH,)
    """How names in the root begin of what comes and goes."""
    passing_inside: Names = ()
    """And names below it."""

    def __init__(self, root: str, vfs: Vfs | None = None) -> None:
        """Open a root; ConfigError: it is none, or another user owns it or may write it."""
        self.root = os.path.realpath(os.path.expanduser(root))
        self.vfs = vfs or Vfs()
        self._files = Descriptors(self.vfs)
        self._quota: Quota | None = None
        self.unreadable: list[tuple[str, str]] = []
        """Folders that :meth:`chunks` could not list, and why."""
        self.check_root()
        enter_safely(self.vfs, self.root, trust_parents=True)
        self.check_root()  # again: another folder may have got the name meanwhile

    def check_root(self) -> None:
        """Raise ConfigError for a folder that is no root."""
        check_root(self.vfs, self.root)

    def close(self) -> None:
        if self._quota is not None:
            self._quota.close()
        self.vfs.leave()

    # ---- what is there ---------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        return sorted(filter(paths.is_namespace, self.vfs.listdir(self.root)))

    def manifest(self, namespace: str) -> dict[str, Any]:
        """Return the facts behind a namespace; empty if none were written."""
        return manifest.read(self.vfs, f"{self.root}/{namespace}")

    def chunks(self, namespace: str | None = None) -> Iterator[Chunk]:
        """Yield all chunks, of one namespace or of all."""
        for folder in self.namespaces() if namespace is None else [namespace]:
            for shard in walk(self.vfs, f"{self.root}/{folder}", partial(self._unlisted, folder)):
                for key, facts in shard.chunks:
                    path, size = f"{shard.path}/{key.hex()}", facts.st_blocks * 512
                    used_ns, stored_ns = facts.st_atime_ns, facts.st_mtime_ns
                    yield Chunk(folder, key, path, size, used_ns, stored_ns, facts.st_ino)
            for segment in segments_in(self._files, f"{self.root}/{folder}", self._unreadable):
                path, size = segment.stem + SLOTS, segment.slot_bytes
                for slot, (used_ns, stored_ns, key) in segment.chunks():
                    yield Chunk(folder, key, path, size, used_ns, stored_ns, 0, segment, slot)

    def _unreadable(self, path: str, error: OSError | ValueError) -> None:
        if isinstance(error, OSError):
            self._refuse_foreign(path, error)
            self.unreadable.append((path, reason_of(error)))
        elif str(error) != OTHER_VERSION:
            self.unreadable.append((path, counted_as(str(error))))

    def _unlisted(self, folder: str, shard: str, error: OSError) -> None:
        self._unreadable(f"{self.root}/{folder}/{shard}", error)

    def quarantined(self) -> list[Waste]:
        """Return the files set aside as damaged; none if they cannot be listed."""
        folder, found = f"{self.root}/{QUARANTINE}", []
        with contextlib.suppress(OSError):
            for name, facts in self.vfs.listfacts(folder):
                found.append(Waste(f"{folder}/{name}", facts.st_blocks * 512))
        return sorted(found)

    def leftovers(self) -> list[Waste]:
        """Return the folders of dead writers, and of killed runs of ``kvoffload doctor``."""
        writers = f"{self.root}/{WRITERS}"
        folders = [f"{writers}/{name}" for name in names_in(self.vfs, writers)]
        left = [folder for folder in folders if is_dead(self.vfs, folder)]
        inner = (f"{self.root}/{n}" for n in names_in(self.vfs, self.root) if n.startswith(SCRATCH))
        left += (folder for folder in inner if is_older(self.vfs, folder, _SCRATCH_S))
        return [Waste(folder, self.vfs.allocated_below(folder)) for folder in left]

    def strays(self) -> Iterator[str]:
        """Yield the paths of foreign files under the root; skips folders that cannot be listed."""
        for name in names_in(self.vfs, self.root):
            path = f"{self.root}/{name}"
            if paths.is_namespace(name):
                inner = [each for each in names_in(self.vfs, path) if each not in self.in_namespace]
                below = [(path, inner)]
                below += ((shard.path, sorted(shard.strays)) for shard in walk(self.vfs, path))
                for folder, names in below:
                    strays = (each for each in names if not each.startswith(self.passing_inside))
                    yield from (f"{folder}/{each}" for each in strays)
            elif name not in self.in_root and not name.startswith(self.passing):
                yield path

    # ---- who uses it, and how much ---------------------------------------------------------

    def processes(self) -> int:
        """Return how many backends have this root open."""
        return count_alive(self.vfs, self.root)

    def has_owner(self) -> bool:
        """Return whether one of them evicts."""
        return is_locked(self.vfs, self.root, paths.OWNER) is True

    def ledger(self) -> tuple[int | None, str | None]:
        """Return the allocated bytes by the shared quota, or what is wrong with its file."""
        try:
            figure = recorded_bytes(self.vfs, f"{self.root}/{LEDGER}")
        except FileNotFoundError:
            return None, "missing"
        except OSError as error:
            return None, f"unreadable ({error.strerror})"
        return figure, "damaged" if figure is None else None

    def capacity(self) -> tuple[int | None, str | None]:
        """Return the recorded capacity if there is one, or why the limits cannot be used."""
        try:
            recorded = limits.read(self.vfs, self.root)
        except ValueError as error:
            return None, str(error)
        return recorded.capacity_bytes if recorded else None, None

    # ---- one chunk -------------------------------------------------------------------------

    def verify(
        self, chunk: Chunk, buffer: memoryview, cipher: Seal | None = None
    ) -> tuple[str | None, int]:
        """Read a chunk in pieces of ``buffer``; return why loads miss it, and bytes read."""
        key, namespace = chunk.key, bytes.fromhex(chunk.namespace)
        try:
            with self._opened(chunk) as (fd, slot):
                reason, read = check(self.vfs, fd, key, namespace, buffer, cipher, slot)
                segment = chunk.segment
                if not (chunk.is_in(segment) if segment else is_at(self.vfs, fd, chunk.file)):
                    return "missing", read  # another one may have its place by now
        except OSError as error:
            self._refuse_foreign(chunk.file, error)
            return reason_of(error), 0
        is_misplaced = slot is None and chunk.file.split("/")[-2] != shard_of(key)
        return ("corrupt_key" if reason is None and is_misplaced else reason), read

    def header(self, chunk: Chunk) -> Header | str:
        """Return a chunk's header, or why there is none."""
        page = memoryview(bytearray(PAGE))
        try:
            with self._opened(chunk) as (fd, slot):
                return parse_header(page[: self.vfs.preadv(fd, [page], slot.start if slot else 0)])
        except OSError as error:
            self._refuse_foreign(chunk.file, error)
            return reason_of(error)

    @contextlib.contextmanager
    def _opened(self, chunk: Chunk) -> Iterator[tuple[int, range | None]]:
        """Open the file of a chunk, and tell in which part of it the chunk is; raises OSError."""
        if chunk.segment is not None:
            file, size = chunk.segment.slots(direct=False, to_read=True), chunk.allocated_bytes
            yield file.fd, range(chunk.slot * size, (chunk.slot + 1) * size)
            return
        try:
            fd = self.vfs.open(chunk.file, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
        except PermissionError:
            # Only the owner may read without a change of the access time.
            fd = self.vfs.open(chunk.file, os.O_RDONLY)
        try:
            yield fd, None
        finally:
            self.vfs.close_quietly(fd)

    # ---- removal: each method returns the bytes freed, and raises OSError ------------------

    def _refuse_foreign(self, path: str, error: OSError) -> None:
        """Raise ConfigError if the error means: run this as another user."""
        if isinstance(error, PermissionError) and (refusal := denied(self.vfs, path)) is not None:
            raise refusal from error

    def remove(self, chunk: Chunk) -> int:
        """Remove a chunk unless it was replaced."""
        if (segment := chunk.segment) is not None:
            if not chunk.is_in(segment) or segment.claim(chunk.slot, chunk.key) is None:
                return 0
            segment.free_blocks(chunk.slot)
            segment.set_entry(chunk.slot, FREE)
            self._release(chunk.allocated_bytes)
            return chunk.allocated_bytes
        try:
            is_same = self.vfs.lstat(chunk.file).st_ino == chunk.inode
        except FileNotFoundError:
            return 0
        return self.unlink(chunk.file, chunk.allocated_bytes) if is_same else 0

    def unlink(self, path: str, allocated_bytes: int) -> int:
        try:
            self.vfs.unlink(path)
        except FileNotFoundError:
            return 0
        self._release(allocated_bytes)
        return allocated_bytes

    def remove_leftover(self, leftover: Waste) -> int:
        if os.path.basename(leftover.path).startswith(SCRATCH):
            self.vfs.remove_tree(leftover.path)
        else:
            self._release(clean_folder(self.vfs, leftover.path))
        return leftover.allocated_bytes

    def remove_namespace_folder(self, namespace: str) -> bool:
        """Remove a namespace folder without chunks, unless a process has the root open."""
        folder = f"{self.root}/{namespace}"
        if self.processes():
            return False
        remove_empty(self.vfs, folder)
        return remove_namespace(self.vfs, folder)

    def _release(self, allocated_bytes: int) -> None:
        """Release the bytes of removed files; a root without a quota file gets none."""
        if self._quota is None:
            with contextlib.suppress(FileNotFoundError):
                self.vfs.lstat(f"{self.root}/{LEDGER}")
                self._quota = Quota(self.vfs, f"{self.root}/{LEDGER}", fresh=False)
        if self._quota is not None and allocated_bytes:
            self._quota.release(allocated_bytes)


@contextlib.contextmanager
def inspected(root: str) -> Iterator[DiskInspector]:
    """Open a root; ConfigError: see the constructor, or a folder in it is not safe either."""
    with contextlib.closing(DiskInspector(root)) as found:
        refuse_unsafe_inside(found.vfs, found.root)
        yield found
