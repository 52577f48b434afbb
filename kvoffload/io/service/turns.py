"""Turns of a session at the stores that all sessions share."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

MOST_CHUNKS = 128
"""Of one session in calls of stores at once: enough for all threads of a store."""
CHUNKS_PER_CALL = 3
"""A call takes as much time of the event loop as so many chunks."""


class Turns:
    """Let one session have so many chunks in calls of stores; its further calls wait, in order.

    Calls of all sessions wait in one queue of a store. So a session that asks for much lets its own
    chunks wait, and those of other sessions wait for a part of them alone.

    Args:
        most: chunks at once, with some for each call; a call of more of them has a turn alone.
    """

    def __init__(self, most: int = MOST_CHUNKS) -> None:
        self._most = self._left = most
        self._in_order = asyncio.Lock()
        self._has_ended = asyncio.Event()

    @contextlib.asynccontextmanager
    async def take(self, chunks: int) -> AsyncIterator[None]:
        """Wait for a turn of so many chunks, and have it."""
        wanted = min(chunks + CHUNKS_PER_CALL, self._most)
        async with self._in_order:
            while self._left < wanted:
                self._has_ended.clear()
                await self._has_ended.wait()
            self._left -= wanted
        try:
            yield
        finally:
            self._left += wanted
            self._has_ended.set()
