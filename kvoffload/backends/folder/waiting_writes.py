"""Writes that wait for room: on no thread, so that no load waits, and only where it may come."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from kvoffload.backends.base import Written
from kvoffload.backends.disk.chunk_file import bytes_on_disk
from kvoffload.backends.folder.known import KnownChunks
from kvoffload.backends.folder.room import Room

NO_ROOM = cast("Written", None)
"""The answer to a chunk for which there was no room: its write waits, or refuses it."""
_ROOM_S, _ROOM_LOOK_S = 2.0, 0.02
"""How long a write waits for room, and between two looks: the process that evicts may look at what
was stored only once a second."""


class WaitingWrites:
    """Writes chunks as they find room.

    Args:
        room: of this process.
        known: a chunk that is there needs none.
        may_wait: whether there may be room soon, where the evictor knows of this process.
    """

    def __init__(self, room: Room, known: KnownChunks, may_wait: Callable[[], bool]) -> None:
        self._room, self._known, self._may_wait = room, known, may_wait

    async def write(
        self,
        keys: Sequence[bytes],
        chunks: Sequence[memoryview],
        write: Callable[[list[int]], Awaitable[Sequence[Written]]],
    ) -> list[Written]:
        """Return an answer a chunk, :data:`NO_ROOM` if there was none until the end.

        ``write`` writes the chunks of these numbers. Tails come first, as files leave in the order
        of their times.
        """
        answers: list[Written] = [NO_ROOM] * len(keys)
        until_s, is_over = time.monotonic() + _ROOM_S, False
        while not is_over and (left := [i for i, a in enumerate(answers) if a is NO_ROOM][::-1]):
            fitting = self._fitting(left, keys, chunks)
            is_over = time.monotonic() > until_s or not (self._room.is_known and self._may_wait())
            if part := left if is_over else fitting:
                for i, answer in zip(part, await write(part), strict=True):
                    answers[i] = answer  # another write may have taken the room
            else:
                await asyncio.sleep(_ROOM_LOOK_S)
        return answers

    def _fitting(
        self, left: list[int], keys: Sequence[bytes], chunks: Sequence[memoryview]
    ) -> list[int]:
        """Return which of these chunks are there, or have room in their order."""
        if not (new := [i for i in left if not self._known.holds(keys[i])]):
            return left
        fitting = self._room.fitting(bytes_on_disk(chunks[i].nbytes) for i in new)
        waiting = {*new[fitting:]}
        return [i for i in left if i not in waiting]
