"""The disk backend: bounded, verified on every read, there again after a restart.

One file a chunk. What surrounds this module: ``disk_layout`` where things lie, ``disk_io`` how one
chunk is read and written, ``disk_index`` what is believed to be there, ``disk_keeper`` room,
removal and eviction, ``disk_ledger`` and ``disk_writers`` what processes share, ``disk_scan`` and
``disk_house`` what happens in the background.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiofiles
import aiofiles.os
import msgspec

from kvoffload.backends.base import Removal, Usage
from kvoffload.backends.disk_doctor import diagnose
from kvoffload.backends.disk_house import House
from kvoffload.backends.disk_index import Name, name_of
from kvoffload.backends.disk_io import PAGE, ChunkFiles, probe_direct
from kvoffload.backends.disk_keeper import Bounds, Keeper
from kvoffload.backends.disk_layout import MANIFEST, prepare_root
from kvoffload.backends.disk_purge import purge
from kvoffload.backends.format import MAX_KEY_BYTES, namespace_digest
from kvoffload.backends.offloop import DaemonThreads, Lane, once
from kvoffload.backends.upkeep import Finding
from kvoffload.backends.vfs import Vfs
from kvoffload.config import ByteSize, human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import POLICIES, load

log = logging.getLogger(__name__)
T = TypeVar("T")

IO_MODES = ("auto", "direct", "buffered")
DURABILITY = ("none", "fsync")
_READERS = 4


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
    read_threads: int | None = None
    """Chunks read at once; by default 4, out of the page cache no more than there are cores."""
    write_threads: int = 2
    """Chunks written at once; fewer than reads, because a load has a request waiting."""
    stall_s: float = 5.0
    """A device on which every thread waits longer than this is taken for dead: misses at once."""
    quarantine: int = 16
    """Damaged files kept for inspection, at most; older ones are removed."""

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
            threads = getattr(self, field)
            if threads is not None and threads < 1:
                raise ConfigError(field, threads, "must be at least 1")
        if not self.stall_s > 0:
            raise ConfigError("stall_s", self.stall_s, "must be a positive number of seconds")
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
        capacity = int(options.capacity)
        bounds = Bounds(
            capacity_bytes=capacity,
            min_free_bytes=int(options.min_free),
            high_bytes=int(capacity * options.high_watermark),
            low_bytes=int(capacity * options.low_watermark),
            quarantine_files=options.quarantine,
        )
        durable = options.durability == "fsync"
        prepare_root(vfs, root, durable=durable)
        try:
            self._keeper = Keeper(vfs, root, self._digest.hex(), bounds, policy, durable=durable)
        except OSError as error:
            raise ConfigError("root", root, f"cannot be used: {error}") from error
        self.io_mode, self.io_reason = self._choose_io(vfs)
        self._files = ChunkFiles(vfs, direct=self.io_mode == "direct", durable=durable)
        readers = options.read_threads or _READERS
        if options.read_threads is None and self.io_mode == "buffered":
            # There a load is a copy: more threads than cores only get into each other's way.
            readers = min(readers, os.cpu_count() or 1)
        self._loads = Lane("kvoffload-disk-load", readers, options.stall_s)
        self._stores = Lane("kvoffload-disk-store", options.write_threads, options.stall_s)
        self._closed = False
        self._stopping = threading.Event()
        self._unfinished: set[asyncio.Future[Any]] = set()
        self._facts: dict[str, str] | None = None
        self._remakes = 0
        self._house = House(self._keeper)

    # ---- Backend ---------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Answer from the index, and from the folder for keys it does not know."""
        if self._closed:
            return [False] * len(keys)
        answers = [self.holds(key) for key in keys]
        unknown = [i for i, known in enumerate(answers) if not known]
        if unknown:
            there = await self._loads.run(len(unknown), lambda i: self._exists(keys[unknown[i]]))
            for i, exists in zip(unknown, there, strict=True):
                answers[i] = exists
        return answers

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fill slots from files, several at once, each verified; see :meth:`Backend.read`."""
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool]:
        """Do so, and tell of each; see :class:`~kvoffload.backends.base.ReadsEach`."""
        _same_length(keys, into)
        if self._closed:
            return [False] * len(keys)

        def load(i: int) -> bool:
            good = self._read(keys[i], into[i])
            if good:
                arrived(i)
            return good

        answers = await self._loads.run(len(keys), load)
        self._keeper.used(_head_last(keys, answers))
        return answers

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Write chunks, each whole or not at all; see :meth:`Backend.write`."""
        _same_length(keys, chunks)
        if self._closed:
            return [False] * len(keys)
        for key in keys:
            if not _is_key(key):
                raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        answers = await self._stores.run(len(keys), lambda i: self._write(keys[i], chunks[i]))
        self._keeper.index.rank(_head_last(keys, answers))
        self._house.wake()
        if self._remakes != self._keeper.remakes and self._facts is not None:
            await self.describe(self._facts)
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        if self._closed:
            return

        def discard(i: int) -> bool:
            return _is_key(keys[i]) and self._keeper.discard(name_of(0, keys[i]), "removed")

        await self._stores.run(len(keys), discard)

    async def close(self) -> None:
        """Wait for what is running, leave a snapshot, let go of the root."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        if self._unfinished:
            await asyncio.wait(self._unfinished)
        await once(self._shut_down)

    # ---- optional protocols ----------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        """Say at once whether a chunk is believed to be here."""
        return name_of(0, key) in self._keeper.index

    @property
    def place(self) -> str:
        """The root; see :class:`~kvoffload.backends.base.Fits`."""
        return os.path.realpath(self._keeper.root)

    def check_fit(self, chunk_bytes: int) -> None:
        """Refuse a capacity below one chunk; see :class:`~kvoffload.backends.base.Fits`."""
        capacity = self._keeper.bounds.capacity_bytes
        if capacity < _on_disk(chunk_bytes):
            wanted = human_bytes(_on_disk(chunk_bytes))
            remedy = f"must hold at least one chunk, which takes {wanted} with its header"
            raise ConfigError("capacity", human_bytes(capacity), remedy)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Answer False for these until they are written again."""
        self._keeper.index.hide(name_of(0, key) for key in keys)

    def take_removals(self) -> list[Removal]:
        """What left since the last call, and why."""
        return self._keeper.take_removals()

    def usage(self) -> Usage:
        """Bytes allocated under the root and chunks known."""
        keeper = self._keeper
        resident = keeper.ledger.resident_bytes
        return Usage(resident, keeper.bounds.capacity_bytes, len(keeper.index))

    def counters(self) -> Mapping[str, int]:
        """Counts by reason; ``docs/disk.md`` explains each."""
        return self._keeper.counters()

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Keep the facts behind the namespace readable beside its chunks."""
        if self._closed:
            return
        self._facts, self._remakes = dict(facts), self._keeper.remakes
        await self._to_the_end(self._write_manifest(facts))

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces; whoever still uses one finds nothing there, and may store anew.

        Closing stops it. What is left then leaves as the capacity demands.
        """
        if self._closed:
            return 0
        folders = [namespace_digest(namespace).hex() for namespace in namespaces]
        return await self._to_the_end(once(purge, self._keeper, folders, self._stopping))

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that close() waits for, and that being cancelled does not cut short."""
        task = asyncio.ensure_future(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def _write_manifest(self, facts: Mapping[str, str]) -> None:
        manifest = {"format": 1, "namespace": self.namespace, "facts": dict(facts)}
        target = f"{self._keeper.folder(0)}/{MANIFEST}"
        threads = DaemonThreads()
        try:
            if await aiofiles.os.path.exists(target, executor=threads):
                return
            partial = self._keeper.writer.temporary()
            async with aiofiles.open(partial, "w", opener=_private, executor=threads) as file:
                await file.write(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
            await aiofiles.os.replace(partial, target, executor=threads)
        except OSError as error:
            log.warning("disk: cannot write %s: %s", target, error)

    async def diagnose(self) -> list[Finding]:
        """See :class:`~kvoffload.backends.upkeep.Diagnoses`."""
        await once(self.wait_ready, 60.0)
        return await diagnose(self, self._keeper, self.io_mode, self.io_reason)

    @property
    def writer_folder(self) -> str:
        """Where this backend's temporary files are, while it lives."""
        return self._keeper.writer.folder

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until what was on disk at the start is known; False if that takes longer."""
        return self._keeper.ready.wait(timeout_s)

    # ---- on worker threads -----------------------------------------------------------------

    def _read(self, key: bytes, target: memoryview) -> bool:
        if not _is_key(key):
            return False
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
        keeper, remakes = self._keeper, self._keeper.remakes
        name = name_of(0, key)
        if name in keeper.index and self._exists(key):
            return True
        reserved = _on_disk(chunk.nbytes)
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
        if reason == "missing" and (keeper.remake() or keeper.remakes != remakes):
            return self._write(key, chunk)  # its folder was gone, and is there again
        return False

    def _exists(self, key: bytes) -> bool:
        """Ask the folder; for keys the index does not know, or before relying on it."""
        name = name_of(0, key)
        if self._keeper.index.hides(name) or not _is_key(key):
            return False
        try:
            self._keeper.vfs.lstat(self._keeper.path(name))
        except OSError:
            return False
        return True

    def _made_durable(self, name: bytes) -> bool:
        if not self._files.durable:
            return True
        try:
            self._keeper.vfs.sync_folder(os.path.dirname(self._keeper.path(name)))
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

    def _shut_down(self) -> None:
        ended = [lane.close() for lane in (self._loads, self._stores)]
        if not all(ended):
            # Any further call could be stuck as well; locks go with the process.
            log.warning("disk: %s is stuck, left as it is", self._keeper.root)
            return
        self._house.close()
        self._keeper.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _on_disk(chunk_bytes: int) -> int:
    """What a chunk takes up, its header included."""
    return PAGE + -(-chunk_bytes // PAGE) * PAGE


def _head_last(keys: Sequence[bytes], answers: Sequence[bool]) -> list[Name]:
    """Names of what went well: the head of a prefix is to be the most recent, its tail leaves."""
    names = [name_of(0, key) for key, good in zip(keys, answers, strict=True) if good]
    return names[::-1]


def _is_key(key: bytes) -> bool:
    """Whether this can have been stored; the file name of an empty key would be its folder's."""
    return 0 < len(key) <= MAX_KEY_BYTES


def _same_length(keys: Sequence[bytes], memory: Sequence[memoryview]) -> None:
    if len(keys) != len(memory):
        raise ValueError(f"{len(keys)} keys but {len(memory)} buffers")
