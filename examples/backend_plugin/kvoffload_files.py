"""One file a chunk, through aiofiles: a complete third-party backend with an asynchronous client.

Three coroutines make the backend. The optional methods tell an engine of usage and evictions, and
let operators inspect and verify the store. The test class in ``tests`` checks all of it.
"""

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from pathlib import Path
from urllib.parse import quote, unquote

import aiofiles
import aiofiles.os
import msgspec

from kvoffload.backends.admin import Check, Holding, Survey, Verified
from kvoffload.backends.asynchronous import AsyncBackend
from kvoffload.backends.base import Usage
from kvoffload.backends.header import (
    COMPACT_BYTES,
    check_chunk,
    counted_as,
    namespace_digest,
)
from kvoffload.backends.verification import Verification
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError


class FilesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings."""

    root: str
    """The folder, of one engine; made if missing."""
    capacity: ByteSize = ByteSize(1 << 30)
    """Bytes of one namespace's files; beyond it the least recently used chunks leave."""

    def __post_init__(self) -> None:
        if self.capacity <= 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")


class FilesBackend(AsyncBackend):
    """A folder a namespace, a file a chunk."""

    Options = FilesOptions
    opens_apart = True  # the constructor lists files, which may block

    def __init__(self, options: FilesOptions, namespace: str) -> None:
        super().__init__(namespace)
        self._root, self._capacity_bytes = Path(options.root), int(options.capacity)
        self._folder = self._root / f"ns-{quote(namespace, safe='')}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self._folder.glob("*.tmp"):  # of a process that was killed
                unfinished.unlink()
            found = [(path, path.stat()) for path in self._folder.iterdir()]
        except OSError as error:
            raise ConfigError("root", options.root, f"cannot be used: {error}") from error
        found.sort(key=lambda each: each[1].st_mtime_ns)
        self._sizes = OrderedDict((path.name, facts.st_size) for path, facts in found)
        """The bytes of each file, the least recently used first."""
        self._bytes = sum(self._sizes.values())
        self._naming = asyncio.Lock()
        """Held while a file gets its name or loses it."""

    # ---- one chunk: its bytes alone, as the base class makes and checks the header ----------

    async def has(self, key: bytes) -> bool:
        return await aiofiles.os.path.exists(self._folder / key.hex())

    async def get(self, key: bytes, header: memoryview, into: memoryview) -> bool:
        try:
            async with aiofiles.open(self._folder / key.hex(), "rb") as file:
                await file.readinto(header)
                await file.readinto(into)
        except FileNotFoundError:
            return False
        if key.hex() in self._sizes:
            self._sizes.move_to_end(key.hex())
        return True

    async def put(self, key: bytes, header: bytes, chunk: memoryview) -> bool:
        size, unfinished = len(header) + chunk.nbytes, self._folder / f"{uuid.uuid4()}.tmp"
        self._bytes += size  # reserved before the file grows
        try:
            await self._evict()
            if self._bytes > self._capacity_bytes:
                self._bytes -= size
                self.count("refused_size")
                return False
            async with aiofiles.open(unfinished, "xb") as file:
                await file.write(header)
                await file.write(chunk)
            async with self._naming:
                await aiofiles.os.replace(unfinished, self._folder / key.hex())
                self._bytes -= self._sizes.pop(key.hex(), 0)
                self._sizes[key.hex()] = size
        except OSError:
            self._bytes -= size
            with contextlib.suppress(OSError):
                await aiofiles.os.remove(unfinished)
            raise
        return True

    async def delete(self, key: bytes) -> None:
        async with self._naming:
            await self._remove(key.hex())

    async def _evict(self) -> None:
        async with self._naming:
            while self._bytes > self._capacity_bytes and self._sizes:
                oldest = next(iter(self._sizes))
                await self._remove(oldest)
                self.count("evicted")
                self.note_removal(bytes.fromhex(oldest), "evicted")

    async def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await aiofiles.os.remove(self._folder / name)
        self._bytes -= self._sizes.pop(name, 0)

    # ---- optional: figures, the events that follow from an eviction, operators' commands ----

    def usage(self) -> Usage:
        return Usage(self._bytes, self._capacity_bytes, len(self._sizes))

    async def survey(self) -> Survey:
        found: dict[str, list[int]] = {}
        for path, size in await asyncio.to_thread(self._files):
            found.setdefault(unquote(path.parent.name[3:]), []).append(size)
        return Survey([Holding(name, {}, len(sizes), sum(sizes)) for name, sizes in found.items()])

    async def verify(self, wanted: Check) -> Verified:
        files = await asyncio.to_thread(self._files)
        run = Verification(files, wanted, lambda file: file[1])
        for path, size in run.chosen:
            reason = await self._damage(path)
            why = reason and counted_as(reason)
            await asyncio.sleep(run.judge((path, size), str(path), why, size, path.unlink))
        return run.report()

    async def _damage(self, path: Path) -> str | None:
        async with aiofiles.open(path, "rb") as file:
            header, chunk = await file.read(COMPACT_BYTES), await file.read()
        namespace = namespace_digest(unquote(path.parent.name[3:]))
        return check_chunk(header, chunk, bytes.fromhex(path.name), namespace)

    def _files(self) -> list[tuple[Path, int]]:
        found = sorted(self._root.glob("ns-*/*"))
        return [(path, path.stat().st_size) for path in found if path.suffix != ".tmp"]
