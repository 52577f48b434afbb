"""Inspects a root without a backend: for ``kvoffload inspect``, ``verify`` and ``gc``.

Any number of engines may run meanwhile. The inspector checks each file again right before it
touches it, and releases the bytes of removed files from the shared quota.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash

from kvoffload.backends.disk import limits as disk_limits
from kvoffload.backends.disk import strays
from kvoffload.backends.disk.chunk_file import PAGE, reason_of, strangeness
from kvoffload.backends.disk.locks import count_alive, open_locked
from kvoffload.backends.disk.paths import (
    LEDGER,
    MANIFEST,
    OWNER,
    QUARANTINE,
    is_namespace,
    key_of,
    shard_of,
)
from kvoffload.backends.disk.quota import Quota, recorded_bytes
from kvoffload.backends.disk.root_checks import check_root, denied
from kvoffload.backends.disk.strays import Leftover
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import names_in, remove_namespace, walk
from kvoffload.backends.header import Header, parse_header

_MANIFEST_BYTES = 1 << 20


class ChunkFile(NamedTuple):
    """One stored chunk."""

    namespace: str
    """Name of its folder."""
    key: bytes
    path: str
    allocated_bytes: int
    stored_ns: int
    used_ns: int
    inode: int


class DiskInspector:
    """One root, inspected from outside."""

    def __init__(self, root: str, vfs: Vfs | None = None) -> None:
        """Open a root for inspection.

        Raises:
            ConfigError: it is no root of the disk backend, or belongs to another user.
        """
        self.root = os.path.realpath(os.path.expanduser(root))
        self.vfs = vfs or Vfs()
        self._quota: Quota | None = None
        self.unreadable: list[tuple[str, str]] = []
        """Folders that :meth:`chunks` could not list, and why."""
        check_root(self.vfs, self.root)

    def namespaces(self) -> list[str]:
        """Return the folder names of all namespaces."""
        return sorted(filter(is_namespace, self.vfs.listdir(self.root)))

    def manifest(self, namespace: str) -> dict[str, Any]:
        """Return the facts behind a namespace; empty if none were written."""
        try:
            path = f"{self.root}/{namespace}/{MANIFEST}"
            found = json.loads(self.vfs.read_file(path, _MANIFEST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def chunks(self, namespace: str | None = None) -> Iterator[ChunkFile]:
        """Yield all chunks, of one namespace or of all."""
        for folder in self.namespaces() if namespace is None else [namespace]:
            for shard, files in walk(self.vfs, f"{self.root}/{folder}", self._unlisted):
                for name, facts in files:
                    if (key := key_of(name)) is not None:
                        yield ChunkFile(
                            namespace=folder,
                            key=key,
                            path=f"{shard}/{name}",
                            allocated_bytes=facts.st_blocks * 512,
                            stored_ns=facts.st_mtime_ns,
                            used_ns=facts.st_atime_ns,
                            inode=facts.st_ino,
                        )

    def _unlisted(self, path: str, error: OSError) -> None:
        self._refuse_foreign(path, error)
        self.unreadable.append((path, reason_of(error)))

    def quarantined(self) -> list[str]:
        """Return the paths of damaged files in the quarantine."""
        folder = f"{self.root}/{QUARANTINE}"
        return [f"{folder}/{name}" for name in names_in(self.vfs, folder)]

    def processes(self) -> int:
        """Return how many backends have this root open."""
        return count_alive(self.vfs, self.root)

    def has_owner(self) -> bool:
        """Return whether one of them evicts."""
        try:
            fd = open_locked(self.vfs, f"{self.root}/{OWNER}", os.O_RDONLY, fcntl.LOCK_SH)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        self.vfs.close_quietly(fd)
        return False

    def booked_bytes(self) -> int | None:
        """Return the allocated bytes by the shared quota; None: see :meth:`ledger_fault`."""
        with contextlib.suppress(OSError):
            return recorded_bytes(self.vfs, f"{self.root}/{LEDGER}")
        return None

    def ledger_fault(self) -> str | None:
        """Return what is wrong with the quota's file; None if it is in order."""
        try:
            figure = recorded_bytes(self.vfs, f"{self.root}/{LEDGER}")
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"unreadable ({error.strerror})"
        return "damaged" if figure is None else None

    def capacity_bytes(self) -> int | None:
        """Return the recorded capacity; None if there is none, or see :meth:`limits_fault`."""
        with contextlib.suppress(ValueError):
            limits = disk_limits.read(self.vfs, self.root)
            return None if limits is None else limits.capacity_bytes
        return None

    def limits_fault(self) -> str | None:
        """Return why the recorded limits cannot be used; None if they can, or there are none."""
        try:
            disk_limits.read(self.vfs, self.root)
        except ValueError as error:
            return str(error)
        return None

    def _refuse_foreign(self, path: str, error: OSError) -> None:
        """Raise ConfigError if the error means: run this as another user."""
        if isinstance(error, PermissionError) and (refusal := denied(self.vfs, path)) is not None:
            raise refusal from error

    def verify(self, chunk: ChunkFile, buffer: memoryview) -> tuple[str | None, int]:
        """Read a chunk in pieces of ``buffer``; return what is wrong with it, and bytes read."""
        try:
            fd = self._open(chunk.path)
        except OSError as error:
            self._refuse_foreign(chunk.path, error)
            return reason_of(error), 0
        try:
            return self._verify(fd, chunk, buffer)
        except OSError as error:
            return reason_of(error), 0
        finally:
            self.vfs.close_quietly(fd)

    def _open(self, path: str) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            return self.vfs.open(path, flags | getattr(os, "O_NOATIME", 0))
        except PermissionError:
            # Only the owner may read without a change of the access time.
            return self.vfs.open(path, flags)

    def _verify(self, fd: int, chunk: ChunkFile, buffer: memoryview) -> tuple[str | None, int]:
        facts = self.vfs.fstat(fd)
        if (strange := strangeness(facts)) is not None:
            return strange, 0
        read = self.vfs.preadv(fd, [buffer[:PAGE]], 0)
        header = parse_header(buffer[:read])
        if not isinstance(header, Header):
            return f"corrupt_{header}", read
        shard = os.path.basename(os.path.dirname(chunk.path))
        if header.key != chunk.key or shard != shard_of(chunk.key):
            return "corrupt_key", read
        if header.namespace.hex() != chunk.namespace:
            return "corrupt_namespace", read
        if facts.st_size != PAGE + header.payload_bytes or header.header_bytes != PAGE:
            return "corrupt_size", read
        digest = xxhash.xxh3_128()
        while piece := self.vfs.preadv(fd, [buffer], read):
            digest.update(buffer[:piece])
            read += piece
        if read != facts.st_size:
            return "corrupt_short", read
        return (None if digest.digest() == header.checksum else "corrupt_payload"), read

    def require_write(self) -> None:
        """Refuse before anything is removed if nothing can be.

        Raises:
            ConfigError: the root belongs to another user, who has to do it.
        """
        if not os.access(self.root, os.W_OK, effective_ids=True):
            self._refuse_foreign(self.root, PermissionError())

    def remove(self, chunk: ChunkFile) -> int:
        """Remove a chunk unless it was replaced; return the bytes freed; raises OSError."""
        try:
            if self.vfs.lstat(chunk.path).st_ino != chunk.inode:
                return 0
            self.vfs.unlink(chunk.path)
        except FileNotFoundError:
            return 0
        self._release(chunk.allocated_bytes)
        return chunk.allocated_bytes

    def leftovers(self) -> list[Leftover]:
        """Return the folders that dead processes left."""
        return strays.leftovers(self.vfs, self.root)

    def remove_leftover(self, leftover: Leftover) -> int:
        """Remove a leftover; return the bytes freed; raises OSError."""
        self._release(strays.remove_leftover(self.vfs, leftover.path))
        return leftover.allocated_bytes

    def strays(self) -> list[str]:
        """Return the paths of foreign files under the root."""
        return list(strays.strays(self.vfs, self.root))

    def remove_quarantined(self, path: str) -> int:
        """Remove a damaged file; return the bytes freed; raises OSError, also for a folder."""
        allocated = self.allocated_bytes(path)
        with contextlib.suppress(FileNotFoundError):
            self.vfs.unlink(path)
            self._release(allocated)
        return allocated

    def allocated_bytes(self, path: str) -> int:
        """Return the bytes that one file takes up; 0 if it is gone."""
        try:
            return self.vfs.lstat(path).st_blocks * 512
        except OSError:
            return 0

    def remove_namespace_folder(self, namespace: str) -> bool:
        """Remove a namespace folder without chunks, unless a process has the root open."""
        if self.processes():
            return False
        return remove_namespace(self.vfs, f"{self.root}/{namespace}")

    def _release(self, allocated_bytes: int) -> None:
        """Release the bytes of removed files; a root without a quota file gets none."""
        if self._quota is None and os.path.exists(f"{self.root}/{LEDGER}"):
            self._quota = Quota(self.vfs, f"{self.root}/{LEDGER}", fresh=False)
        if self._quota is not None and allocated_bytes:
            self._quota.release(allocated_bytes)
