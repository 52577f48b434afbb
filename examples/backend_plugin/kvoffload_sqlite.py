"""Chunks in an SQLite database: a complete third-party backend in one file.

Not fast, but whole: it keeps the contract of :class:`kvoffload.backends.base.Backend` and two of
the optional ones beside it, which the test class in ``tests`` checks.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import xxhash

from kvoffload.backends.admin import Holding
from kvoffload.backends.base import Removal, Usage
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError

SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, namespace TEXT, key BLOB, used_ns INTEGER, size INTEGER, digest BLOB,
    payload BLOB
);
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON chunks (namespace, key);
CREATE INDEX IF NOT EXISTS by_use ON chunks (used_ns, size);
"""


class SqliteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings."""

    path: str
    """The database file; made if missing."""
    capacity: ByteSize = ByteSize(1 << 30)
    """Payload bytes of all namespaces; beyond it the least recently used chunks leave."""

    def __post_init__(self) -> None:
        """Refuse a store that can hold nothing."""
        if self.capacity <= 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")


class SqliteBackend:
    """One row a chunk, verified on every read."""

    Options = SqliteOptions

    def __init__(self, options: SqliteOptions, namespace: str) -> None:
        self._namespace, self._capacity_bytes = namespace, int(options.capacity)
        try:
            self._db = sqlite3.connect(options.path, check_same_thread=False, isolation_level=None)
            # After a power loss the last chunks are missing; no chunk is half there.
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
            self._db.executescript(SCHEMA)
            self._usage = self._counted()
        except sqlite3.Error as error:
            raise ConfigError("path", options.path, f"cannot be opened: {error}") from error
        self._counters: Counter[str] = Counter()
        self._removals: deque[Removal] = deque(maxlen=1 << 16)
        # One thread: SQLite wants one writer anyway, and the event loop must not wait for a disk.
        self._thread = ThreadPoolExecutor(1, "kvoffload-sqlite")
        self._closed = False

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether there is a row."""
        return await self._each(self._has, len(keys), keys)

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Copy payloads into the caller's memory."""
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} keys and {len(into)} buffers")
        return await self._each(self._read, len(keys), keys, into)

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Insert rows; a transaction each, so a chunk is there whole or not at all."""
        if len(keys) != len(chunks):
            raise ValueError(f"{len(keys)} keys and {len(chunks)} chunks")
        return await self._each(self._write, len(keys), keys, chunks)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Delete rows."""
        await self._each(self._remove, len(keys), keys)

    async def close(self) -> None:
        """Close the database after the calls in flight."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
            self._thread.shutdown(wait=False)

    # Four optional methods: statistics, the events that follow from an eviction, a survey.

    def usage(self) -> Usage:
        """Return what was stored when this process wrote last; no query, as it must not block."""
        return self._usage

    def counters(self) -> Mapping[str, int]:
        """Count by reason: ``read_missing``, ``corrupt_payload``, ``evicted``, ``refused_size``."""
        return dict(self._counters)

    def take_removals(self) -> list[Removal]:
        """Return the chunks of this namespace that this process evicted since the last call."""
        return [self._removals.popleft() for _ in range(len(self._removals))]

    async def survey(self) -> list[Holding]:
        """Say for ``kvoffload inspect`` what is stored of every namespace."""
        sums = "SELECT namespace, count(*), sum(size) FROM chunks GROUP BY namespace"

        def run() -> list[Holding]:
            try:
                rows = self._db.execute(sums).fetchall()
            except sqlite3.Error as error:
                raise OSError(f"the database cannot be read: {error}") from error
            return [Holding(name, {}, chunks, stored) for name, chunks, stored in rows]

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def _each(self, work: Callable[..., bool], count: int, *columns: Any) -> list[bool]:
        """Run ``work`` for each item on the thread; a database error is False for that item."""
        if self._closed:
            return [False] * count
        cancelled = False

        def run() -> list[bool]:
            answers = [False] * count
            for i, item in enumerate(zip(*columns, strict=True)):
                if cancelled:
                    break
                with contextlib.suppress(sqlite3.Error):
                    answers[i] = work(*item)
            return answers

        thread = asyncio.get_running_loop().run_in_executor(self._thread, run)
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            # The caller reuses its memory as soon as this returns: not before the thread is done.
            cancelled = True
            await asyncio.wait([thread])
            raise

    def _row(self, key: bytes, columns: str) -> Any:
        query = f"SELECT {columns} FROM chunks WHERE namespace = ? AND key = ?"
        return self._db.execute(query, (self._namespace, key)).fetchone()

    def _has(self, key: bytes) -> bool:
        return self._row(key, "1") is not None

    def _read(self, key: bytes, into: memoryview) -> bool:
        row = self._row(key, "id, digest, payload")
        if row is None or len(row[2]) != len(into):
            self._counters["read_missing"] += 1
            return False
        if xxhash.xxh3_128_digest(row[2]) != row[1]:
            self._counters["corrupt_payload"] += 1
            return False
        into[:] = row[2]
        self._db.execute("UPDATE chunks SET used_ns = ? WHERE id = ?", (time.time_ns(), row[0]))
        return True

    def _write(self, key: bytes, chunk: memoryview) -> bool:
        if len(chunk) > self._capacity_bytes:
            self._counters["refused_size"] += 1
            return False
        payload = bytes(chunk)
        digest = xxhash.xxh3_128_digest(payload)
        row = (self._namespace, key, time.time_ns(), len(payload), digest, payload)
        with self._transaction():
            self._db.execute("DELETE FROM chunks WHERE namespace = ? AND key = ?", row[:2])
            evicted = self._evict(self._counted().resident_bytes + len(payload))
            columns = "namespace, key, used_ns, size, digest, payload"
            self._db.execute(f"INSERT INTO chunks ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
            self._usage = self._counted()
        # Only now is it certain that they left.
        self._counters["evicted"] += len(evicted)
        self._removals.extend(
            Removal(old, "evicted") for namespace, old in evicted if namespace == self._namespace
        )
        return True

    def _evict(self, wanted_bytes: int) -> list[tuple[str, bytes]]:
        """Delete the rows used longest ago until ``wanted_bytes`` are within the capacity."""
        evicted = []
        while wanted_bytes > self._capacity_bytes:
            oldest = "SELECT id, namespace, key, size FROM chunks ORDER BY used_ns LIMIT 1"
            row, namespace, key, size = self._db.execute(oldest).fetchone()
            self._db.execute("DELETE FROM chunks WHERE id = ?", (row,))
            wanted_bytes -= size
            evicted.append((namespace, key))
        return evicted

    def _remove(self, key: bytes) -> bool:
        where = "namespace = ? AND key = ?"
        self._db.execute(f"DELETE FROM chunks WHERE {where}", (self._namespace, key))
        self._usage = self._counted()
        return True

    def _counted(self) -> Usage:
        """What is stored, by an index that holds no payload."""
        sums = "SELECT coalesce(sum(size), 0), count(*) FROM chunks INDEXED BY by_use"
        resident_bytes, chunks = self._db.execute(sums).fetchone()
        return Usage(resident_bytes, self._capacity_bytes, chunks)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that happens within, or nothing; another process waits meanwhile."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
