"""A backend in this process's memory: the shortest complete one. Read it before writing yours."""

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence

import msgspec

from kvoffload.backends.base import Removal, Usage
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError

_MAX_REMOVALS = 1 << 16
"""Removals kept for a listener that may never ask; older ones are lost to it."""


class MemoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the memory backend."""

    capacity: ByteSize = ByteSize(1 << 30)
    """Payload bytes kept; beyond it the least recently used chunks leave."""

    def __post_init__(self) -> None:
        """Refuse a store that can hold nothing."""
        if self.capacity <= 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")


class MemoryBackend:
    """Chunks in a dictionary, gone with the process. For tests, examples and ordinary memory.

    Copies run on the loop itself: one chunk takes less time than a hop to a thread, and the loop
    gets its turn between any two.
    """

    Options = MemoryOptions

    def __init__(self, options: MemoryOptions, namespace: str) -> None:
        self.namespace = namespace
        self._capacity = int(options.capacity)
        self._chunks: OrderedDict[bytes, bytes] = OrderedDict()  # the least recently used first
        self._resident_bytes = 0
        self._removals: deque[Removal] = deque(maxlen=_MAX_REMOVALS)
        self._counts: Counter[str] = Counter()
        self._closed = False
        # holds() and forget() come from the engine's thread while the loop's thread writes.
        self._lock = threading.Lock()

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether it is here."""
        return [key in self._chunks for key in keys]

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Copy chunks out; see :meth:`Backend.read`."""
        answers = []
        for key, target in zip(keys, into, strict=True):
            answers.append(self._read(key, target))
            await asyncio.sleep(0)
        return answers

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Copy chunks in, the least recently used making room; see :meth:`Backend.write`."""
        answers = []
        for key, chunk in zip(keys, chunks, strict=True):
            answers.append(self._write(key, chunk))
            await asyncio.sleep(0)
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys."""
        self.forget(keys)

    async def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._closed = True
            self._chunks.clear()
            self._resident_bytes = 0

    def holds(self, key: bytes) -> bool:
        """Say at once whether a chunk is here."""
        return key in self._chunks

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these chunks: a load of them failed, so they are of no use."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def take_removals(self) -> list[Removal]:
        """Return what was evicted since the last call."""
        taken = []
        while self._removals:
            taken.append(self._removals.popleft())
        return taken

    def usage(self) -> Usage:
        """Payload bytes and chunks held."""
        return Usage(self._resident_bytes, self._capacity, len(self._chunks))

    def counters(self) -> Mapping[str, int]:
        """Count by reason: ``read_missing``, ``read_length``, ``evicted``, ``refused_size``."""
        return dict(self._counts)

    def _read(self, key: bytes, target: memoryview) -> bool:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or len(chunk) != target.nbytes:
                self._counts["read_missing" if chunk is None else "read_length"] += 1
                return False
            self._chunks.move_to_end(key)
        target.cast("B")[:] = chunk
        return True

    def _write(self, key: bytes, chunk: memoryview) -> bool:
        if chunk.nbytes > self._capacity:
            self._counts["refused_size"] += 1
            return False
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return True
        copy = bytes(chunk)
        with self._lock:
            if self._closed:
                return False
            self._drop(key)
            while self._resident_bytes + len(copy) > self._capacity:
                victim = next(iter(self._chunks))
                self._drop(victim)
                self._removals.append(Removal(victim, "evicted"))
                self._counts["evicted"] += 1
            self._chunks[key] = copy
            self._resident_bytes += len(copy)
        return True

    def _drop(self, key: bytes) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._resident_bytes -= len(chunk)
