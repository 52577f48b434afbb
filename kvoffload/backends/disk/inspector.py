"""A root of the disk backend seen from outside: for ``kvoffload inspect``, ``verify`` and ``gc``.

Works on files and locks alone, beside any number of running engines: everything is re-checked at
the moment it is touched, and removals are booked in the shared ledger.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash

from kvoffload.backends.disk import limits as disk_bounds
from kvoffload.backends.disk.chunk_file import PAGE, reason_of, strangeness
from kvoffload.backends.disk.locks import count_alive
from kvoffload.backends.disk.paths import (
    LEDGER,
    MANIFEST,
    OWNER,
    QUARANTINE,
    SHARDS,
    is_namespace,
    key_of,
    remove_namespace,
    shard_of,
)
from kvoffload.backends.disk.quota import Quota, recorded_bytes
from kvoffload.backends.disk.root_checks import check_root, denied
from kvoffload.backends.disk.strays import Leftover, leftovers, remove_leftover, strays
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import Header, parse_header


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
    """A root, looked at without opening a backend on it."""

    def __init__(self, root: str, vfs: Vfs | None = None) -> None:
        """Look at a root.

        Raises:
            ConfigError: it is no root of the disk backend, or one of another user.
        """
        self.root = os.path.realpath(os.path.expanduser(root))
        self.vfs = vfs or Vfs()
        self._booked: Quota | None = None
        self.unreadable: list[tuple[str, str]] = []
        """Folders that :meth:`chunks` could not list, and why."""
        check_root(self.vfs, self.root)

    def namespaces(self) -> list[str]:
        """Folder names of all namespaces."""
        return sorted(filter(is_namespace, self.vfs.listdir(self.root)))

    def manifest(self, namespace: str) -> dict[str, Any]:
        """The facts behind a namespace; empty if none were written."""
        try:
            path = f"{self.root}/{namespace}/{MANIFEST}"
            fd = self.vfs.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be anything
            with os.fdopen(fd, encoding="utf-8") as file:
                found = json.loads(file.read(1 << 20))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def chunks(self, namespace: str | None = None) -> Iterator[ChunkFile]:
        """All chunks, of one namespace or of all."""
        for folder in self.namespaces() if namespace is None else [namespace]:
            for shard in SHARDS:
                where = f"{self.root}/{folder}/{shard}"
                try:
                    names = self.vfs.listdir(where)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._refuse_foreign(where, error)
                    self.unreadable.append((where, reason_of(error)))
                    continue
                for name in names:
                    chunk = self._chunk(folder, f"{where}/{name}", name)
                    if chunk is not None:
                        yield chunk

    def _chunk(self, namespace: str, path: str, name: str) -> ChunkFile | None:
        key = key_of(name)
        if key is None:
            return None
        try:
            facts = self.vfs.lstat(path)
        except OSError:
            return None
        return ChunkFile(
            namespace,
            key,
            path,
            facts.st_blocks * 512,
            facts.st_mtime_ns,
            facts.st_atime_ns,
            facts.st_ino,
        )

    def quarantined(self) -> list[str]:
        """Paths of the files set aside."""
        folder = f"{self.root}/{QUARANTINE}"
        try:
            return [f"{folder}/{name}" for name in sorted(self.vfs.listdir(folder))]
        except OSError:
            return []

    def processes(self) -> int:
        """How many backends have this root open."""
        return count_alive(self.vfs, self.root)

    def has_owner(self) -> bool:
        """Whether one of them evicts."""
        try:
            fd = self.vfs.open(f"{self.root}/{OWNER}", os.O_RDONLY)
        except OSError:
            return False
        try:
            self.vfs.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            self.vfs.close_quietly(fd)

    def booked_bytes(self) -> int | None:
        """What the shared ledger says is allocated; None: see :meth:`ledger_fault`."""
        try:
            return recorded_bytes(self.vfs, f"{self.root}/{LEDGER}")
        except OSError:
            return None

    def ledger_fault(self) -> str | None:
        """What is wrong with the shared ledger; None if it can be relied on."""
        try:
            figure = recorded_bytes(self.vfs, f"{self.root}/{LEDGER}")
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"unreadable ({error.strerror})"
        return "damaged" if figure is None else None

    def _refuse_foreign(self, path: str, error: OSError) -> None:
        """Raise ConfigError if this is no fault of the store but the wrong user's try."""
        if isinstance(error, PermissionError) and (refusal := denied(self.vfs, path)) is not None:
            raise refusal from error

    def verify(self, chunk: ChunkFile, buffer: memoryview) -> tuple[str | None, int]:
        """Read a chunk in pieces of ``buffer``; say what is wrong with it, and the bytes read."""
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
            # Only the owner may read without a trace; whoever else may read leaves one.
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
        if os.access(self.root, os.W_OK, effective_ids=True):
            return
        self._refuse_foreign(self.root, PermissionError())

    def remove(self, chunk: ChunkFile) -> int:
        """Remove a chunk unless it was replaced since; return the bytes freed.

        Raises:
            OSError: it cannot be removed.
        """
        try:
            if self.vfs.lstat(chunk.path).st_ino != chunk.inode:
                return 0
            self.vfs.unlink(chunk.path)
        except FileNotFoundError:
            return 0
        self._give_back(chunk.allocated_bytes)
        return chunk.allocated_bytes

    def leftovers(self) -> list[Leftover]:
        """Folders that dead processes left."""
        return leftovers(self.vfs, self.root)

    def remove_leftover(self, leftover: Leftover) -> int:
        """Remove one of them; return the bytes freed.

        Raises:
            OSError: it cannot be removed.
        """
        self._give_back(remove_leftover(self.vfs, leftover.path))
        return leftover.allocated_bytes

    def strays(self) -> list[str]:
        """Paths of what is under the root and not the store's."""
        return list(strays(self.vfs, self.root))

    def capacity_bytes(self) -> int | None:
        """The capacity recorded in the root; None if there is none, or see :meth:`limits_fault`."""
        try:
            bounds = disk_bounds.read(self.vfs, self.root)
        except ValueError:
            return None
        return None if bounds is None else bounds.capacity_bytes

    def limits_fault(self) -> str | None:
        """Why the recorded limits cannot be used; None if they can, or there are none."""
        try:
            disk_bounds.read(self.vfs, self.root)
        except ValueError as error:
            return str(error)
        return None

    def remove_quarantined(self, path: str) -> int:
        """Remove a file set aside; return the bytes freed.

        Raises:
            OSError: it cannot be removed, or is a folder.
        """
        allocated = self.allocated_bytes(path)
        with contextlib.suppress(FileNotFoundError):
            self.vfs.unlink(path)
            self._give_back(allocated)
        return allocated

    def allocated_bytes(self, path: str) -> int:
        """What one file takes up; 0 if it is gone."""
        try:
            return self.vfs.lstat(path).st_blocks * 512
        except OSError:
            return 0

    def remove_namespace_folder(self, namespace: str) -> bool:
        """Remove a namespace's folder if it holds no chunk and nobody has the root open."""
        if self.processes():
            return False
        return remove_namespace(self.vfs, f"{self.root}/{namespace}")

    def _give_back(self, allocated_bytes: int) -> None:
        """Book what was removed; a root without a ledger gets none from us."""
        if self._booked is None and os.path.exists(f"{self.root}/{LEDGER}"):
            self._booked = Quota(self.vfs, f"{self.root}/{LEDGER}", fresh=False)
        if self._booked is not None and allocated_bytes:
            self._booked.give_back(allocated_bytes)
