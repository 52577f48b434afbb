"""The disk backend: bounded, verified on every load, restored after a restart.

This module is the asynchronous face. ``store`` keeps the chunks, in one of two ``chunk_forms``.
``files`` has one each: ``paths`` has their names, and ``chunk_file`` reads and writes one.
``slots`` has many small chunks in a ``segment``, and reads and writes them; ``segments`` knows
which chunk is where, and ``descriptors`` has a few of their files open. Of both,
``file_calls`` asks what the page cache has, and ``cache_room`` judges whether stores may fill it.
In an engine's process ``cached_files`` reads chunks of both that the page cache has.
``index`` knows which exist, ``space`` makes room, and a ``reservation`` has that of a job. ``root``
opens the folder, whose processes share ``quota``, ``locks`` and ``limits``. ``housekeeper`` works
in the background; its ``scanner`` compares the index with the folders.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvoffload.backends.base import Described, ReadResult, Removal, Usage, Written, check_lengths
from kvoffload.backends.blocking_pool import run_once, start_once
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.cached_files import CachedFiles, Run, facts_for_readers, runs_in
from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.disk.housekeeper import Housekeeper
from kvoffload.backends.disk.index import Name, name_of, named
from kvoffload.backends.disk.namespace_sample import described
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.scanner import purge
from kvoffload.backends.disk.space import Reservation
from kvoffload.backends.disk.store import DiskStore
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import check_key, is_key, namespace_digest
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.seals import ChecksumSeal, Seal
from kvoffload.backends.threaded import ThreadPoolBackend
from kvoffload.policies.told_return import ToldReturn

__all__ = ["DiskBackend", "DiskOptions"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_UNDESCRIBED = -1
"""In place of a count of repairs: there is no manifest yet."""
_SAY_AGAIN_S = 600.0
_READERS, _BUFFERED_READERS, _WRITERS = 8, 4, 4
_QUICK_BYTES = 128 << 10
"""One thread moves chunks up to this length between memory and the page cache as fast as two."""
_HAS_FEW_CORES = (os.cpu_count() or 1) <= 4
"""Then one thread loads chunks of any length from the page cache. More would take the cores of the
event loop, which tells of arrivals, and of the engine, which copies what has arrived."""


class DiskBackend(ThreadPoolBackend):
    """Chunks as files under a root that several processes may share."""

    Options = DiskOptions
    reader = CachedFiles
    is_shared = True

    def __init__(self, options: DiskOptions, namespace: str, *, vfs: Vfs | None = None) -> None:
        """Open at once; the housekeeping thread finds the chunks that are already on disk.

        Raises:
            ConfigError: a setting is wrong, or the root cannot be used safely.
        """
        self.options = options
        self.namespace = namespace
        self._told: frozenset[Name] = frozenset()
        """Chunks to be spared that the process which evicts learns of, if it is another one."""
        vfs = vfs or Vfs()
        with contextlib.ExitStack() as undo:
            self._store = DiskStore(vfs, options, namespace)
            undo.callback(self._store.close)
            self._place = os.path.realpath(self._store.path)  # here, where it may block
            self.io_mode, self.io_reason = self._store.io_mode, self._store.io_reason
            self.room = self._store.room
            self.why_no_slots = self._store.why_no_slots
            of_root = self._store.path, self._store.namespaces[0]
            scratch = self._store.root.temporary(counted=False)
            is_direct = self.io_mode == "direct"
            self._for_readers = {} if is_direct else facts_for_readers(vfs, scratch, *of_root)
            self._housekeeper = Housekeeper(self._store)
            undo.callback(self._housekeeper.wait)
            undo.callback(self._housekeeper.stop)
            super().__init__(
                threads=self._read_threads(),
                store_threads=options.write_threads or _WRITERS,
                stall_s=options.stall_s,
                name=f"disk {self._store.path}",
            )
            undo.pop_all()
        self._store.files.chunks.expect_wait = self.expect_wait
        self._was_serving = True
        """Whether chunks could be loaded at the last :meth:`take_changes`."""
        self._is_complete = False
        self._stopping = threading.Event()
        self._unfinished: set[asyncio.Future[Any]] = set()
        self._facts: dict[str, str] = {}
        self._describing = threading.Lock()
        self._repairs = _UNDESCRIBED
        """Repairs of the root up to the last manifest."""
        self._untold = Throttle(log, _SAY_AGAIN_S)
        vfs.on_fork = self.disown

    @staticmethod
    def admin(options: Mapping[str, Any]) -> Any:
        """Return the operators' methods; see :func:`kvoffload.registry.open_admin`."""
        from kvoffload.backends.disk.admin import DiskAdmin  # no engine waits for its import

        return DiskAdmin(options)

    # ---- one chunk, on a worker thread -----------------------------------------------------

    def has(self, key: bytes) -> bool:
        return self._store.exists(key)

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        return self._store.load(key, into)

    def store(self, key: bytes, chunk: memoryview) -> Written:
        return self._store.store(key, chunk)

    def delete(self, key: bytes) -> None:
        if is_key(key):
            self._store.discard(name_of(0, key), "removed")

    def release(self) -> None:
        """Save a snapshot and close the root; if housekeeping is stuck, once it has ended."""
        if self._housekeeper.close(self.options.stall_s):
            self._store.close()
        else:
            log.warning("disk: %s is busy, closed when its thread ends", self._store.path)
            start_once(self._close_late)

    def _close_late(self) -> None:
        self._housekeeper.wait()
        self._store.close()

    # ---- batches ---------------------------------------------------------------------------

    def _is_quick(self, memory: Sequence[memoryview]) -> bool:
        return self.room is not None and (_HAS_FEW_CORES or _are_small(memory))

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Answer from the index, and from the folder for keys it does not know."""
        if self._refuses("read", len(keys)):
            return [False] * len(keys)
        answers = [self.holds(key) for key in keys]
        if unknown := [i for i, known in enumerate(answers) if not known]:
            there = await super().contains([keys[i] for i in unknown])
            for i, exists in zip(unknown, there, strict=True):
                answers[i] = exists
        return answers

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool | ReadResult]:
        if self._refuses("read", len(keys)):
            return [ReadResult.UNAVAILABLE] * len(keys)
        check_lengths(keys, into)
        targets, loaded, store = [target.cast("B") for target in into], list[int](), self._store
        names = [name_of(0, key) for key in keys]

        def load(run: range) -> list[bool | ReadResult]:
            part = slice(run.start, run.stop)
            found = store.load_run(names[part], keys[part], targets[part])
            for i, answer in zip(run, found, strict=True):
                if answer:
                    loaded.append(i)
                    arrived(i)
            return found

        # Chunks in slots that follow one another are read by one call.
        runs = store.slots.runs(names, targets) if keys else []
        failed, is_quick = ReadResult.UNAVAILABLE, self._is_quick(into)
        try:
            return await self.run_all("read", runs, load, failed, is_quick=is_quick)
        finally:  # also for a load that its deadline cut off
            # The head of a prefix becomes the most recent.
            store.used([names[i] for i in sorted(loaded, reverse=True)])

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        """Write chunks, each whole or not at all; the first write names the namespace on disk."""
        if self._refuses("write", len(keys)):
            return [False] * len(keys)
        for key in keys:
            check_key(key)
        check_lengths(keys, chunks)
        index, names = self._store.index, [name_of(0, key) for key in keys]
        index.own(zip(names, tenants, strict=False))  # none, where tenants are not told apart
        new = (c.nbytes for k, c in zip(keys, chunks, strict=True) if name_of(0, k) not in index)
        reservation = Reservation(self._store.space, new)

        memory, owners = [chunk.cast("B") for chunk in chunks], tenants or [b""] * len(keys)

        def store(run: range) -> list[Written]:
            part = slice(run.start, run.stop)
            return self._store.store_run(keys[part], memory[part], reservation, owners[part])

        answers: list[Written]
        runs = self._store.store_runs(memory)
        try:
            is_quick = self.room is not None and self.room.is_free and _are_small(chunks)
            answers = await self.run_all("write", runs, store, False, is_quick=is_quick)
        finally:
            index.disown(names)
            index.reorder(names[::-1])
            self._housekeeper.wake()
            if not reservation.is_used_up:
                await self._patiently(self._release(reservation))
        if self._repairs != (repairs := self._store.root.repairs) and any(answers):
            # If it was opened without facts, the manifest tells the name alone.
            self._repairs = repairs
            await self._patiently(self._describe_again())
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        if not self._refuses("write", len(keys)):
            await super().remove(keys)

    async def closing(self) -> None:
        self._stopping.set()
        self._housekeeper.stop()  # a store that takes this one's place may evict from now on
        if self._unfinished:
            await asyncio.wait(self._unfinished, timeout=self.options.stall_s)

    # ---- optional protocols ----------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        """Return whether the index knows a chunk."""
        return self._is_serving and self._store.knows(name_of(0, key))

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        """Return what appeared or left, whichever process did it; see :class:`LocalIndex`.

        A chunk that expires is reported up to a minute later, at the next search for such chunks.
        """
        store, is_ready, is_serving = self._store, self._store.ready.is_set(), self._is_serving
        if is_serving != self._was_serving:
            self._was_serving = is_serving
            store.index.list_again()
        names = store.index.take_changes(limit)
        if is_ready and not self._is_complete and not store.index.num_changes:
            self._is_complete = True
            self._tell_needed()  # the scan may have found more of them
        return [(name[2:], is_serving and store.knows(name)) for name in names]

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    @property
    def _is_serving(self) -> bool:
        return not self.is_closed and self._store.root.refusal is None

    @property
    def place(self) -> str:
        return self._place

    def check_fit(self, chunk_bytes: int) -> None:
        """See :class:`Observable`; a chunk takes its header as well."""
        super().check_fit(bytes_on_disk(chunk_bytes))

    def forget(self, keys: Sequence[bytes]) -> None:
        self._store.index.hide(name_of(0, key) for key in keys)

    def spare(self, keys: Collection[bytes]) -> None:
        """See :class:`Spares`; if another process evicts, it learns of a use of these chunks."""
        if self.is_closed:
            return
        self._store.index.spare(name_of(0, key) for key in keys)
        self._tell_needed()

    def _tell_needed(self) -> None:
        index, uses = self._store.index, self._store.uses
        if not self._store.root.evictor.held:
            new = index.needed - self._told  # an access time a chunk, once
            known = {n for n in new if n in index and uses.is_fresh(n)}  # none is renewed
            uses.used(known)
            self._told = self._told & index.needed | known

    def expect(self, returns: Sequence[ToldReturn], share: float) -> None:
        """See :class:`Spares`; if another process evicts, it learns nothing."""
        if not self.is_closed:
            self._store.index.expect(map(named, returns), share)

    def in_place(self) -> dict[str, Any]:
        """Return what :class:`CachedFiles` needs; empty: chunks are encrypted, or read directly."""
        is_plain = isinstance(self._store.files.chunks.seal, ChecksumSeal)
        return self._for_readers if is_plain else {}

    def places(self, keys: Sequence[bytes]) -> list[Run]:
        """Return where chunks are that have surely not expired, for :class:`CachedFiles`."""
        if not self._is_serving:
            return []
        store, names = self._store, [name_of(0, key) for key in keys]
        known = [name if store.knows(name) else b"" for name in names]
        return list(runs_in(store.segments, store.path, store.namespaces[0], known))

    def used(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks that an engine has read in place."""
        if not self.is_closed:
            names = [name_of(0, key) for key in reversed(keys)]  # the head is the most recent
            self._store.used([name for name in names if name in self._store.index])

    def take_removals(self) -> list[Removal]:
        return self._store.take_removals()

    def usage(self) -> Usage:
        """Return the bytes allocated under the root and the chunks known."""
        root = self._store.root
        return Usage(root.quota.resident_bytes, root.limits.capacity_bytes, len(self._store.index))

    def count(self, reason: str, number: int = 1) -> None:
        self._store.count(reason, number)

    def counters(self) -> Mapping[str, int]:
        return self._store.counters()

    async def describe(self, facts: Mapping[str, str]) -> None:
        if self.is_closed:
            return
        self._facts, self._repairs = dict(facts), self._store.root.repairs
        await self._finish(run_once(self._write_manifest, facts))

    async def described(self) -> list[Described]:
        if self.is_closed:
            return []
        store, is_stopping = self._store, self._stopping.is_set
        looked = run_once(described, store.vfs, store.path, store.namespace, is_stopping)
        return await self._finish(looked)

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces; engines that use one find nothing there, and may store again.

        Closing the backend stops it. The remaining chunks leave as the capacity demands.
        """
        if self.is_closed:
            return 0
        folders = [namespace_digest(namespace).hex() for namespace in namespaces]
        return await self._finish(run_once(purge, self._store, folders, self._stopping))

    def encrypt_with(self, seal: Seal) -> None:
        """Store chunks encrypted; called by :func:`kvoffload.open_backend`, before the first."""
        self._store.files.chunks.seal = seal

    # ---- for tests and tools ---------------------------------------------------------------

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until the index knows all chunks of the start; return False after the timeout."""
        return self._store.ready.wait(timeout_s)

    # ---- inside ----------------------------------------------------------------------------

    async def _release(self, reservation: Reservation) -> None:
        try:
            await run_once(reservation.close)
        except RuntimeError:  # the system has no more threads to give
            self._housekeeper.release(reservation)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that close() waits for, and that a cancellation does not interrupt."""
        return await asyncio.shield(self._begin(work))

    async def _patiently(self, work: Coroutine[Any, Any, T]) -> None:
        """Do work that close() waits for; on a dead disk it ends later than this call."""
        await asyncio.wait([self._begin(work)], timeout=self.options.stall_s)

    def _begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        task = asyncio.ensure_future(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task

    async def _describe_again(self) -> None:
        try:
            await run_once(self._write_manifest, self._facts)
        except RuntimeError:  # the system has no more threads to give
            self._repairs = _UNDESCRIBED

    def _write_manifest(self, facts: Mapping[str, str]) -> None:
        store, folder = self._store, self._store.folder(0)
        temporary = partial(store.root.temporary, counted=False)
        with self._describing:
            try:
                manifest.write(store.vfs, folder, self.namespace, facts, temporary)
            except OSError as error:
                self._repairs = _UNDESCRIBED  # the next write tries again
                text = "disk: cannot write a manifest into %s: %s"
                self._untold.warning(text, folder, error)

    def _refuses(self, kind: str, items: int) -> bool:
        """Return whether to answer False to all: closed, or other users may change the root."""
        if not self.is_closed and self._store.root.refusal is not None:
            self.count(f"{kind}_unsafe", items)
            return True
        return self.is_closed

    def _read_threads(self) -> int:
        if self.options.read_threads is None and self.io_mode == "buffered":
            # A load from the page cache is a copy: threads beyond the cores only contend.
            return min(_BUFFERED_READERS, os.cpu_count() or 1)
        return self.options.read_threads or _READERS


def _are_small(memory: Sequence[memoryview]) -> bool:
    return all(each.nbytes <= _QUICK_BYTES for each in memory)
