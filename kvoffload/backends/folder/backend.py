"""The folder backend: chunks in a directory that many hosts mount, on NFS, Lustre, CephFS, FUSE.

This module is the asynchronous face. ``mount`` makes blocking calls on its threads, and gives them
up. ``chunk_files`` reads and writes one file, ``known`` remembers which exist, ``seal``
authenticates chunks if there is a secret. In the background ``upkeep`` tells what was stored, by
``records`` that all hosts read. One process at a time is the ``evictor``: ``scan`` finds the files,
``order`` says which leave first, by their ``tenants`` if there are shares; ``room`` is what it
leaves a process, and what ``waiting_writes`` wait for. ``shared_root`` opens the folder. Files and
folders are those of the disk tier, and so is the code that names, walks and checks them.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvoffload.backends.asynchronous import AsyncChunkBackend
from kvoffload.backends.base import (
    Described,
    ReadResult,
    Usage,
    WriteResult,
    Written,
    check_lengths,
)
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.disk.namespace_sample import described
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import purge_files
from kvoffload.backends.folder.chunk_files import ChunkFiles, Found
from kvoffload.backends.folder.known import KnownChunks
from kvoffload.backends.folder.mount import Late, Mount, Stalled, Turn
from kvoffload.backends.folder.options import FolderOptions
from kvoffload.backends.folder.records import Records
from kvoffload.backends.folder.seal import read_secret
from kvoffload.backends.folder.shared_root import Root
from kvoffload.backends.folder.upkeep import SAY_AGAIN_S, Housekeeper
from kvoffload.backends.folder.waiting_writes import NO_ROOM, WaitingWrites
from kvoffload.backends.frames import Frames
from kvoffload.backends.header import ALIGNED_BYTES, check_key, namespace_digest
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.seals import Seal
from kvoffload.backends.secret_files import refuse_with_encryption
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

__all__ = ["FolderBackend", "FolderOptions"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_KEYS_A_CALL = 32
"""Keys that one thread looks up in a row: a hop to a thread costs as much as a few of them."""
_LOOKUP_THREADS = 4
"""So many, or one for each of those that move chunks: a lookup waits for no chunk."""
_FULL = "full"


class FolderBackend(AsyncChunkBackend):
    """Chunks as files under a root that many hosts share.

    Args:
        options: See :class:`FolderOptions`.
        namespace: Chunks of other namespaces are invisible.
        vfs: Makes the system calls.

    Raises:
        ConfigError: The root or the secret cannot be used.
    """

    Options = FolderOptions
    is_shared = True
    opens_apart = True  # the mount may hang

    def __init__(self, options: FolderOptions, namespace: str, *, vfs: Vfs | None = None) -> None:
        signature = read_secret(options.secret_file)
        self._options, self._suffix = options, signature.suffix if signature else ""
        self._namespace = namespace + self._suffix
        root = os.path.abspath(os.path.expanduser(options.root))
        super().__init__(at_once=options.threads, close_s=options.timeout_s, name=f"folder {root}")
        self._frames = Frames(self._namespace, self.count, ALIGNED_BYTES)
        if signature is not None:
            self._frames.seal = signature  # which only adds a code
        self._vfs = vfs or Vfs()
        self._capacity_bytes = int(options.capacity)
        self._folder_name = namespace_digest(self._namespace).hex()
        self._records = Records(self._vfs, root, secrets.token_hex(8))
        self._root = Root(
            self._vfs, root, self._records, trust_parents=options.trust_parent_folders
        )
        self._place = os.path.realpath(root)  # here, where it may block
        self._folder = f"{root}/{self._folder_name}"
        self._files = ChunkFiles(self._vfs, root, self._folder, self._records.token, self._frames)
        self._known = KnownChunks()
        threads = options.threads
        self._mount = Mount("kvoffload-folder", threads, options.timeout_s)
        self._lookups = Mount(
            "kvoffload-folder-lookup", min(threads, _LOOKUP_THREADS), options.timeout_s
        )
        self._opened: dict[bytes, os.stat_result] = {}
        """The facts of the files that loads in flight have opened, where a load asks for them."""
        self._facts: dict[str, str] = {}
        self._is_described = False
        self._failures = Throttle(log, SAY_AGAIN_S)
        self._housekeeper = Housekeeper(
            self._vfs,
            self._root,
            self._records,
            options,
            self._known,
            self._files.path_of,
            self._note_evicted,
            self.count,
        )
        self._waiting = WaitingWrites(
            self._housekeeper.room,
            self._known,
            lambda: not (self._mount.is_stalled or self.is_closed),
        )

    def __repr__(self) -> str:
        return f"FolderBackend({self._root.path!r}, {self._namespace!r})"

    def encrypt_with(self, seal: Seal) -> None:
        """Store chunks encrypted; called by :func:`kvoffload.open_backend`, before the first.

        Raises:
            ConfigError: there is a ``secret_file`` as well.
        """
        refuse_with_encryption(self._options.secret_file)
        self._frames.seal = seal

    @staticmethod
    def admin(options: Mapping[str, Any]) -> Any:
        """Return the operators' methods; see :func:`kvoffload.registry.open_admin`."""
        from kvoffload.backends.folder.admin import FolderAdmin  # no engine waits for its import

        return FolderAdmin(options)

    # ---- one chunk -----------------------------------------------------------------------------

    async def load(self, key: bytes, into: memoryview) -> ReadResult:
        is_young = self._known.is_young(key)
        found = await self._asked(
            "read",
            lambda turn: self._files.read(turn, key, into, is_young=is_young),
            Found("late"),
        )
        if found.facts is not None:
            self._opened[key] = found.facts
        if found.verdict is not None:
            return found.verdict
        if found.reason == "late":
            return ReadResult.LATE
        if found.reason == "missing":
            self.count("read_missing")
            return ReadResult.MISSING
        self.count(found.reason if found.reason.startswith("corrupt_") else f"read_{found.reason}")
        self._say(found.reason, "a chunk cannot be read: %s", found.reason)
        return ReadResult.of(found.reason)

    async def store(self, key: bytes, chunk: memoryview, tenant: bytes) -> Written:
        if self._known.holds(key) and await self._is_there(key):
            self.count("write_present")
            return WriteResult.PRESENT
        reason = await self._asked(
            "write", lambda turn: self._write(turn, key, chunk, tenant), "late"
        )
        if not reason:
            self._known.stored(key)
            return True
        if reason == _FULL:
            return NO_ROOM
        if reason != "late":
            self.count(f"write_{reason}")
            self._say(f"write_{reason}", "a chunk cannot be stored: %s", reason)
        return False

    def _write(self, turn: Turn, key: bytes, chunk: memoryview, tenant: bytes) -> str:
        """Write a chunk if there is room for it; return why not, or an empty text.

        It counts on the thread of the mount, where it is known whether a file came that the caller
        has given up.
        """
        room, nbytes, file = self._housekeeper.room, chunk.nbytes, (self._folder_name, key)
        if not room.reserve(nbytes, file):
            return _FULL
        reason = "failed"
        try:
            reason = self._files.write(turn, key, chunk, tenant)
        finally:  # also if it raises, as without memory
            if reason:
                room.release(nbytes, reason, file)
            else:
                room.written(nbytes, file)
        return reason

    async def has(self, key: bytes) -> bool:
        return (await self.contains([key]))[0]

    async def delete(self, key: bytes) -> None:
        self._known.forget(key)
        await self._asked("write", lambda turn: self._files.remove(key), None)

    async def release(self) -> None:
        self._mount.close()
        self._lookups.close()

    # ---- batches -------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Answer what is known at once; look up the rest, many keys a call."""
        if self.is_closed or self._mount.is_stalled:
            return [False] * len(keys)
        known = {key: self._known.holds(key) for key in keys}
        unknown = [key for key, is_there in known.items() if is_there is None]
        parts = [unknown[i : i + _KEYS_A_CALL] for i in range(0, len(unknown), _KEYS_A_CALL)]
        for part, there in zip(parts, await asyncio.gather(*map(self._look, parts)), strict=True):
            known.update(zip(part, there, strict=True))
            self._known.found(key for key, is_there in zip(part, there, strict=True) if is_there)
        return [bool(known[key]) for key in keys]

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool | ReadResult]:
        try:
            answers = await super().read_each(keys, into, arrived)
        except asyncio.CancelledError:
            for key in keys:
                self._opened.pop(key, None)
            raise
        damaged = []
        for key, answer in zip(keys[::-1], answers[::-1], strict=True):  # heads are used last
            facts = self._opened.pop(key, None)
            if answer is ReadResult.MISSING and facts is None:
                self._note_missing(key)
            elif answer is ReadResult.MISSING:
                self._known.pass_over(key)
            elif answer is ReadResult.CORRUPT:
                damaged.append(self._remove_damaged(key, facts))
            elif not answer:
                self._known.forget(key)  # the next lookup asks the mount
            elif facts is None:
                self._known.found([key])
            else:
                self._known.used(key, self._records.age_s(facts.st_mtime_ns))
        await asyncio.gather(*damaged)
        return answers

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        """Write chunks, each whole or not at all; name the namespace where it has a new folder."""
        check_lengths(keys, chunks)
        for key in keys:
            check_key(key)
        now = super().write

        async def write(part: list[int]) -> list[Written]:
            of_part = [tenants[i] for i in part] if tenants else ()
            return await now([keys[i] for i in part], [chunks[i] for i in part], of_part)

        answers = await self._waiting.write(keys, chunks, write)
        if refused := sum(answer is NO_ROOM for answer in answers):
            self.count("refused_full", refused)
            answers = [answer or False for answer in answers]
        if (not self._is_described or self._files.has_new_folder) and any(answers):
            # If it was opened without facts, the manifest tells the name alone.
            self._files.has_new_folder = False
            await self.describe(self._facts)
        return answers

    async def close(self) -> None:
        if self.is_closed:
            return
        try:
            await super().close()
        finally:  # also after a cancellation
            self._housekeeper.stop()
        if not await run_once(self._housekeeper.join, self._mount.timeout_s):
            log.warning("%r: housekeeping hangs; its thread ends when the mount answers", self)

    # ---- optional protocols --------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return the bytes under the root that the evictor counted, and the chunks known here."""
        upkeep = self._housekeeper
        gauges = {
            "up": int(not (self._mount.is_stalled or upkeep.is_gone)),
            "evictor": int(upkeep.is_evictor),
            "hosts": upkeep.num_hosts,
        }
        return Usage(upkeep.room.used_bytes, upkeep.capacity_bytes, len(self._known), gauges)

    @property
    def place(self) -> str:
        return self._place

    def check_fit(self, chunk_bytes: int) -> None:
        wanted = 4 * bytes_on_disk(chunk_bytes)
        if self._capacity_bytes < wanted:
            remedy = f"must hold at least four chunks with their headers, {human_bytes(wanted)}"
            raise ConfigError("capacity", human_bytes(self._capacity_bytes), remedy)

    async def describe(self, facts: Mapping[str, str]) -> None:
        if not self.is_closed:
            self._facts, self._is_described = dict(facts), True
            work, is_written = self._write_manifest, False
            try:
                is_written = await self._asked("write", lambda turn: work(facts), False)
            finally:  # also of a call that is cancelled before a thread begins it
                self._is_described = is_written

    async def described(self) -> list[Described]:
        if self.is_closed:
            return []
        root, own = self._root.path, self._namespace
        look = partial(described, is_mounted=True)
        found = await run_once(look, self._vfs, root, own, lambda: self.is_closed)
        names = (each.namespace.removesuffix(self._suffix) for each in found)
        return [each._replace(namespace=n) for each, n in zip(found, names, strict=True)]

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove namespaces; engines that use one find nothing there, and may store again."""
        if self.is_closed:
            return 0
        folders = [namespace_digest(each + self._suffix).hex() for each in namespaces]
        if self._folder_name in folders:
            self._known.clear()
        return await run_once(
            purge_files,
            self._vfs,
            self._root.path,
            folders,
            self._folder_name,
            lambda: self.is_closed,
        )

    # ---- inside --------------------------------------------------------------------------------

    async def _asked(
        self, kind: str, work: Callable[[Turn], T], late: T, mount: Mount | None = None
    ) -> T:
        """Return what a call of the mount says; ``late``, and count it, if it says nothing."""
        try:
            return await (mount or self._mount).call(work)
        except Late as error:
            self.count(f"{kind}_stalled" if isinstance(error, Stalled) else f"{kind}_late")
            timeout_s = self._mount.timeout_s
            self._say(kind, "the mount did not answer a %s within %g s", kind, timeout_s)
            return late

    def _say(self, kind: str, text: str, *values: object) -> None:
        """Log a failure that may last: one line for each kind in :data:`SAY_AGAIN_S`."""
        self._failures.warning(f"folder %s: {text}", self._root.path, *values, kind=kind)

    async def _look(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._asked(
            "lookup",
            lambda turn: self._files.exist(keys, self.count),
            [False] * len(keys),
            self._lookups,
        )

    async def _is_there(self, key: bytes) -> bool:
        """Look up a chunk that counts as present: another host may have evicted it."""
        (is_there,) = await self._look([key])
        if not is_there:
            self._note_missing(key)
        return is_there

    def _note_missing(self, key: bytes) -> None:
        if self._known.forget(key):
            self.note_removal(key, "vanished")
            self.count("vanished")

    def _note_evicted(self, folder: str, key: bytes) -> None:
        """Take in an eviction by this process, on the thread of its upkeep."""
        self.count("evicted")
        if folder == self._folder_name:
            self._known.forget(key)
            self.note_removal(key, "evicted")

    async def _remove_damaged(self, key: bytes, facts: os.stat_result | None) -> None:
        """Remove the file that was found damaged; a link or folder is left to the next store."""
        self._known.forget(key)
        remove = self._files.remove_damaged
        if facts is not None and await self._asked("write", lambda turn: remove(key, facts), False):
            self.note_removal(key, "corrupt")

    def _write_manifest(self, facts: Mapping[str, str]) -> bool:
        """Write the manifest if there is none; return whether there is one."""
        vfs, folder = self._vfs, self._folder

        def temporary() -> str:
            vfs.make_folder(folder)
            return f"{folder}/.{self._records.token}"

        try:
            manifest.write(vfs, folder, self._namespace, facts, temporary)
        except OSError as error:
            self._say("manifest", "cannot write a manifest: %s", error)
            return False
        return True
