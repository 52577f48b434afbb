"""The disk backend: bounded, verified on every read, there again after a restart.

One file a chunk. What surrounds this file: ``disk_layout`` where things lie, ``disk_io`` how one
chunk is read and written, ``disk_index`` what is believed to be there, ``disk_keeper`` room,
eviction and scans, ``disk_ledger`` and ``disk_writers`` what processes share.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiofiles
import aiofiles.os
import msgspec

from kvoffload.backends.base import Removal, Usage
from kvoffload.backends.disk_index import name_of
from kvoffload.backends.disk_io import PAGE, ChunkFiles, probe_direct
from kvoffload.backends.disk_keeper import Bounds, Keeper
from kvoffload.backends.disk_layout import MANIFEST, prepare_root
from kvoffload.backends.format import MAX_KEY_BYTES, namespace_digest
from kvoffload.backends.offloop import spread
from kvoffload.backends.vfs import Vfs
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError
from kvoffload.registry import POLICIES, load

log = logging.getLogger(__name__)

IO_MODES = ("auto", "direct", "buffered")
DURABILITY = ("none", "fsync")


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the disk backend; ``docs/disk.md`` says how to choose."""

    root: str
    """Folder for all namespaces; made if missing, its parents too."""
    capacity: ByteSize = ByteSize(10 << 30)
    """Bytes allocated under the root at most, all namespaces together."""
    min_free: ByteSize = ByteSize(1 << 30)
    """Bytes of the file system left free for others."""
    io: str = "auto"
    """``direct`` bypasses the page cache, ``buffered`` uses it, ``auto``: direct if possible."""
    durability: str = "none"
    """``fsync``: what was answered True survives a power loss. ``none``: it may be missing."""
    policy: str = "lru"
    """Which chunks leave first; a name of the ``kvoffload.policies`` entry-point group."""
    high_watermark: float = 0.95
    """Above this part of the capacity the background begins to evict..."""
    low_watermark: float = 0.90
    """...down to this one."""
    read_threads: int = 4
    """Chunks read at once."""
    write_threads: int = 2
    """Chunks written at once; fewer than reads, because a load has a request waiting."""
    quarantine: int = 16
    """Damaged files kept for inspection; older ones are removed."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not self.root:
            raise ConfigError("root", self.root, "must name a folder")
        if self.capacity <= 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")
        for field, choices in (("io", IO_MODES), ("durability", DURABILITY)):
            if getattr(self, field) not in choices:
                raise ConfigError(field, getattr(self, field), f"must be one of {choices}")
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                "low_watermark",
                self.low_watermark,
                "must be 0 < low_watermark <= high_watermark <= 1",
            )
        for field in ("read_threads", "write_threads"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
        if self.quarantine < 0:
            raise ConfigError("quarantine", self.quarantine, "must not be negative")


class DiskBackend:
    """Chunks as files under a root that several processes may share."""

    Options = DiskOptions

    def __init__(self, options: DiskOptions, namespace: str, *, vfs: Vfs | None = None) -> None:
        """Open at once; what is on disk already is found in the background.

        Raises:
            ConfigError: a setting is wrong, or the root cannot be used safely.
        """
        self.options = options
        self.namespace = namespace
        self._digest = namespace_digest(namespace)
        vfs = vfs or Vfs()
        root = os.path.abspath(os.path.expanduser(options.root))
        policy = load(POLICIES, options.policy, "policy")
        bounds = Bounds(
            int(options.capacity),
            int(options.min_free),
            options.high_watermark,
            options.low_watermark,
        )
        prepare_root(vfs, root)
        try:
            self._keeper = Keeper(vfs, root, self._digest.hex(), bounds, policy, options.quarantine)
        except OSError as error:
            raise ConfigError("root", root, f"cannot be used: {error}") from error
        self.io_mode, self.io_reason = self._choose_io(vfs)
        self._files = ChunkFiles(
            vfs, direct=self.io_mode == "direct", durable=options.durability == "fsync"
        )
        self._readers = ThreadPoolExecutor(options.read_threads, "kvoffload-disk-read")
        self._writers = ThreadPoolExecutor(options.write_threads, "kvoffload-disk-write")
        self._closed = False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._house = threading.Thread(target=self._keep_house, name="kvoffload-disk", daemon=True)
        self._house.start()

    # ---- Backend ---------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Answer from the index, and from the folder for keys it does not know."""
        if self._closed:
            return [False] * len(keys)
        return [self.holds(key) for key in keys]

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fill slots from files, several at once, each verified; see :meth:`Backend.read`."""
        _same_length(keys, into)
        if self._closed:
            return [False] * len(keys)
        answers = await spread(
            self._readers,
            self.options.read_threads,
            len(keys),
            lambda i: self._read(keys[i], into[i]),
        )
        # The head of a prefix last, so that it is the most recent and its tail leaves first.
        for key, good in zip(reversed(keys), reversed(answers), strict=True):
            if good:
                self._keeper.index.touch(name_of(0, key))
        return answers

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Write chunks, each whole or not at all; see :meth:`Backend.write`."""
        _same_length(keys, chunks)
        if self._closed:
            return [False] * len(keys)
        for key in keys:
            if not 0 < len(key) <= MAX_KEY_BYTES:
                raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        answers = await spread(
            self._writers,
            self.options.write_threads,
            len(keys),
            lambda i: self._write(keys[i], chunks[i]),
        )
        for key, good in zip(reversed(keys), reversed(answers), strict=True):
            if good:
                self._keeper.index.touch(name_of(0, key))
        self._wake.set()
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        if self._closed:
            return

        def discard(i: int) -> bool:
            return self._keeper.discard(name_of(0, keys[i]), "removed") >= 0

        await spread(self._writers, self.options.write_threads, len(keys), discard)

    async def close(self) -> None:
        """Wait for what is running, then let go of the root."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._shut_down)

    # ---- optional protocols ----------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        """Say at once whether a chunk is believed to be here."""
        return name_of(0, key) in self._keeper.index

    def forget(self, keys: Sequence[bytes]) -> None:
        """Answer False for these until they are written again."""
        self._keeper.index.hide(name_of(0, key) for key in keys)

    def take_removals(self) -> list[Removal]:
        """What left since the last call, and why."""
        return self._keeper.take_removals()

    def usage(self) -> Usage:
        """Bytes allocated under the root and chunks known."""
        keeper = self._keeper
        return Usage(keeper.ledger.resident_bytes, keeper.bounds.capacity, len(keeper.index))

    def counters(self) -> Mapping[str, int]:
        """Counts by reason; ``docs/disk.md`` explains each."""
        return self._keeper.counters()

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Keep the facts behind the namespace readable beside its chunks."""
        manifest = {"format": 1, "namespace": self.namespace, "facts": dict(facts)}
        target = f"{self._keeper.folder(0)}/{MANIFEST}"
        try:
            if await aiofiles.os.path.exists(target):
                return
            partial = self._keeper.writer.temporary()
            async with aiofiles.open(partial, "w", opener=_private) as file:
                await file.write(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
            await aiofiles.os.replace(partial, target)
        except OSError as error:
            log.warning("disk: cannot write %s: %s", target, error)

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until what was on disk at the start is known; False if that takes longer."""
        return self._keeper.ready.wait(timeout_s)

    # ---- on worker threads -----------------------------------------------------------------

    def _read(self, key: bytes, target: memoryview) -> bool:
        name = name_of(0, key)
        reason, facts = self._files.read(self._keeper.path(name), key, self._digest, target)
        if reason is None:
            return True
        if reason == "missing":
            self._keeper.count("read_missing")
            if name in self._keeper.index:
                self._keeper.left(name, "vanished")
        elif reason.startswith("corrupt"):
            self._keeper.set_aside(name, facts, reason)
        else:
            self._keeper.count(f"read_{reason}")
            log.warning("disk: cannot read %s: %s", self._keeper.path(name), reason)
        return False

    def _write(self, key: bytes, chunk: memoryview) -> bool:
        keeper = self._keeper
        name = name_of(0, key)
        if name in keeper.index and self._still_there(name):
            return True
        reserved = PAGE + -(-chunk.nbytes // PAGE) * PAGE
        if not keeper.reserve(reserved):
            return False
        temporary = keeper.writer.temporary()
        reason, facts = self._files.write(temporary, key, self._digest, chunk)
        if reason is None and facts is not None:
            reason = keeper.publish(name, temporary, reserved, facts.st_blocks * 512)
            if reason is None and self._made_durable(name):
                return True
            if reason is None:
                return False
        keeper.vfs.unlink_quietly(temporary)
        keeper.unreserve(reserved, reason or "io_unknown")
        return False

    def _still_there(self, name: bytes) -> bool:
        try:
            self._keeper.vfs.lstat(self._keeper.path(name))
        except OSError:
            return False
        return True

    def _made_durable(self, name: bytes) -> bool:
        if not self._files.durable:
            return True
        try:
            self._files.sync_folder(os.path.dirname(self._keeper.path(name)))
        except OSError as error:
            # The kernel may have dropped the pages and forgotten: a second fsync proves nothing.
            log.warning("disk: fsync failed, chunk dropped: %s", error)
            self._keeper.count("fsync_failed")
            self._keeper.discard(name, "fsync_failed")
            return False
        return True

    def _choose_io(self, vfs: Vfs) -> tuple[str, str | None]:
        if self.options.io == "buffered":
            return "buffered", None
        reason = probe_direct(vfs, self._keeper.writer.temporary())
        if reason is None:
            return "direct", None
        if self.options.io == "direct":
            self._keeper.close()
            raise ConfigError("io", "direct", f"does not work at this root ({reason}); use 'auto'")
        log.warning(
            "disk %s: direct I/O does not work (%s), using the page cache",
            self.options.root,
            reason,
        )
        return "buffered", reason

    # ---- on the housekeeping thread --------------------------------------------------------

    def _keep_house(self) -> None:
        keeper = self._keeper
        keeper.clean()
        if not keeper.ready.is_set():
            keeper.look(full=True)
            keeper.ready.set()
        while not self._stop.is_set():
            self._wake.wait(1.0)
            self._wake.clear()
            if keeper.ownership.held and keeper.ledger.resident_bytes > keeper.bounds.high_bytes:
                keeper.evict_to(keeper.bounds.low_bytes)

    def _shut_down(self) -> None:
        self._stop.set()
        self._wake.set()
        self._readers.shutdown()
        self._writers.shutdown()
        self._house.join()
        self._keeper.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _same_length(keys: Sequence[bytes], memory: Sequence[memoryview]) -> None:
    if len(keys) != len(memory):
        raise ValueError(f"{len(keys)} keys but {len(memory)} buffers")
