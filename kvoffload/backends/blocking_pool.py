"""Threads for blocking calls, which may hang, and never use a caller's memory after the answer.

All threads are daemons, because a system call on a dead device may never return. At exit the
interpreter would wait for the threads of ``concurrent.futures``.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
QUICK_S = 0.02
"""How long one thread has the quick batches to itself."""
ITEMS_PER_TURN = 256
"""Items of one batch that all threads together do before those of batches that wait."""


class BlockingPool:
    """Threads for one kind of work on chunks, loads or stores.

    The thread of a hung system call owns the caller's memory until the call returns. So a batch
    waits for the items it has begun, whatever happens. Once every thread has been inside one item
    for ``stall_s``, the pool gives up items not begun at once. Batches are served in order, and one
    of thousands of items in turns with those behind it.
    """

    def __init__(self, name: str, threads: int, stall_s: float) -> None:
        """Start the threads, all or none.

        Args:
            name: of the threads.
            threads: how many.
            stall_s: how long a stuck item may take.

        Raises:
            RuntimeError: the system has no more threads to give.
        """
        self.threads = threads
        self.stall_s = stall_s
        self._reported_stall: float | None = None
        """Begin of the last stall that was reported."""
        self._queue: SimpleQueue[tuple[_Batch, bool] | None] = SimpleQueue()
        """Batches, each with whether its thread goes on with the quick ones that wait."""
        self._quick: deque[_Batch] = deque()
        """Batches that wait for the thread of quick batches."""
        self._has_quick_thread = False
        self._choosing = threading.Lock()
        """Guards the two above."""
        self._local = threading.local()
        self._per_turn = max(1, ITEMS_PER_TURN // threads)
        self._begun: list[float | None] = [None] * threads
        """When each thread began its current item."""
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
        """Return whether every thread is stuck in an item."""
        return self._stuck() == self.threads

    async def fill(
        self,
        answers: list[T],
        work: Callable[[int], Any],
        on_stall: Callable[[int, bool], None],
        interrupt: Callable[[int], None] = lambda thread: None,
        at_once: int | None = None,
        *,
        is_quick: bool = False,
    ) -> None:
        """Do ``work(i)`` for every index of ``answers`` on the threads, and set ``answers[i]``.

        Each thread takes the next item until none is left, and the last one reports. So a batch
        crosses to the threads and back once, not once an item. Answers of items not begun stay as
        they are. After a cancellation, or if a callback raises, no further item begins. The call
        returns only when those begun have ended. ``work`` must not raise.

        ``on_stall`` is called on the loop when every thread is stuck. Its arguments are the number
        of items of this batch that are not begun, and True for the first call of this stall.
        After a cancellation or an error ``interrupt`` is called for each thread inside an item of
        this batch, with the thread's identifier. The thread begins nothing else meanwhile. At most
        ``at_once`` threads take part.

        ``is_quick``: an item takes some 10 µs and rarely waits. Threads that share such items wait
        for the GIL most of the time. So one thread serves all quick batches, one after the other.
        All threads join after :data:`QUICK_S`, or when an item calls :meth:`expect_wait`.
        """
        if self.stalled():
            self._gave_up(len(answers), on_stall)
            return
        batch = _Batch(answers, work, min(at_once or self.threads, self.threads))
        if not answers:
            return
        is_quick = is_quick and len(answers) > 1 and self.threads > 1
        if is_quick:
            self._begin_quick(batch)
        else:
            self._widen(batch)
        try:
            if is_quick:
                await asyncio.wait([batch.ended], timeout=min(QUICK_S, self.stall_s))
                with self._choosing:
                    if batch in self._quick:  # its thread is in a long item: another one may serve
                        self._has_quick_thread = False
                self._widen(batch)
            while not batch.ended.done():
                # wait() leaves the future alone when it is cancelled; wait_for() would cancel it.
                await asyncio.wait([batch.ended], timeout=self.stall_s)
                if not batch.ended.done() and self.stalled():
                    self._gave_up(batch.give_up(), on_stall)
        except BaseException:  # also of a callback
            try:
                batch.give_up(interrupt)
            finally:
                await undisturbed(batch.ended)
            raise
        finally:
            with self._choosing, contextlib.suppress(ValueError):
                self._quick.remove(batch)
        batch.ended.result()

    def _begin_quick(self, batch: "_Batch") -> None:
        """Give a batch to the thread of quick batches, or to a thread that becomes that one."""
        with self._choosing:
            if self._has_quick_thread:
                self._quick.append(batch)
                return
            self._has_quick_thread = True
            batch.num_threads = 1
        self._put(batch, is_first=True)

    def _next_quick(self) -> "_Batch | None":
        """Return the next batch for the thread of quick batches; None: it is an ordinary thread."""
        with self._choosing:
            if not self._quick:
                self._has_quick_thread = False
                return None
            batch = self._quick.popleft()
            batch.num_threads += 1
            return batch

    def expect_wait(self) -> None:
        """Let all threads serve the batch that the calling thread of the pool is in."""
        if (batch := getattr(self._local, "batch", None)) is not None:
            self._widen(batch)

    def _widen(self, batch: "_Batch") -> None:
        """Let as many threads take items of a batch as may."""
        for _ in range(batch.take_missing_threads()):
            self._put(batch)

    def _put(self, batch: "_Batch", *, is_first: bool = False) -> None:
        with self._closing:
            if self._closed:
                batch.give_up()
            else:
                self._queue.put((batch, is_first))

    def _gave_up(self, items: int, on_stall: Callable[[int, bool], None]) -> None:
        # The time at which the last thread got stuck identifies a stall.
        begun = [begun for begun in self._begun if begun is not None]
        since = max(begun, default=self._reported_stall)
        if items:
            on_stall(items, since != self._reported_stall)
            self._reported_stall = since

    def close(self) -> bool:
        """Wait for running items, unless they are stuck; return whether all threads ended."""
        with self._closing:  # no thread would take a later batch
            self._closed = True
        with contextlib.suppress(Empty):
            while (taken := self._queue.get_nowait()) is not None:
                taken[0].give_up()
        for _ in self._threads:
            self._queue.put(None)
        while any(thread.is_alive() for thread in self._threads) and not self._stuck():
            for thread in self._threads:
                thread.join(min(0.05, self.stall_s))
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """After :meth:`close`: wait for the threads, stuck ones included."""
        for thread in self._threads:
            thread.join()

    def _serve(self, me: int) -> None:
        while (taken := self._queue.get()) is not None:
            batch: _Batch | None = taken[0]
            is_quick_thread = taken[1]
            del taken  # otherwise its memory stays referenced until the next batch comes
            while batch is not None:
                self._local.batch, num_done = batch, 0
                while (i := batch.take()) is not None:
                    self._begun[me] = time.monotonic()
                    try:
                        batch.answers[i] = batch.work(i)
                    except BaseException as error:
                        batch.error = error
                    finally:
                        self._begun[me] = None
                        batch.put_back()
                    num_done += 1
                    is_over = num_done % self._per_turn == 0 and not is_quick_thread
                    if is_over and not self._queue.empty():
                        self._put(batch)  # behind those that wait: a thread is still owed to it
                        break
                self._local.batch = batch = None
                if is_quick_thread:
                    batch = self._next_quick()

    def _stuck(self) -> int:
        now = time.monotonic()
        return sum(begun is not None and now - begun > self.stall_s for begun in self._begun)


class _Batch:
    """One call of :meth:`BlockingPool.fill`, whose items ``most`` threads may do."""

    def __init__(self, answers: list[Any], work: Callable[[int], Any], most: int) -> None:
        self.work = work
        self.answers = answers
        self.num_threads = 0
        """Threads that serve it, or will."""
        self._most = min(most, len(answers))
        self.error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()
        self._next = 0
        self._busy: set[int] = set()
        """The threads inside an item."""
        self._reported = False

    def take(self) -> int | None:
        """Return the next item to do, or None; call :meth:`put_back` once it is done."""
        with self._lock:
            if self._next >= len(self.answers):
                return None
            self._next += 1
            self._busy.add(threading.get_ident())
            return self._next - 1

    def take_missing_threads(self) -> int:
        """Return how many more threads may serve the batch, which count as its own from now on."""
        with self._lock:
            missing = self._most - self.num_threads if self._next < len(self.answers) else 0
            self.num_threads += missing
            return missing

    def put_back(self) -> None:
        with self._lock:
            self._busy.discard(threading.get_ident())
            self._report_end()

    def give_up(self, interrupt: Callable[[int], None] = lambda thread: None) -> int:
        """Begin no more items, and interrupt those begun; return how many were left."""
        with self._lock:
            left, self._next = len(self.answers) - self._next, len(self.answers)
            for thread in self._busy:
                interrupt(thread)
            self._report_end()
        return left

    def _report_end(self) -> None:
        """Wake the loop, once, when no item is left and none is running."""
        if self._busy or self._reported or self._next < len(self.answers):
            return
        self._reported = True
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self.error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self.error)


async def run_once(work: Callable[..., T], *args: Any) -> T:
    """Do one blocking call on a daemon thread of its own, for rare work off the hot path."""
    return await asyncio.wrap_future(begin_once(work, *args))


def begin_once(work: Callable[..., T], *args: Any) -> Future[T]:
    """Begin one blocking call on a daemon thread of its own, and return its future."""
    future: Future[T] = Future()
    start_once(partial(perform, future, work, *args))
    return future


def perform(future: Future[T], work: Callable[..., T], *args: Any) -> None:
    """Do the call of a future, on a thread, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)


def start_once(work: Callable[[], None]) -> None:
    """Begin one call on a daemon thread of its own; nothing waits for it."""
    threading.Thread(target=work, name="kvoffload-once", daemon=True).start()


async def undisturbed(future: "asyncio.Future[Any]") -> None:
    """Wait for a future through every cancellation of the caller."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
