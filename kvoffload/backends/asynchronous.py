"""A backend from three coroutines of one chunk: for stores with an asynchronous client.

Subclass :class:`AsyncBackend`, and define ``get``, ``put`` and ``has``. They only move bytes.
``examples/backend_plugin`` is a whole one.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvoffload.backends.base import ReadResult, Written, check_lengths
from kvoffload.backends.blocking_pool import run_once, undisturbed
from kvoffload.backends.counted import CountedBackend, Kind
from kvoffload.backends.frames import Frames
from kvoffload.backends.seals import Seal

log = logging.getLogger(__name__)

INLINE_BYTES = 4 << 20
"""Largest chunk whose checksum or cipher the event loop's thread computes: below a millisecond."""
CLOSING = "kvoffload closes a store"
"""Name of tasks that an event loop should end after."""
T = TypeVar("T")


class AsyncChunkBackend(CountedBackend, ABC):
    """Answers the batches of a backend by coroutines of one chunk; a subclass verifies.

    Coroutines of several chunks run at once. One that raises is a miss, counted as ``read_failed``
    or ``write_failed``. No coroutine is cancelled, because a client's thread may still use the
    memory: a cancelled call returns after the coroutines in flight have ended. So a client needs a
    timeout of its own.

    Args:
        at_once: chunks in flight, over all calls.
        close_s: how long :meth:`close` waits for chunks in flight.
        name: of the store, for the log; by default that of the class.
    """

    def __init__(self, *, at_once: int = 16, close_s: float = 5.0, name: str = "") -> None:
        super().__init__(name)
        self.__at_once = at_once
        self.__turns = asyncio.Semaphore(at_once)
        self.__close_s = close_s
        self.__running: set[asyncio.Task[None]] = set()
        self.__releasing: asyncio.Task[None] | None = None
        """Kept, because the loop has only weak references to tasks."""

    # ---- what a subclass defines -----------------------------------------------------------

    @abstractmethod
    async def load(self, key: bytes, into: memoryview) -> bool | ReadResult:
        """Fill ``into`` with the chunk, verified; or answer False or a :class:`ReadResult`."""

    @abstractmethod
    async def store(self, key: bytes, chunk: memoryview, tenant: bytes) -> Written:
        """Store the chunk whole, or answer False; keep no reference to ``chunk``.

        ``tenant`` stands for whose chunk it is; empty: that is not told.
        """

    @abstractmethod
    async def has(self, key: bytes) -> bool:
        """Return whether a load would probably find the chunk."""

    async def delete(self, key: bytes) -> None:
        """Remove the chunk if it is there. By default, chunks stay."""

    async def release(self) -> None:
        """Release connections and files. Called once, after the last of the other calls."""

    # ---- Backend ---------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return await self.__each("read", len(keys), lambda i: self.has(keys[i]), False)

    async def read(
        self, keys: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[bool | ReadResult]:
        return await self.read_each(keys, into, lambda i: None)

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool | ReadResult]:
        check_lengths(keys, into)

        async def load(i: int) -> bool | ReadResult:
            result = await self.load(keys[i], into[i].cast("B"))
            if result:
                arrived(i)
            return result

        return await self.__each("read", len(keys), load, ReadResult.UNAVAILABLE)

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        """See :meth:`Backend.write`; headers tell of ``tenants``, one a key, or none."""
        check_lengths(keys, chunks)

        async def store(i: int) -> Written:
            return await self.store(keys[i], chunks[i].cast("B"), tenants[i] if tenants else b"")

        return await self.__each("write", len(keys), store, False)

    async def remove(self, keys: Sequence[bytes]) -> None:
        await self.__each("write", len(keys), lambda i: self.delete(keys[i]), None)

    async def close(self) -> None:
        if self.begin_close():
            # Of a call that is cancelled, the task goes on: no later call would release anything.
            self.__releasing = asyncio.create_task(self.__end(), name=CLOSING)
            await asyncio.shield(self.__releasing)

    async def __end(self) -> None:
        hung = self.__running
        if hung:
            _, hung = await asyncio.wait(hung, timeout=self.__close_s)
        if hung:  # a chunk in flight still uses what release() would take away
            log.warning("%r: a call hangs; the store is closed when it returns", self)
            self.__releasing = asyncio.create_task(self.__release_late(hung), name=CLOSING)
        else:
            await self.release()

    async def __release_late(self, hung: set[asyncio.Task[None]]) -> None:
        await asyncio.wait(hung)
        try:
            await self.release()
        except Exception as error:
            log.warning("%r: closing failed: %r", self, error)

    # ---- how the coroutines run ------------------------------------------------------------

    async def __each(
        self, kind: Kind, items: int, work: Callable[[int], Awaitable[T]], failed: T
    ) -> list[T]:
        """Await ``work(i)`` for each item; one that raises, or is not begun, is ``failed``."""
        answers, left, busy = [failed] * items, deque(range(items)), set[object]()

        async def serve() -> None:
            me = asyncio.current_task()
            while left:
                async with self.__turns:
                    if self.is_closed or not left:
                        return
                    i = left.popleft()
                    busy.add(me)
                    try:
                        answers[i] = await work(i)
                    except Exception as error:
                        self.note_failure(kind, error)
                    finally:
                        busy.discard(me)

        tasks = [asyncio.ensure_future(serve()) for _ in range(min(items, self.__at_once))]
        self.__running.update(tasks)
        ended = asyncio.gather(*tasks, return_exceptions=True)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            left.clear()
            for task in tasks:
                if task not in busy:
                    task.cancel()
            await undisturbed(ended)
            raise
        finally:
            self.__running.difference_update(tasks)
        return answers


class AsyncBackend(AsyncChunkBackend):
    """A whole backend of the coroutines ``get``, ``put`` and ``has``, which only move bytes.

    Each chunk is stored with a header in front (``docs/reference/format.md``). Every load checks
    key, namespace, length and checksum in the caller's memory: wrong bytes of any kind are a miss.
    Misses are counted: ``read_missing``, ``read_length``, ``corrupt_payload`` and the like.

    Coroutines of several chunks run at once. One that raises is a miss, counted as ``read_failed``
    or ``write_failed``. No coroutine is cancelled, because a client's thread may still use the
    memory: a cancelled call returns after the coroutines in flight have ended. So a client needs a
    timeout of its own.

    Args:
        namespace: whose chunks these are; a chunk of another one is a miss.
        at_once: chunks in flight, over all calls.
        close_s: how long :meth:`close` waits for chunks in flight.
        name: of the store, for the log; by default that of the class.
    """

    def __init__(
        self, namespace: str, *, at_once: int = 16, close_s: float = 5.0, name: str = ""
    ) -> None:
        super().__init__(at_once=at_once, close_s=close_s, name=name)
        self.__frames = Frames(namespace, self.count)

    def encrypt_with(self, seal: Seal) -> None:
        """Store chunks encrypted; called by :func:`kvoffload.open_backend`, before the first."""
        self.__frames.seal = seal

    @abstractmethod
    async def get(self, key: bytes, header: memoryview, into: memoryview) -> bool | ReadResult:
        """Fill ``header``, then ``into``, with what is stored under the key, as far as it goes.

        Both are contiguous, writable bytes. Answer True if anything is stored: the caller verifies
        it. Answer False if nothing is, or a :class:`ReadResult` that says why.
        """

    @abstractmethod
    async def put(self, key: bytes, header: bytes, chunk: memoryview) -> Written:
        """Store ``header`` and then ``chunk``, in place of what is there, whole or not at all.

        Answer False if that is impossible; keep no reference to ``chunk``.
        """

    async def load(self, key: bytes, into: memoryview) -> ReadResult:
        header = self.__frames.blank()
        found = await self.get(key, header, into)
        return await _computed(into, self.__frames.verdict, found, key, header, into)

    async def store(self, key: bytes, chunk: memoryview, tenant: bytes) -> Written:
        header, stored = await _computed(chunk, self.__frames.pack, key, chunk, tenant)
        try:
            return await self.put(key, header, stored)
        finally:
            self.__frames.done(stored)


async def _computed(chunk: memoryview, work: Callable[..., T], *args: object) -> T:
    return work(*args) if chunk.nbytes <= INLINE_BYTES else await run_once(work, *args)
