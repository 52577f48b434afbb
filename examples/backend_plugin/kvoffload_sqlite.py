"""Chunks in an SQLite database: a complete third-party backend in one file.

Not fast, but complete: three blocking functions make the backend, and the optional methods tell an
engine of usage and evictions. The test class in ``tests`` checks all of it.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import xxhash

from kvoffload.backends.admin import Admin, Holding, Verified
from kvoffload.backends.base import ReadResult, Removal, Usage
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.threaded import ThreadPoolBackend
from kvoffload.backends.verification import Verification, lines_of, sampled
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
        if self.capacity <= 0:
            raise ConfigError("capacity", int(self.capacity), "must be more than 0 bytes")


class SqliteBackend(ThreadPoolBackend, Admin):
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
        self._removals: deque[Removal] = deque(maxlen=1 << 16)
        # One thread for all calls, because SQLite wants one writer anyway.
        super().__init__(threads=1, store_threads=0)

    def has(self, key: bytes) -> bool:
        return self._row(key, "1") is not None

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        row = self._row(key, "id, digest, payload")
        if row is None or len(row[2]) != len(into):
            self.count("read_missing")
            return ReadResult.MISSING
        if xxhash.xxh3_128_digest(row[2]) != row[1]:
            self.count("corrupt_payload")
            return ReadResult.CORRUPT
        into[:] = row[2]
        self._db.execute("UPDATE chunks SET used_ns = ? WHERE id = ?", (time.time_ns(), row[0]))
        return ReadResult.HIT

    def store(self, key: bytes, chunk: memoryview) -> bool:
        if len(chunk) > self._capacity_bytes:
            self.count("refused_size")
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
        self.count("evicted", len(evicted))
        self._removals.extend(
            Removal(old, "evicted") for namespace, old in evicted if namespace == self._namespace
        )
        return True

    def delete(self, key: bytes) -> None:
        where = "namespace = ? AND key = ?"
        self._db.execute(f"DELETE FROM chunks WHERE {where}", (self._namespace, key))
        self._usage = self._counted()

    def release(self) -> None:
        self._db.close()

    # ---- optional: statistics, the events that follow from an eviction, operators' commands -

    def usage(self) -> Usage:
        """Return what was stored when this process wrote last; no query, as it must not block."""
        return self._usage

    def take_removals(self) -> list[Removal]:
        """Return the chunks of this namespace that this process evicted since the last call."""
        return [self._removals.popleft() for _ in range(len(self._removals))]

    async def survey(self) -> list[Holding]:
        sums = "SELECT namespace, count(*), sum(size) FROM chunks GROUP BY namespace"

        def run() -> list[Holding]:
            try:
                rows = self._db.execute(sums).fetchall()
            except sqlite3.Error as error:
                raise OSError(f"the database cannot be read: {error}") from error
            return [Holding(name, {}, chunks, stored) for name, chunks, stored in rows]

        return await run_once(run)

    async def verify(
        self,
        *,
        repair: bool,
        share: float | None,
        bytes_per_s: int | None,
        progress: Callable[[int, int], None],
    ) -> Verified:
        rows = await run_once(self._db.execute("SELECT id, size FROM chunks").fetchall)
        chosen = sampled(rows, share)
        run = Verification(len(rows), sum(size for _, size in chosen), bytes_per_s, progress)
        for row, size in chosen:
            found = await run_once(lambda row=row: self._stored(row))
            if found is not None and xxhash.xxh3_128_digest(found[1]) != found[0]:
                if repair:
                    await run_once(lambda row=row: self._drop(row))
                why = "removed" if repair else "left in place"
                run.add_damage(f"row {row}", "corrupt_payload", why, removed=repair)
            await asyncio.sleep(run.add(size, size, is_gone=found is None))
        figures = run.figures()
        return Verified(lines_of(figures), figures, not figures["damaged"])

    def _stored(self, row: int) -> Any:
        query = "SELECT digest, payload FROM chunks WHERE id = ?"
        return self._db.execute(query, (row,)).fetchone()

    def _drop(self, row: int) -> None:
        self._db.execute("DELETE FROM chunks WHERE id = ?", (row,))

    def _row(self, key: bytes, columns: str) -> Any:
        query = f"SELECT {columns} FROM chunks WHERE namespace = ? AND key = ?"
        return self._db.execute(query, (self._namespace, key)).fetchone()

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
