"""One namespace of the server's memory, as a backend."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from kvoffload.backends.base import (
    LocalIndex,
    ReadResult,
    Spares,
    Usage,
    Written,
)
from kvoffload.backends.changes import ChangedKeys
from kvoffload.backends.frames import Frames
from kvoffload.backends.header import check_sum, checksum, namespace_digest
from kvoffload.backends.threaded import ThreadPoolBackend
from kvoffload.io.service.host_memory import HostMemory

REMOVED_AT_ONCE = 1024
"""Chunks of a namespace that is removed: they take some milliseconds."""
_THREADS = 2
"""Copies at once: more would wait for the memory."""


class HostStore(ThreadPoolBackend, LocalIndex, Spares):
    """Chunks of one namespace in memory that all namespaces share; they stay when it is closed.

    Each load is verified, as on any store: its key, namespace, length and checksum.

    Args:
        memory: where the chunks are. One open store a namespace reads its changes.
        namespace: whose chunks these are.
    """

    def __init__(self, memory: HostMemory, namespace: str) -> None:
        super().__init__(threads=_THREADS, store_threads=_THREADS, name="host memory")
        self._frames, self._digest = Frames(namespace, self.count), namespace_digest(namespace)
        self._memory = memory
        self._number = memory.number_of(namespace)
        self._changes = ChangedKeys()
        self._is_complete = False
        memory.begin_reading(self._number, self)

    # ---- one chunk ----

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        header = self._frames.blank()
        digest = self._memory.read(self._number + key, header, into)
        if digest is None:
            self.count("read_missing")
            return ReadResult.MISSING
        found = self._checked(key, header, into.nbytes, digest)
        if found is ReadResult.CORRUPT:
            self.delete(key)
        return found

    def _checked(self, key: bytes, header: memoryview, size: int, digest: bytes) -> ReadResult:
        return self._frames.result(check_sum(header, size, digest, key, self._digest))

    def store(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> Written:
        header, _ = self._frames.pack(key, chunk, tenant)
        written = self._memory.write(self._number + key, header, chunk)
        if not written:
            self.count("refused_size")
        return written

    def has(self, key: bytes) -> bool:
        return self._memory.holds(self._number, key)

    def delete(self, key: bytes) -> None:
        self._memory.drop([self._number + key])

    # ---- batches ----

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.holds(key) for key in keys]

    async def read_each(
        self, keys: Sequence[bytes], into: Sequence[memoryview], arrived: Callable[[int], None]
    ) -> list[bool | ReadResult]:
        answers = await super().read_each(keys, into, arrived)
        self._memory.used([self._number + key for key in reversed(keys)])
        return answers

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        names = [self._number + key for key in keys]
        if tenants:
            self._memory.own(names, tenants)
        try:
            answers = await self.store_each(keys, chunks, tenants)
        finally:
            self._memory.disown(names)
        self._memory.reorder(names[::-1])
        return answers

    async def closing(self) -> None:
        if self._changes.is_read:  # none of them can be read any more
            self._changes.begin_parts(self.tables())
        self._memory.end_reading(self._number, self)

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove the chunks of these namespaces, its own or not; other work has turns meanwhile."""
        removed, memory = 0, self._memory
        for namespace in namespaces:
            names = memory.names_of(namespace)
            for start in range(0, len(names) or 1, REMOVED_AT_ONCE):
                removed += memory.drop(names[start : start + REMOVED_AT_ONCE])
                await asyncio.sleep(0)
        return removed

    # ---- loans ----

    async def verify(self, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Check chunks where they are, each once; those that are damaged are removed."""

        def check(i: int) -> bool:
            key = keys[i]

            def is_good(header: memoryview, there: memoryview) -> bool:
                return bool(self._checked(key, header, there.nbytes, checksum(there)))

            if not (is_whole := self._memory.verify(self._number + key, sizes[i], is_good)):
                self.delete(key)
            return is_whole

        await self.run_each("read", len(keys), check, False)

    def lend(
        self, keys: Sequence[bytes], sizes: Sequence[int]
    ) -> tuple[list[int], Callable[[], None]]:
        """Lend chunks that are verified; see :meth:`HostMemory.lend`."""
        starts, end = self._memory.lend(self._number, keys, sizes)
        self.count("lent", len(starts) - starts.count(-1))
        return starts, end

    # ---- the memory's reader, and the reader of this index ----

    def changed(self, key: bytes) -> None:
        self._changes.note(key)

    def evicted(self, key: bytes) -> None:
        self.note_removal(key, "evicted")
        self.count("evicted")

    def holds(self, key: bytes) -> bool:
        return self._memory.holds(self._number, key) and not self.is_closed

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self.is_closed else self._memory.held(self._number, keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these chunks: a load of them failed, so they are of no use."""
        for key in keys:
            self.delete(key)

    def tables(self) -> Collection[Collection[bytes]]:
        """Return the keys that are here, in tables that change; the index lists them no more.

        So each of many readers takes the list from here, and no copy of it is kept.
        """
        if not self._changes.is_read:
            self._changes.begin_parts(())  # first: from now on each change is noted
        return self._memory.tables(self._number)

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        if not self._changes.is_read:  # above a store without an index, they are not asked for
            self._changes.begin_parts(self.tables())
        keys = self._changes.take(limit)
        self._is_complete = self._is_complete or not self._changes
        return list(zip(keys, self.held(keys), strict=True))

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def spare(self, keys: Collection[bytes]) -> None:
        self._memory.spare(self._number, keys)

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Keep no facts: they would end with the process, as the chunks do."""

    def usage(self) -> Usage:
        """Return how full the memory is, with the chunks of all namespaces."""
        memory = self._memory
        gauges = {"lent_bytes": memory.lent_bytes}
        return Usage(memory.resident_bytes, memory.capacity_bytes, len(memory), gauges)
