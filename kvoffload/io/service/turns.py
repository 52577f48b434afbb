"""Turns of a session at the stores that all sessions share."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from kvoffload.backends.blocking_pool import undisturbed

T = TypeVar("T")
MOST_CHUNKS = 128
"""Of one session in calls of a kind at a store at once: enough for all threads of a store."""
CHUNKS_PER_CALL = 3
"""A call takes as much time of the event loop as so many chunks."""


class NoTurnError(Exception):
    """The session has left the stores."""


class Turns:
    """Let one session have so many chunks in calls of a store; its further calls wait, in order.

    Calls of all sessions wait in one queue of a store. So a session that asks for much lets its own
    chunks wait, and those of other sessions wait for a part of them alone. Each kind of call at
    each store has turns of its own: what is in memory does not wait for a disk that hangs.

    Args:
        most: chunks at once, with some for each call; a call of more of them has a turn alone.
    """

    def __init__(self, most: int = MOST_CHUNKS) -> None:
        self._most = most
        self._lines = defaultdict[tuple[str, str], _Line](partial(_Line, most))
        self._calls: set[asyncio.Task[Any]] = set()
        self._are_over = False

    async def call(
        self, kind: str, store: str, chunks: int, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Wait for a turn of so many chunks, and make a call.

        One that is cancelled returns once it has ended, and its turn ends at once. What hangs in it
        would else hold the later calls, which the store itself may refuse.

        Raises:
            NoTurnError: the turns are over.
            Exception: the call's.
        """
        line, wanted = self._lines[kind, store], min(chunks + CHUNKS_PER_CALL, self._most)
        async with line.in_order:
            while line.left < wanted and not self._are_over:
                line.has_ended.clear()
                await line.has_ended.wait()
            if self._are_over:
                raise NoTurnError
            line.left -= wanted
        task = asyncio.create_task(_made(work))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            line.left += wanted
            line.has_ended.set()
            await undisturbed(task)
        return task.result()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # else one that no caller waits for is logged with a traceback

    async def end(self) -> None:
        """Begin no more calls; return once those that have a turn have ended."""
        self._are_over = True
        for line in self._lines.values():
            line.has_ended.set()
        if self._calls:
            await asyncio.wait(self._calls)


async def _made(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Make a call: a plug-in's may fail before it can be awaited, and would keep its turn."""
    return await work()


class _Line:
    """The calls of one kind at one store."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.in_order = asyncio.Lock()
        self.has_ended = asyncio.Event()
