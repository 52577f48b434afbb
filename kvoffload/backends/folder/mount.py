"""Calls of a mount that may hang: on threads of their own, given up by a deadline.

A mount whose server is gone answers no system call, and nothing ends one from outside. So a caller
leaves a late call to its thread, and the threads are few. A thread that moves bytes of the caller's
memory cannot be left: its call ends with it.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kvoffload.backends.blocking_pool import perform

T = TypeVar("T")

_LOOK_S = 0.05
"""Time between two looks at a late call that uses the caller's memory."""


class Late(OSError):
    """The mount did not answer in time."""


class Stalled(Late):
    """Every thread is in a call that the mount does not answer: no other one was begun."""


class Turn:
    """One call on a thread, which its caller may leave alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses_memory = False
        self.is_given_up = False
        """Whether the caller has left."""

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        """Use the caller's memory, which keeps the caller here; raise Late if it has left."""
        with self._lock:
            if self.is_given_up:
                raise Late
            self._uses_memory = True
        try:
            yield
        finally:
            with self._lock:
                self._uses_memory = False

    def give_up(self) -> bool:
        """Leave the call to its thread; return False while that uses the caller's memory."""
        with self._lock:
            self.is_given_up = not self._uses_memory
            return self.is_given_up


class Mount:
    """Makes blocking calls on at most so many threads, through aiofiles.

    Args:
        name: of the threads.
        threads: how many.
        timeout_s: how long a call may take.
    """

    def __init__(self, name: str, threads: int, timeout_s: float) -> None:
        from aiofiles.os import wrap  # an extra: the settings name it where it is missing

        self._threads = DaemonThreads(name, threads)
        self._on_thread: Callable[..., Any] = wrap(lambda work, turn: work(turn))
        self.timeout_s = timeout_s

    async def call(self, work: Callable[[Turn], T]) -> T:
        """Return ``work(turn)``, done on a thread.

        Raises:
            Late: it took too long; its thread goes on, without the caller's memory.
            Stalled: all threads are in calls that take too long.
        """
        if self.is_stalled:
            raise Stalled
        turn = Turn()
        try:
            async with asyncio.timeout(self.timeout_s):
                # Cancelled, it takes the call from the queue if no thread has begun it.
                result: T = await self._on_thread(work, turn, executor=self._threads)
                return result
        except TimeoutError:
            await _left(turn)
            raise Late from None
        except asyncio.CancelledError:
            await _left(turn)
            raise

    @property
    def is_stalled(self) -> bool:
        """Whether every thread is in a call that takes too long."""
        return self._threads.all_busy_for(self.timeout_s)

    def close(self) -> None:
        """Let the threads end after their calls; wait for none."""
        self._threads.shutdown(wait=False)


async def _left(turn: Turn) -> None:
    """Wait, through every cancellation, until the call's thread uses no memory of the caller."""
    while not turn.give_up():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(_LOOK_S)


class DaemonThreads(Executor):
    """An executor that no exit of the process waits for: one of its threads may hang for ever."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begun: list[float | None] = []
        """When each thread began the call that it is in."""
        self._is_closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("closed")
            if (number := len(self._begun)) < self._most:
                name = f"{self._name}-{number}"
                thread = threading.Thread(target=self._serve, args=[number], name=name, daemon=True)
                self._begun.append(None)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads to give
                    self._begun.pop()
                    if not number:
                        raise
            # Last: after an error the caller's memory is not used.
            self._queue.put(partial(perform, future, partial(fn, *args, **kwargs)))
        return future

    def all_busy_for(self, seconds: float) -> bool:
        """Return whether every thread there may be is in a call that began so long ago."""
        if len(self._begun) < self._most:
            return False
        since = time.monotonic() - seconds
        return all(begun is not None and begun < since for begun in self._begun)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_closed = True
            for _ in self._begun:
                self._queue.put(None)

    def _serve(self, number: int) -> None:
        while (call := self._queue.get()) is not None:
            self._begun[number] = time.monotonic()
            call()
            self._begun[number] = None
            del call  # it would keep a chunk's memory referenced until the next one
