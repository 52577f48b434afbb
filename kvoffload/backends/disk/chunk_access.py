"""One chunk after the other, on worker threads: loaded, stored, and what follows if that fails."""

import logging
import os

from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk.chunk_file import PAGE, ChunkFiles
from kvoffload.backends.disk.expiry import is_fresh
from kvoffload.backends.disk.index import Name, name_of
from kvoffload.backends.disk.store import DiskStore
from kvoffload.backends.header import MAX_KEY_BYTES
from kvoffload.backends.log_rate import Throttle

log = logging.getLogger(__name__)


class Chunks:
    """Chunks of a keeper's own namespace. Methods block, are thread-safe and never raise."""

    def __init__(self, keeper: DiskStore, files: ChunkFiles, digest: bytes) -> None:
        """``digest`` is the namespace's, as it stands in every chunk's header."""
        self._keeper = keeper
        self._files = files
        self._digest = digest
        self._unreadable = Throttle(log)

    def read(self, key: bytes, target: memoryview) -> ReadResult:
        """Fill a slot, verified."""
        if not is_key(key):
            return ReadResult.MISSING
        name = name_of(0, key)
        try:
            if self._keeper.uses.expires and not is_fresh(self._keeper, name):
                return self._missed(name, "missing", None)
            reason, facts = self._files.read(self._keeper.path(name), key, self._digest, target)
            return ReadResult.HIT if reason is None else self._missed(name, reason, facts)
        except Exception:
            self._keeper.count("read_failed")
            log.exception("disk: cannot read %s", self._keeper.path(name))
            return ReadResult.UNAVAILABLE

    def _missed(self, name: Name, reason: str, facts: os.stat_result | None) -> ReadResult:
        """Draw the consequences of a load that went wrong."""
        if reason == "missing":
            self._keeper.count("read_missing")
            if name in self._keeper.index and self._keeper.uses.is_fresh(name):
                self._keeper.left(name, "vanished")
        elif reason.startswith("corrupt"):
            self._keeper.set_aside(name, facts, reason)
        else:
            self._keeper.count(f"read_{reason}")
            self._unreadable.warning("disk: cannot read %s: %s", self._keeper.path(name), reason)
        return ReadResult.of(reason)

    def write(self, key: bytes, chunk: memoryview) -> bool:
        """Store a chunk, whole or not at all."""
        try:
            return self._store(key, chunk)
        except Exception:
            self._keeper.count("write_failed")
            log.exception("disk: cannot store %s", self._keeper.path(name_of(0, key)))
            return False

    def _store(self, key: bytes, chunk: memoryview) -> bool:
        keeper, remakes = self._keeper, self._keeper.hold.remakes
        name = name_of(0, key)
        if name in keeper.index and self.exists(key):
            if keeper.uses.expires:
                keeper.uses.used([name])
            return self._made_durable(name, anew=False)
        reserved = on_disk(chunk.nbytes)
        if not keeper.reserve(reserved):
            return False
        temporary = None
        try:
            temporary = keeper.writer.temporary()
            reason, facts = self._files.write(temporary, key, self._digest, chunk)
            if facts is not None:
                # Some file systems (ZFS) allocate later, and say 512 bytes until then.
                allocated = max(reserved, facts.st_blocks * 512)
                reason = keeper.publish(name, temporary, reserved, allocated)
        except BaseException:
            keeper.unreserve(reserved, temporary)
            raise
        if reason is None:
            return self._made_durable(name, anew=True)
        keeper.unreserve(reserved, temporary)
        keeper.write_failed(reason)
        if reason == "missing" and (keeper.hold.remake() or keeper.hold.remakes != remakes):
            return self._store(key, chunk)  # its folder was gone, and is there again
        return False

    def exists(self, key: bytes) -> bool:
        """Ask the folder; for keys the index does not know, or before relying on it."""
        name = name_of(0, key)
        if self._keeper.index.hides(name) or not is_key(key):
            return False
        try:
            facts = self._keeper.vfs.lstat(self._keeper.path(name))
        except OSError:
            return False
        self._keeper.uses.seen([(name, facts.st_atime_ns)])
        return self._keeper.uses.is_fresh(name)

    def _made_durable(self, name: bytes, *, anew: bool) -> bool:
        """Sync the folder, and the file if another stored it, who may not have cared."""
        if not self._files.durable:
            return True
        try:
            if not anew:
                self._files.sync(self._keeper.path(name))
            self._keeper.vfs.sync_folder(os.path.dirname(self._keeper.path(name)))
        except OSError as error:
            # The kernel may have dropped the pages and forgotten: a second fsync proves nothing.
            log.warning("disk: fsync failed, chunk dropped: %s", error)
            self._keeper.count("fsync_failed")
            self._keeper.discard(name, "fsync_failed")
            return False
        return True


def is_key(key: bytes) -> bool:
    """Whether this can have been stored; the file name of an empty key would be its folder's."""
    return 0 < len(key) <= MAX_KEY_BYTES


def on_disk(chunk_bytes: int) -> int:
    """What a chunk takes up, its header included."""
    return PAGE + -(-chunk_bytes // PAGE) * PAGE
