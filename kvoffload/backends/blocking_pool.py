"""Blocking work beside the I/O loop, without ever leaving the caller's memory in use.

All threads here are daemons: a system call on a dead device may never return, and an interpreter
that ends must not wait for it, as it would for the threads of ``concurrent.futures``.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_names = itertools.count(1)


class BlockingPool:
    """Threads for one kind of work on chunks (loads, or stores), and how they behave when stuck.

    A system call on a dead device may never return, and its thread owns the caller's memory until
    it does. So a batch waits for the items it has begun, whatever happens; but once every thread
    has been inside one item for ``stall_s``, items not begun are given up at once.
    """

    def __init__(
        self, name: str, threads: int, stall_s: float, on_stall: Callable[[int, bool], None]
    ) -> None:
        """Start the threads, all or none.

        Args:
            name: of the threads.
            threads: how many.
            stall_s: how long a stuck item may take.
            on_stall: told on the loop how many items were given up because every thread is stuck,
                and whether that is the first word of this stall.

        Raises:
            RuntimeError: the system has no more threads to give.
        """
        self.threads = threads
        self.stall_s = stall_s
        self._on_stall = on_stall
        self._told: float | None = None
        """Since when the stall lasted of which ``on_stall`` was told last."""
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._begun: list[float | None] = [None] * threads
        """Since when each thread has been inside an item."""
        self._closing = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for i in range(threads):
                thread = threading.Thread(
                    target=self._serve, args=(i,), name=f"{name}_{i}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def stalled(self) -> bool:
        """Whether every thread is stuck in an item."""
        return self._stuck() == self.threads

    async def fill(self, answers: list[T], work: Callable[[int], T]) -> None:
        """Do ``work(i)`` for every index of ``answers`` on the threads, and set ``answers[i]``.

        Each thread takes the next item until none is left, and the last one reports: a batch
        crosses to the threads and back once, not once an item. Answers of items that were not
        begun stay as they are. When cancelled, no further item begins, and the call returns only
        after those begun have ended and answered. ``work`` must not raise.
        """
        if self.stalled():
            self._gave_up(len(answers))
            return
        batch = _Batch(answers, work)
        with self._closing:
            if self._closed or not answers:
                return
            for _ in range(min(self.threads, len(answers))):
                self._queue.put(batch)
        try:
            while not batch.ended.done():
                # wait() leaves the future alone when it is cancelled; wait_for() would cancel it.
                await asyncio.wait([batch.ended], timeout=self.stall_s)
                if not batch.ended.done() and self.stalled():
                    self._gave_up(batch.give_up())
        except asyncio.CancelledError:
            batch.give_up()
            await _undisturbed(batch.ended)
            raise
        batch.ended.result()

    def _gave_up(self, items: int) -> None:
        # The last thread to get stuck tells one stall from the next.
        since = max((begun for begun in self._begun if begun is not None), default=self._told)
        if items:
            self._on_stall(items, since != self._told)
            self._told = since

    def close(self) -> bool:
        """Wait for what is running, unless it is stuck; say whether everything has ended."""
        with self._closing:  # what comes later would find no thread
            self._closed = True
        try:
            while (batch := self._queue.get_nowait()) is not None:
                batch.give_up()
        except Empty:
            pass
        for _ in self._threads:
            self._queue.put(None)
        while any(thread.is_alive() for thread in self._threads) and not self._stuck():
            for thread in self._threads:
                thread.join(min(0.05, self.stall_s))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, me: int) -> None:
        while (batch := self._queue.get()) is not None:
            while (i := batch.take()) is not None:
                self._begun[me] = time.monotonic()
                try:
                    batch.answers[i] = batch.work(i)
                except BaseException as error:
                    batch.error = error
                finally:
                    self._begun[me] = None
                    batch.put_back()
            del batch  # or its memory stays referenced until the next one comes

    def _stuck(self) -> int:
        now = time.monotonic()
        return sum(begun is not None and now - begun > self.stall_s for begun in self._begun)


class _Batch:
    """One call of :meth:`BlockingPool.fill`."""

    def __init__(self, answers: list[Any], work: Callable[[int], Any]) -> None:
        self.work = work
        self.answers = answers
        self.error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()
        self._next = 0
        self._busy = 0
        self._reported = False

    def take(self) -> int | None:
        """The next item to do, if one is left; :meth:`put_back` once it is done."""
        with self._lock:
            if self._next >= len(self.answers):
                return None
            self._next += 1
            self._busy += 1
            return self._next - 1

    def put_back(self) -> None:
        """An item was done."""
        with self._lock:
            self._busy -= 1
            last = self._is_over()
        if last:
            self._report()

    def give_up(self) -> int:
        """Begin no more items; return how many there would have been."""
        with self._lock:
            left = len(self.answers) - self._next
            self._next = len(self.answers)
            last = self._is_over()
        if last:
            self._report()
        return left

    def _is_over(self) -> bool:
        """Whether nothing is left to do and nothing is being done; True only once."""
        if self._busy or self._reported or self._next < len(self.answers):
            return False
        self._reported = True
        return True

    def _report(self) -> None:
        # A loop closed without waiting for us refuses.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self.error)


class DaemonThreads(Executor):
    """An executor with a daemon thread for each call, for rare work off the hot path."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """See :class:`concurrent.futures.Executor`."""
        future: Future[T] = Future()

        def perform() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        name = f"kvoffload-once-{next(_names)}"
        threading.Thread(target=perform, name=name, daemon=True).start()
        return future


async def run_once(work: Callable[..., T], *args: Any) -> T:
    """Do one blocking call on a daemon thread of its own."""
    return await asyncio.get_running_loop().run_in_executor(DaemonThreads(), work, *args)


async def _undisturbed(future: "asyncio.Future[None]") -> None:
    """Wait for a future, whatever cancellation arrives meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
