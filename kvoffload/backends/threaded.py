"""A backend from three blocking functions: batches, threads and cancellation are ours.

Subclass :class:`ThreadedBackend`, and define ``get``, ``put`` and ``has`` of one chunk::

    class FolderBackend(ThreadedBackend):
        Options = FolderOptions

        def __init__(self, options, namespace):
            super().__init__()
            self._folder = Path(options.root, namespace)
            self._folder.mkdir(parents=True, exist_ok=True)

        def get(self, key, into):
            data = (self._folder / key.hex()).read_bytes()
            ...

``docs/guides/write-a-backend.md`` has the whole class.
"""

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

from kvoffload.backends.base import Observable, ReadResult, Usage, check_lengths
from kvoffload.backends.blocking_pool import BlockingPool, run_once, start_once
from kvoffload.backends.log_rate import Throttle

log = logging.getLogger(__name__)

Kind = Literal["read", "write"]
T = TypeVar("T")


class InlineBackend(Observable, ABC):
    """Runs functions of one chunk on the event loop, and answers the batches of a backend.

    Suits functions that take less than 0.1 ms; the loop gets its turn after each chunk. The
    functions may raise: the chunk is then a miss, counted as ``read_failed`` or ``write_failed``.

    Args:
        name: of the store, for the log; by default that of the class.
    """

    def __init__(self, *, name: str = "") -> None:
        self._name = name or type(self).__name__
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._failures = Throttle(log)

    # ---- what a subclass defines -----------------------------------------------------------

    @abstractmethod
    def get(self, key: bytes, into: memoryview) -> bool | ReadResult:
        """Fill ``into`` with the chunk, verified; or answer False or a :class:`ReadResult`."""

    @abstractmethod
    def put(self, key: bytes, chunk: memoryview) -> bool:
        """Store the chunk whole, or answer False; keep no reference to ``chunk``."""

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Return whether :meth:`get` would probably find the chunk."""

    def delete(self, key: bytes) -> None:
        """Remove the chunk if it is there. By default, chunks stay."""

    def release(self) -> None:
        """Release connections and files. Called once, after the last of the other calls."""

    # ---- Backend ---------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._each("read", len(keys), lambda i: self.has(keys[i]), False)

    async def read(
        self, keys: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[bool | ReadResult]:
        return await self._read(keys, into, lambda i: None)

    async def _read(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool | ReadResult]:
        check_lengths(keys, into)

        def load(i: int) -> bool | ReadResult:
            found = self.get(keys[i], into[i].cast("B"))
            if found:
                arrived(i)
            return found

        return await self._each("read", len(keys), load, ReadResult.UNAVAILABLE)

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        check_lengths(keys, chunks)
        return await self._each(
            "write", len(keys), lambda i: self.put(keys[i], chunks[i].cast("B")), False
        )

    async def remove(self, keys: Sequence[bytes]) -> None:
        def discard(i: int) -> bool:
            self.delete(keys[i])
            return True

        await self._each("write", len(keys), discard, False)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._shut_down()

    # ---- Observable ------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return what is stored; zeros by default, as a store need not know."""
        return Usage(0, None, 0)

    def count(self, reason: str, number: int = 1) -> None:
        """Add to a counter; thread-safe."""
        with self._counting:
            self._counts[reason] += number

    def counters(self) -> Mapping[str, int]:
        """Return the counts by reason, those of this class included."""
        with self._counting:
            return dict(self._counts)

    # ---- how the functions run -------------------------------------------------------------

    async def _each(self, kind: Kind, items: int, work: Callable[[int], T], failed: T) -> list[T]:
        """Do ``work(i)`` for each item; an item that raises, or is not begun, is ``failed``."""

        def attempt(i: int) -> T:
            if self._closed:
                return failed
            try:
                return work(i)
            except Exception as error:
                self.count(f"{kind}_failed")
                text = "%s: a %s failed: %r"
                self._failures.warning(text, self._name, kind, error, traceback=True)
                return failed

        answers = [failed] * items
        await self._fill(kind, answers, attempt)
        return answers

    async def _fill(self, kind: Kind, answers: list[T], work: Callable[[int], T]) -> None:
        for i in range(len(answers)):
            answers[i] = work(i)
            await asyncio.sleep(0)

    async def _shut_down(self) -> None:
        self.release()


class ThreadedBackend(InlineBackend):
    """Runs blocking functions of one chunk on threads, several at once.

    A cancelled call returns after the items in flight have ended, so the caller may reuse its
    memory. Other threads serve the items of a batch that a hung thread has not begun. Once all
    threads hang for ``stall_s``, every chunk is a miss at once, counted as ``read_stalled`` or
    ``write_stalled``.

    Args:
        threads: chunks loaded at once.
        store_threads: chunks stored or deleted at once. 0: the threads above do this as well, so
            with ``threads=1`` no two functions run at the same time.
        stall_s: seconds after which a thread counts as hung.
        name: of the store, for the log; by default that of the class.
    """

    def __init__(
        self, *, threads: int = 4, store_threads: int = 2, stall_s: float = 5.0, name: str = ""
    ) -> None:
        super().__init__(name=name)
        self._stall_s = stall_s
        self._pools: dict[Kind, BlockingPool] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_pools)
            loads = self._pools["read"] = self._pool("load", threads)
            self._pools["write"] = self._pool("store", store_threads) if store_threads else loads
            undo.pop_all()

    opens_apart = True
    """Whether the constructor may block: an I/O server then calls it on a thread of its own."""

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool | ReadResult]:
        return await self._read(keys, into, arrived)

    async def _fill(self, kind: Kind, answers: list[T], work: Callable[[int], T]) -> None:
        await self._pools[kind].fill(answers, work, partial(self._gave_up, kind))

    async def _shut_down(self) -> None:
        if await run_once(self._close_pools):
            await run_once(self.release)
        else:  # a thread still uses what release() would take away
            log.warning("%s: a thread hangs; the store is closed when it returns", self._name)
            start_once(self._release_late)

    def _release_late(self) -> None:
        for pool in set(self._pools.values()):
            pool.wait()
        self.release()

    def _close_pools(self) -> bool:
        """Close the pools; return whether all threads ended."""
        ended = [pool.close() for pool in set(self._pools.values())]
        return all(ended)

    def _pool(self, use: str, threads: int) -> BlockingPool:
        name = f"kvoffload-{type(self).__name__}-{use}"
        return BlockingPool(name, threads, self._stall_s)

    def _gave_up(self, kind: Kind, items: int, first: bool) -> None:
        """Count the items refused because every thread hangs; log the first of a stall."""
        self.count(f"{kind}_stalled", items)
        if first:
            text = "%s: every thread has hung in a %s for %g s; chunks are misses until one returns"
            log.warning(text, self._name, kind, self._stall_s)
