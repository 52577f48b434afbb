"""Blocking work beside the I/O loop, without ever leaving the caller's memory in use."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


async def spread(
    executor: Executor, width: int, count: int, work: Callable[[int], bool]
) -> list[bool]:
    """Do ``work(0) .. work(count - 1)`` on up to ``width`` threads; return the answers in order.

    Each thread takes the next item until none is left: a batch crosses to the threads a few times,
    not once an item. When cancelled, no further item begins, and the call returns only after those
    begun have ended: until then they use the caller's memory. ``work`` must not raise.
    """
    answers = [False] * count
    todo = list(range(count - 1, -1, -1))

    def strand() -> None:
        while todo:
            try:
                i = todo.pop()  # atomic: no two threads get the same item
            except IndexError:
                return
            answers[i] = work(i)

    jobs = [executor.submit(strand) for _ in range(min(width, count))]
    ended = [asyncio.ensure_future(asyncio.wrap_future(job)) for job in jobs]
    if ended:
        try:
            # wait() leaves the futures alone when it is cancelled; gather() would cancel them.
            await asyncio.wait(ended)
        except asyncio.CancelledError:
            todo.clear()
            begun = [end for job, end in zip(jobs, ended, strict=True) if not job.cancel()]
            await _undisturbed(begun)
            raise
    for end in ended:
        end.result()
    return answers


async def _undisturbed(futures: "list[asyncio.Future[None]]") -> None:
    """Wait for futures, whatever cancellation arrives meanwhile."""
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            continue
