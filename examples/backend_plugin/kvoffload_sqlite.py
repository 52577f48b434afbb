"""Chunks in an SQLite database: a complete third-party backend in one file.

Not fast, but whole: it keeps the contract of :class:`kvoffload.backends.base.Backend`, which the
three-line test class beside it checks.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import xxhash

from kvoffload.errors import ConfigError


class SqliteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings."""

    path: str
    """The database file; made if missing."""


class SqliteBackend:
    """One row a chunk, verified on every read."""

    Options = SqliteOptions

    def __init__(self, options: SqliteOptions, namespace: str) -> None:
        self._namespace = namespace
        try:
            self._db = sqlite3.connect(options.path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS chunks (namespace TEXT, key BLOB, digest BLOB, "
                "payload BLOB, PRIMARY KEY (namespace, key)) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise ConfigError("path", options.path, f"cannot be opened: {error}") from error
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
        """Close the database after what is under way."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
            self._thread.shutdown(wait=False)

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
        row = self._row(key, "digest, payload")
        if row is None or len(row[1]) != len(into) or xxhash.xxh3_128_digest(row[1]) != row[0]:
            return False
        into[:] = row[1]
        return True

    def _write(self, key: bytes, chunk: memoryview) -> bool:
        payload = bytes(chunk)
        self._db.execute(
            "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)",
            (self._namespace, key, xxhash.xxh3_128_digest(payload), payload),
        )
        return True

    def _remove(self, key: bytes) -> bool:
        self._db.execute(
            "DELETE FROM chunks WHERE namespace = ? AND key = ?", (self._namespace, key)
        )
        return True
