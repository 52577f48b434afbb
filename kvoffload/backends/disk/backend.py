"""The disk backend: bounded, verified on every read, there again after a restart.

One file a chunk. What surrounds this module: ``disk_layout`` where things lie, ``disk_chunks`` and
``disk_io`` how one chunk is stored and loaded, ``disk_index`` what is believed to be there,
``disk_keeper`` room, removal and eviction, ``disk_hold`` what a process holds of the root,
``disk_ledger`` and ``disk_writers`` what processes share, ``disk_scan`` and ``disk_house`` what
happens in the background.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import aiofiles
import aiofiles.os

from kvoffload.backends.admin import Admin, Finding
from kvoffload.backends.base import Answers, ReadResult, Removal, Usage
from kvoffload.backends.blocking_pool import BlockingPool, DaemonThreads, run_once
from kvoffload.backends.disk.admin import DiskAdmin
from kvoffload.backends.disk.chunk_access import Chunks, is_key, on_disk
from kvoffload.backends.disk.chunk_file import ChunkFiles, probe_direct
from kvoffload.backends.disk.doctor import KEPT, diagnose
from kvoffload.backends.disk.housekeeper import Housekeeper
from kvoffload.backends.disk.index import Name, name_of
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.paths import MANIFEST
from kvoffload.backends.disk.purge import purge
from kvoffload.backends.disk.store import DiskStore
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import MAX_KEY_BYTES, namespace_digest
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import POLICIES, load

__all__ = ["DiskBackend", "DiskOptions"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_READERS = 4


_living: "weakref.WeakSet[DiskBackend]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child has neither the threads nor the locks: for it everything is a miss."""
    for backend in _living:
        backend._closed = True


os.register_at_fork(after_in_child=_close_in_child)


class DiskBackend(Admin):
    """Chunks as files under a root that several processes may share."""

    Options = DiskOptions
    admin = DiskAdmin

    def __init__(self, options: DiskOptions, namespace: str, *, vfs: Vfs | None = None) -> None:
        """Open at once; what is on disk already is found in the background.

        Raises:
            ConfigError: a setting is wrong, or the root cannot be used safely.
        """
        self.options = options
        self.namespace = namespace
        vfs = vfs or Vfs()
        root = os.path.abspath(os.path.expanduser(options.root))
        policy = load(POLICIES, options.policy, "policy")
        durable = options.durability == "fsync"
        digest = namespace_digest(namespace)
        with contextlib.ExitStack() as undo:
            try:
                keeper = DiskStore(
                    vfs,
                    root,
                    digest.hex(),
                    options.bounds(),
                    policy,
                    durable=durable,
                    trust_parents=options.trust_parent_folders,
                )
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, "error")
                remedy = f"must be a folder this process can write ({name}: {error.strerror})"
                raise ConfigError("root", root, remedy) from error
            self._keeper = keeper
            undo.callback(keeper.hold.close)
            self.io_mode, self.io_reason = self._choose_io(vfs)
            files = ChunkFiles(vfs, direct=self.io_mode == "direct", durable=durable)
            self._chunks = Chunks(keeper, files, digest)
            self._loads = self._lane("load", self._readers(), "read")
            undo.callback(self._loads.close)
            self._stores = self._lane("store", options.write_threads, "write")
            undo.callback(self._stores.close)
            self._house = Housekeeper(keeper)
            undo.pop_all()
        self._closed = False
        """Whether nothing is to be done any more."""
        _living.add(self)
        self._stopping = threading.Event()
        self._unfinished: set[asyncio.Future[Any]] = set()
        self._facts: dict[str, str] | None = None
        self._describing = asyncio.Lock()
        self._remakes = 0

    # ---- Backend ---------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Answer from the index, and from the folder for keys it does not know."""
        if self._refuses("read", len(keys)):
            return [False] * len(keys)
        answers = [self.holds(key) for key in keys]
        unknown = [i for i, known in enumerate(answers) if not known]
        if unknown:
            there = [False] * len(unknown)
            await self._loads.fill(there, lambda i: self._chunks.exists(keys[unknown[i]]))
            for i, exists in zip(unknown, there, strict=True):
                answers[i] = exists
        return answers

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[ReadResult]:
        """Fill slots from files, several at once, each verified; see :meth:`Backend.read`."""
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[ReadResult]:
        """Do so, and tell of each; see :class:`~kvoffload.backends.base.ReadsEach`."""
        _same_length(keys, into)
        if self._refuses("read", len(keys)):
            return [ReadResult.UNAVAILABLE] * len(keys)

        def load(i: int) -> ReadResult:
            good = self._chunks.read(keys[i], into[i])
            if good:
                arrived(i)
            return good

        answers = [ReadResult.UNAVAILABLE] * len(keys)
        try:
            await self._loads.fill(answers, load)
        finally:  # also of a load that its deadline cut off
            self._keeper.used(_head_last(keys, answers))
        return answers

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Write chunks, each whole or not at all; see :meth:`Backend.write`."""
        _same_length(keys, chunks)
        if self._refuses("write", len(keys)):
            return [False] * len(keys)
        for key in keys:
            if not is_key(key):
                raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        answers = [False] * len(keys)
        try:
            await self._stores.fill(answers, lambda i: self._chunks.write(keys[i], chunks[i]))
        finally:
            self._keeper.index.rank(_head_last(keys, answers))
            self._house.wake()
        if self._facts is None:
            # Opened by a name alone: that is what people will ask for. A dead disk delays no store.
            self._facts, self._remakes = {}, self._keeper.hold.remakes
            naming = self._begun(self._write_manifest({}))
            await asyncio.wait([naming], timeout=self.options.stall_s)
        elif self._remakes != self._keeper.hold.remakes:
            await self.describe(self._facts)
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        if self._refuses("write", len(keys)):
            return

        def discard(i: int) -> bool:
            return is_key(keys[i]) and self._keeper.discard(name_of(0, keys[i]), "removed")

        await self._stores.fill([False] * len(keys), discard)

    async def close(self) -> None:
        """Wait for what is running, leave a snapshot, let go of the root."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=self.options.stall_s)
        await run_once(self._shut_down)

    # ---- optional protocols ----------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        """Say at once whether a chunk is believed to be here."""
        keeper = self._keeper
        unsafe = self._closed or keeper.hold.refusal is not None
        name = name_of(0, key)
        return not unsafe and name in keeper.index and keeper.uses.is_fresh(name)

    @property
    def place(self) -> str:
        """The root; see :class:`~kvoffload.backends.base.Observable`."""
        return os.path.realpath(self._keeper.root)

    def check_fit(self, chunk_bytes: int) -> None:
        """Refuse a capacity below one chunk; see :class:`~kvoffload.backends.base.Observable`."""
        capacity = self._keeper.bounds.capacity_bytes
        if capacity < on_disk(chunk_bytes):
            wanted = human_bytes(on_disk(chunk_bytes))
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
        self._facts, self._remakes = dict(facts), self._keeper.hold.remakes
        await self._to_the_end(self._write_manifest(facts))

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces; whoever still uses one finds nothing there, and may store anew.

        Closing stops it. What is left then leaves as the capacity demands.
        """
        if self._closed:
            return 0
        folders = [namespace_digest(namespace).hex() for namespace in namespaces]
        return await self._to_the_end(run_once(purge, self._keeper, folders, self._stopping))

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that close() waits for, and that being cancelled does not cut short."""
        return await asyncio.shield(self._begun(work))

    def _begun(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Begin something that close() waits for."""
        task = asyncio.ensure_future(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task

    async def _write_manifest(self, facts: Mapping[str, str]) -> None:
        """Keep name and facts of the namespace, once; facts replace a name alone."""
        text, name_alone = (self._manifest(each) for each in (facts, {}))
        target = f"{self._keeper.folder(0)}/{MANIFEST}"
        threads = DaemonThreads()
        async with self._describing:
            try:
                there = await self._content(target, threads)
                if there is not None and (not facts or there != name_alone.encode()):
                    return
                unfinished = self._keeper.writer.temporary(booked=False)
                async with aiofiles.open(
                    unfinished, "w", opener=self._keeper.vfs.open, executor=threads
                ) as file:
                    await file.write(text)
                rename = aiofiles.os.wrap(self._keeper.vfs.rename)
                await rename(unfinished, target, executor=threads)
            except OSError as error:
                log.warning("disk: cannot write %s: %s", target, error)

    async def _content(self, path: str, threads: DaemonThreads) -> bytes | None:
        """What a small file holds; None if it is not there."""
        opener = self._keeper.vfs.open  # below the root's descriptor
        try:
            async with aiofiles.open(path, "rb", opener=opener, executor=threads) as file:
                return bytes(await file.read(1 << 20))
        except FileNotFoundError:
            return None

    def _manifest(self, facts: Mapping[str, str]) -> str:
        manifest = {"format": 1, "namespace": self.namespace, "facts": dict(facts)}
        return json.dumps(manifest, indent=2, sort_keys=True) + "\n"

    async def diagnose(self) -> list[Finding]:
        try:
            return await diagnose(self.place, {name: getattr(self.options, name) for name in KEPT})
        except ConfigError as error:
            remedy = "see what changed the folder under this engine"
            return [Finding("root", "failed", str(error), remedy)]

    @property
    def writer_folder(self) -> str:
        """Where this backend's temporary files are, while it lives."""
        return self._keeper.writer.folder

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until what was on disk at the start is known; False if that takes longer."""
        return self._keeper.ready.wait(timeout_s)

    def _refuses(self, kind: str, items: int) -> bool:
        """Whether all of these are answered False: closed, or others tamper with the root."""
        if not self._closed and self._keeper.hold.refusal is not None:
            self._keeper.count(f"{kind}_unsafe", items)
            return True
        return self._closed

    def _gave_up(self, kind: str, items: int, first: bool) -> None:
        """A lane has answered False for these without trying, because all its threads are stuck."""
        self._keeper.count(f"{kind}_stalled", items)
        if first:
            log.warning(
                "disk %s: every thread has waited longer than %s s for a %s; "
                "all of them are refused until one comes back",
                self._keeper.root,
                self.options.stall_s,
                kind,
            )

    def _choose_io(self, vfs: Vfs) -> tuple[str, str | None]:
        if self.options.io == "buffered":
            return "buffered", None
        reason = probe_direct(vfs, self._keeper.writer.temporary(booked=False))
        if reason is None:
            return "direct", None
        if self.options.io == "direct":
            raise ConfigError("io", "direct", f"does not work at this root ({reason}); use 'auto'")
        log.warning(
            "disk %s: direct I/O does not work (%s), using the page cache",
            self.options.root,
            reason,
        )
        return "buffered", reason

    def _lane(self, name: str, threads: int, kind: str) -> BlockingPool:
        gave_up = partial(self._gave_up, kind)
        return BlockingPool(f"kvoffload-disk-{name}", threads, self.options.stall_s, gave_up)

    def _readers(self) -> int:
        """How many threads load."""
        if self.options.read_threads is None and self.io_mode == "buffered":
            # There a load is a copy: more threads than cores only get into each other's way.
            return min(_READERS, os.cpu_count() or 1)
        return self.options.read_threads or _READERS

    def _shut_down(self) -> None:
        ended = [lane.close() for lane in (self._loads, self._stores)]
        if not all(ended):
            # Any further call could be stuck as well; locks go with the process.
            log.warning("disk: %s is stuck, left as it is", self._keeper.root)
            return
        if self._house.close(self.options.stall_s):
            self._keeper.hold.close()
        else:
            log.warning("disk: %s is stuck, left as it is", self._keeper.root)


def _head_last(keys: Sequence[bytes], answers: Answers) -> list[Name]:
    """Names of what went well: the head of a prefix is to be the most recent, its tail leaves."""
    names = [name_of(0, key) for key, good in zip(keys, answers, strict=True) if good]
    return names[::-1]


def _same_length(keys: Sequence[bytes], memory: Sequence[memoryview]) -> None:
    if len(keys) != len(memory):
        raise ValueError(f"{len(keys)} keys but {len(memory)} buffers")
