"""A backend from three blocking functions: batches, threads, verification, cancellation are ours.

Subclass :class:`ThreadedBackend`, and define ``get``, ``put`` and ``has`` of one chunk. They only
move bytes::

    class FolderBackend(ThreadedBackend):
        Options = FolderOptions

        def __init__(self, options, namespace):
            super().__init__(namespace)
            self._folder = Path(options.root, namespace)
            self._folder.mkdir(parents=True, exist_ok=True)

        def get(self, key, header, into):
            with open(self._folder / key.hex(), "rb") as file:
                file.readinto(header)
                file.readinto(into)
            return True

``docs/guides/write-a-backend.md`` has the whole class. A store with a format of its own subclasses
:class:`ThreadPoolBackend` and verifies by itself. :class:`InlineBackend` runs on the event loop.

A subclass may use any private name: those of these classes are mangled.
"""

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvoffload.backends.base import ReadResult, Written, check_lengths
from kvoffload.backends.blocking_pool import BlockingPool, begin_once, start_once
from kvoffload.backends.counted import CountedBackend, Kind
from kvoffload.backends.frames import Frames
from kvoffload.backends.seals import Seal

log = logging.getLogger(__name__)

_STALLED = "%s: every thread has hung in a %s for %g s; chunks are misses until one returns"
_FUNCTIONS = ("get", "put", "load", "store", "has", "delete", "release")
T = TypeVar("T")


class ChunkwiseBackend(CountedBackend, ABC):
    """Answers the batches of a backend by functions of one chunk.

    The functions may raise: the chunk is then a miss, counted as ``read_failed`` or
    ``write_failed``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A plug-in's own method may have the name of a function that its base class has not.
        for name in filter(partial(hasattr, super(cls, cls)), _FUNCTIONS):
            if inspect.iscoroutinefunction(getattr(cls, name)):
                what = f"{cls.__name__}.{name} is a coroutine, which nothing here would run"
                raise TypeError(f"{what}: use AsyncBackend of kvoffload.backends.asynchronous")

    # ---- what a subclass defines -----------------------------------------------------------

    @abstractmethod
    def load(self, key: bytes, into: memoryview) -> bool | ReadResult:
        """Fill ``into`` with the chunk, verified; or answer False or a :class:`ReadResult`."""

    @abstractmethod
    def store(self, key: bytes, chunk: memoryview) -> Written:
        """Store the chunk whole, or answer False; keep no reference to ``chunk``."""

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Return whether a load would probably find the chunk."""

    def delete(self, key: bytes) -> None:
        """Remove the chunk if it is there. By default, chunks stay."""

    def release(self) -> None:
        """Release connections and files. Called once, after the last of the other calls."""

    async def closing(self) -> None:
        """Called once, on the event loop, when every later call is already answered False."""

    # ---- Backend ---------------------------------------------------------------------------

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return await self.run_each("read", len(keys), lambda i: self.has(keys[i]), False)

    async def read(
        self, keys: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[bool | ReadResult]:
        check_lengths(keys, into)
        return await self.run_each(
            "read",
            len(keys),
            lambda i: self.load(keys[i], into[i].cast("B")),
            ReadResult.UNAVAILABLE,
        )

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[Written]:
        return await self.store_each(keys, chunks)

    async def remove(self, keys: Sequence[bytes]) -> None:
        def discard(i: int) -> bool:
            self.delete(keys[i])
            return True

        await self.run_each("write", len(keys), discard, False)

    async def close(self) -> None:
        if self.begin_close():
            try:
                await self.closing()
            finally:  # also after a cancellation: no later call would end them
                await self.end_runs()

    # ---- for subclasses --------------------------------------------------------------------

    def disown(self) -> None:
        """Answer False from now on and release nothing: a forked child has none of the threads."""
        self.begin_close()

    async def store_each(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        """Store chunks; with ``tenants``, one a key, ``store`` gets its chunk's as well."""
        check_lengths(keys, chunks)

        def store(i: int) -> Written:
            whose = (tenants[i],) if tenants else ()
            return self.store(keys[i], chunks[i].cast("B"), *whose)

        return await self.run_each("write", len(keys), store, False)

    async def run_each(
        self, kind: Kind, items: int, work: Callable[[int], T], failed: T
    ) -> list[T]:
        """Return ``work(i)`` for each item; one that raises, or is not begun, is ``failed``."""
        answers = [failed] * items
        await self.__fill(kind, answers, work, is_quick=False)
        return answers

    async def run_all(
        self,
        kind: Kind,
        runs: Sequence[range],
        work: Callable[[range], list[T]],
        failed: T,
        *,
        is_quick: bool = False,
    ) -> list[T]:
        """Return the answers of all items, run by run; see :meth:`run_each`.

        Args:
            kind: of the work.
            runs: the items in parts that follow one another.
            work: returns the answers of a run.
            failed: the answer of each item of a run that raises, or is not begun.
            is_quick: runs take some 10 µs and rarely wait; see :meth:`BlockingPool.fill`.
        """
        answers = [[failed] * len(run) for run in runs]
        await self.__fill(kind, answers, lambda i: work(runs[i]), is_quick=is_quick)
        return [answer for of_run in answers for answer in of_run]

    async def __fill(
        self, kind: Kind, answers: list[T], work: Callable[[int], T], *, is_quick: bool
    ) -> None:
        """Set ``answers[i] = work(i)``, but for each one that raises, or is not begun."""

        def attempt(i: int) -> T:
            if not self.is_closed:
                try:
                    return work(i)
                except Exception as error:
                    self.note_failure(kind, error)
            return answers[i]

        await self.fill_answers(kind, answers, attempt, is_quick)

    # ---- where the functions run: by default, on the event loop -----------------------------

    async def fill_answers(
        self, kind: Kind, answers: list[Any], work: Callable[[int], Any], is_quick: bool
    ) -> None:
        """Set ``answers[i] = work(i)`` for each that is begun; ``work`` does not raise."""
        for i in range(len(answers)):
            answers[i] = work(i)
            await asyncio.sleep(0)

    async def end_runs(self) -> None:
        """Begin no more runs; call :meth:`release` once none is in work."""
        self.release()


class InlineBackend(ChunkwiseBackend):
    """Runs functions of one chunk on the event loop, and answers the batches of a backend.

    Suits functions that take less than 0.1 ms; the loop gets its turn after each chunk. The
    functions may raise: the chunk is then a miss, counted as ``read_failed`` or ``write_failed``.

    Args:
        name: of the store, for the log; by default that of the class.
    """


class ThreadPoolBackend(ChunkwiseBackend):
    """Runs blocking functions of one chunk on threads; a subclass verifies what it loads.

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
        name = name or type(self).__name__
        prefix = f"kvoffload-{type(self).__name__}"
        loads = BlockingPool(f"{prefix}-load", threads, stall_s)
        pools: dict[Kind, BlockingPool] = {"read": loads, "write": loads}
        if store_threads:
            try:
                pools["write"] = BlockingPool(f"{prefix}-store", store_threads, stall_s)
            except BaseException:
                loads.close()
                raise
        super().__init__(name)
        self.__name, self.__pools = name, pools

    def expect_wait(self) -> None:
        """Let all threads serve the quick loads of the calling thread, which is about to wait."""
        self.__pools["read"].expect_wait()

    def at_once(self) -> int | None:
        """Return how many threads may work on one call; by default, None: all of them."""
        return None

    def interrupt(self, thread: int) -> None:
        """End the function that the thread with this identifier is in, soon; its caller is gone.

        Called on the event loop after a cancellation. By default the function runs to its end, for
        which the cancelled call waits.
        """

    opens_apart = True
    """Whether the constructor may block: an I/O server then calls it on a thread of its own."""

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

        def load(i: int) -> bool | ReadResult:
            found = self.load(keys[i], into[i].cast("B"))
            if found:
                arrived(i)
            return found

        return await self.run_each("read", len(keys), load, ReadResult.UNAVAILABLE)

    async def fill_answers(
        self, kind: Kind, answers: list[Any], work: Callable[[int], Any], is_quick: bool
    ) -> None:
        def gave_up(items: int, is_first: bool) -> None:
            """Count the last ones, refused because every thread hangs; log the first of a stall."""
            chunks = (len(each) if isinstance(each, list) else 1 for each in answers[-items:])
            self.count(f"{kind}_stalled", sum(chunks))
            if is_first:
                log.warning(_STALLED, self.__name, kind, pool.stall_s)

        pool, at_once = self.__pools[kind], self.at_once()
        await pool.fill(answers, work, gave_up, self.interrupt, at_once, is_quick=is_quick)

    async def end_runs(self) -> None:
        # Of a call that is cancelled, the thread goes on.
        await asyncio.shield(asyncio.wrap_future(begin_once(self.__end)))

    def __end(self) -> None:
        """Close the pools, and release what they use once all their threads have ended."""
        ended = [pool.close() for pool in set(self.__pools.values())]
        if all(ended):
            self.release()
        else:  # a thread still uses what release() would take away
            log.warning("%s: a thread hangs; the store is closed when it returns", self.__name)
            start_once(self.__release_late)

    def __release_late(self) -> None:
        for pool in set(self.__pools.values()):
            pool.wait()
        self.release()


class ThreadedBackend(ThreadPoolBackend):
    """A whole backend of ``get``, ``put`` and ``has``, which only move the bytes of one chunk.

    Each chunk is stored with a header in front (``docs/reference/format.md``). Every load checks
    key, namespace, length and checksum in the caller's memory: wrong bytes of any kind are a miss.
    Misses are counted: ``read_missing``, ``read_length``, ``corrupt_payload`` and the like.

    Functions of several chunks run at once. A function that raises is a miss, counted as
    ``read_failed`` or ``write_failed``. A cancelled call returns after the functions in flight have
    ended. Once all threads hang for ``stall_s``, every chunk is a miss at once.

    Args:
        namespace: whose chunks these are; a chunk of another one is a miss.
        threads: chunks loaded at once.
        store_threads: chunks stored or deleted at once. 0: the threads above do this as well, so
            with ``threads=1`` no two functions run at the same time.
        stall_s: seconds after which a thread counts as hung.
        name: of the store, for the log; by default that of the class.
    """

    def __init__(
        self,
        namespace: str,
        *,
        threads: int = 4,
        store_threads: int = 2,
        stall_s: float = 5.0,
        name: str = "",
    ) -> None:
        super().__init__(threads=threads, store_threads=store_threads, stall_s=stall_s, name=name)
        self.__frames = Frames(namespace, self.count)

    def encrypt_with(self, seal: Seal) -> None:
        """Store chunks encrypted; called by :func:`kvoffload.open_backend`, before the first."""
        self.__frames.seal = seal

    @abstractmethod
    def get(self, key: bytes, header: memoryview, into: memoryview) -> bool | ReadResult:
        """Fill ``header``, then ``into``, with what is stored under the key, as far as it goes.

        Both are contiguous, writable bytes. Answer True if anything is stored: the caller verifies
        it. Answer False if nothing is, or a :class:`ReadResult` that says why.
        """

    @abstractmethod
    def put(self, key: bytes, header: bytes, chunk: memoryview) -> Written:
        """Store ``header`` and then ``chunk``, in place of what is there, whole or not at all.

        Answer False if that is impossible; keep no reference to ``chunk``.
        """

    def load(self, key: bytes, into: memoryview) -> ReadResult:
        header = self.__frames.blank()
        return self.__frames.verdict(self.get(key, header, into), key, header, into)

    async def write(
        self, keys: Sequence[bytes], chunks: Sequence[memoryview], tenants: Sequence[bytes] = ()
    ) -> list[Written]:
        """See :meth:`Backend.write`; headers tell of ``tenants``, one a key, or none."""
        return await self.store_each(keys, chunks, tenants)

    def store(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> Written:
        header, stored = self.__frames.pack(key, chunk, tenant)
        try:
            return self.put(key, header, stored)
        finally:
            self.__frames.done(stored)
