"""A backend in this process's memory: the shortest complete one. Read it before writing yours."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvoffload.backends.base import ReadResult, Usage, WriteResult, Written
from kvoffload.backends.changes import ChangedKeys
from kvoffload.backends.threaded import InlineBackend
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError


class MemoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the memory backend."""

    capacity: ByteSize = ByteSize(1 << 30)
    """Payload bytes kept; beyond it the least recently used chunks leave."""

    def __post_init__(self) -> None:
        if self.capacity <= 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")


class MemoryBackend(InlineBackend):
    """Chunks in a dictionary, gone with the process. For tests, examples and ordinary memory.

    Copies run on the loop itself: one chunk takes less time than a hop to a thread.
    """

    Options = MemoryOptions

    def __init__(self, options: MemoryOptions, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self._capacity = int(options.capacity)
        self._chunks: OrderedDict[bytes, bytes] = OrderedDict()  # the least recently used first
        self._resident_bytes = 0
        self._changes = ChangedKeys()
        self._is_complete = False

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._chunks for key in keys]  # no turn of the loop for each key

    # ---- one chunk -------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return key in self._chunks

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        chunk = self._chunks.get(key)
        if chunk is None or len(chunk) != into.nbytes:
            self.count("read_missing" if chunk is None else "read_length")
            return ReadResult.MISSING
        self._chunks.move_to_end(key)
        into[:] = chunk
        return ReadResult.HIT

    def store(self, key: bytes, chunk: memoryview) -> Written:
        if chunk.nbytes > self._capacity:
            self.count("refused_size")
            return False
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return WriteResult.PRESENT
        while self._resident_bytes + chunk.nbytes > self._capacity:
            victim = next(iter(self._chunks))
            self._drop(victim)
            self.note_removal(victim, "evicted")
            self.count("evicted")
        self._chunks[key] = bytes(chunk)
        self._resident_bytes += chunk.nbytes
        self._changes.note(key)
        return True

    def delete(self, key: bytes) -> None:
        self.forget([key])

    def release(self) -> None:
        for key in list(self._chunks):
            self._drop(key)

    # ---- optional protocols ----------------------------------------------------------------

    def holds(self, key: bytes) -> bool:
        return key in self._chunks

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these chunks: a load of them failed, so they are of no use."""
        for key in keys:
            self._drop(key)

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        if not self._changes.is_read:
            self._changes.begin_parts([self._chunks.keys()])
        keys = self._changes.take(limit)
        self._is_complete = self._is_complete or not self._changes
        return [(key, key in self._chunks) for key in keys]

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove nothing: another store's chunks went with it."""
        return 0

    def usage(self) -> Usage:
        return Usage(self._resident_bytes, self._capacity, len(self._chunks))

    def _drop(self, key: bytes) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._resident_bytes -= len(chunk)
            self._changes.note(key)
