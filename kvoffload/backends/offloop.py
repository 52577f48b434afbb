"""Blocking work beside the I/O loop, without ever leaving the caller's memory in use."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Lane:
    """Threads for one kind of work on chunks (loads, or stores), and how they behave when stuck.

    A system call on a dead device may never return, and its thread owns the caller's memory until
    it does. So a batch waits for the items it has begun, whatever happens; but once every thread
    has been inside one item for ``stall_s``, items not begun are given up as False at once.
    """

    def __init__(self, name: str, threads: int, stall_s: float) -> None:
        self.threads = threads
        self.stall_s = stall_s
        self._executor = ThreadPoolExecutor(threads, name)
        self._begun: dict[object, float] = {}

    def stalled(self) -> bool:
        """Whether every thread is stuck in an item."""
        return self._stuck() == self.threads

    async def run(self, count: int, work: Callable[[int], bool]) -> list[bool]:
        """Do ``work(0) .. work(count - 1)`` on the threads; return the answers in order.

        Each thread takes the next item until none is left: a batch crosses to the threads a few
        times, not once an item. When cancelled, no further item begins, and the call returns only
        after those begun have ended. ``work`` must not raise.
        """
        answers = [False] * count
        if self.stalled():
            return answers
        todo = list(range(count - 1, -1, -1))

        def strand() -> None:
            while todo:
                try:
                    i = todo.pop()  # atomic: no two threads get the same item
                except IndexError:
                    return
                token = object()
                self._begun[token] = time.monotonic()
                try:
                    answers[i] = work(i)
                finally:
                    del self._begun[token]

        jobs = [self._executor.submit(strand) for _ in range(min(self.threads, count))]
        ended = [asyncio.ensure_future(asyncio.wrap_future(job)) for job in jobs]
        pending = set(ended)
        try:
            while pending:
                # wait() leaves the futures alone when it is cancelled; gather() would cancel them.
                _, pending = await asyncio.wait(pending, timeout=self.stall_s)
                if pending and self.stalled():
                    todo.clear()
                    pending = _without_unbegun(jobs, ended)
        except asyncio.CancelledError:
            todo.clear()
            await _undisturbed(_without_unbegun(jobs, ended))
            raise
        for end in ended:
            if end.done() and not end.cancelled():  # those taken back are neither, or will be
                end.result()
        return answers

    def close(self) -> bool:
        """Wait for what is running, unless it is stuck; say whether everything has ended."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        while self._begun and not self._stuck():
            time.sleep(0.001)
        return not self._begun

    def _stuck(self) -> int:
        now = time.monotonic()
        return sum(now - begun > self.stall_s for begun in list(self._begun.values()))


def _without_unbegun(
    jobs: "list[Future[None]]", ended: "list[asyncio.Future[None]]"
) -> "set[asyncio.Future[None]]":
    """Take back the jobs no thread has begun; return the futures of the others."""
    return {end for job, end in zip(jobs, ended, strict=True) if not job.cancel()}


async def _undisturbed(futures: "set[asyncio.Future[None]]") -> None:
    """Wait for futures, whatever cancellation arrives meanwhile."""
    while futures := {future for future in futures if not future.done()}:
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError:
            continue
