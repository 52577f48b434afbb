"""Inspects a root without a backend, as the disk tier's root is inspected: the files are alike.

What is different is who uses it: records of hosts and a lease in place of locks and a ledger.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator

from kvoffload.backends.disk.inspector import Chunk, DiskInspector, Waste
from kvoffload.backends.disk.manifest import name_in
from kvoffload.backends.disk.paths import MANIFEST, SCRATCH, SHARDS
from kvoffload.backends.disk.walker import names_in, walk
from kvoffload.backends.folder.evictor import DEAD_S
from kvoffload.backends.folder.places import HOSTS, LEASE, LEFTOVERS, STORE, is_temporary
from kvoffload.backends.folder.records import LeaseRecord, Records
from kvoffload.backends.folder.scan import LEFTOVER_S
from kvoffload.backends.folder.seal import SecretSeal
from kvoffload.backends.folder.shared_root import check_content
from kvoffload.backends.folder.upkeep import LEASE_S
from kvoffload.backends.seals import Seal
from kvoffload.errors import ConfigError


class FolderInspector(DiskInspector):
    """One root, inspected from outside.

    Args:
        root: where.
        signature: with it, ``verify`` checks authentication codes as well.

    Raises:
        ConfigError: it is no root, or another user owns it or may write it.
    """

    in_root = (STORE, LEASE, HOSTS, "lost+found", ".snapshot")
    in_namespace = (MANIFEST, *SHARDS)
    passing = (*LEFTOVERS, SCRATCH)
    passing_inside = (".",)

    def __init__(self, root: str, signature: SecretSeal | None = None) -> None:
        super().__init__(root)
        self._signature = signature
        self.records = Records(self.vfs, self.root, f"inspect-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):  # on a mount to read from, ages are unknown and count 0
            self.records.set_clock()

    def check_root(self) -> None:
        try:
            is_root = check_content(self.vfs, self.root)
        except OSError as error:
            raise ConfigError("root", self.root, f"cannot be read: {error.strerror}") from error
        if not is_root:
            raise ConfigError("root", self.root, "is empty: no engine has used it yet")

    # ---- what is there ---------------------------------------------------------------------

    def chunks(self, namespace: str | None = None) -> Iterator[Chunk]:
        for chunk in super().chunks(namespace):
            # Its file's time tells of the last use, to the hour.
            yield chunk._replace(used_ns=chunk.stored_ns)

    def quarantined(self) -> list[Waste]:
        """Return no files: damaged ones are removed at once."""
        return []

    def leftovers(self) -> list[Waste]:
        """Return the unfinished files of processes that were killed."""
        left = []
        for path in self._unfinished():
            with contextlib.suppress(OSError):
                facts = self.vfs.lstat(path)
                if self.records.age_s(facts.st_mtime_ns) > LEFTOVER_S:
                    left.append(Waste(path, facts.st_blocks * 512))
        return left

    def _unfinished(self) -> Iterator[str]:
        for folder in (self.root, f"{self.root}/{HOSTS}"):
            names = (n for n in names_in(self.vfs, folder) if n.startswith(self.passing))
            yield from (f"{folder}/{name}" for name in names)
        for namespace in self.namespaces():
            for shard in walk(self.vfs, f"{self.root}/{namespace}"):
                yield from (f"{shard.path}/{name}" for name in shard.strays if is_temporary(name))

    # ---- who uses it, and how much ---------------------------------------------------------

    def processes(self) -> int:
        return len(self.hosts())

    def hosts(self) -> list[str]:
        """Return the hosts of the processes that have it open, one name a process."""
        try:
            records = self.records.hosts().values()
        except OSError:
            return []
        return sorted(r.host for r, age_s in records if age_s < DEAD_S and not r.is_closed)

    def has_owner(self) -> bool:
        lease, age_s = self._lease()
        return lease is not None and bool(lease.holder) and (age_s or 0.0) < LEASE_S

    def ledger(self) -> tuple[int | None, str | None]:
        lease, _ = self._lease()
        if lease is None:
            return None, f"{LEASE} is missing or damaged"
        return lease.resident_bytes, None

    def capacity(self) -> tuple[int | None, str | None]:
        """Return the capacity by which the last evictor evicts."""
        lease, _ = self._lease()
        return lease.capacity_bytes if lease else None, None

    def _lease(self) -> tuple[LeaseRecord | None, float | None]:
        try:
            return self.records.lease()
        except OSError:
            return None, None

    # ---- one chunk -------------------------------------------------------------------------

    def verify(
        self, chunk: Chunk, buffer: memoryview, cipher: Seal | None = None
    ) -> tuple[str | None, int]:
        if (signature := self._signature) is None:
            return super().verify(chunk, buffer, cipher)
        name = name_in(self.manifest(chunk.namespace), chunk.namespace)
        if not name.endswith(signature.suffix):
            return super().verify(chunk, buffer, cipher)
        reason, read = super().verify(chunk, buffer, signature)
        return ("corrupt_mac" if reason == "corrupt_payload" else reason), read

    def remove_leftover(self, leftover: Waste) -> int:
        if os.path.basename(leftover.path).startswith(SCRATCH):
            self.vfs.remove_tree(leftover.path)
            return leftover.allocated_bytes
        return self.unlink(leftover.path, leftover.allocated_bytes)

    def _release(self, allocated_bytes: int) -> None:
        """Do nothing: the evictor finds the bytes of removed files free at its next scan."""
