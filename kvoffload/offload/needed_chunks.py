"""What stores are told of the queue: the chunks that its first requests need."""

from collections.abc import Sequence
from itertools import islice

from kvoffload.messages import OffloadKey

MOST_TOLD = 1 << 14
"""Chunks that stores are told of: those of the first requests."""


class NeededChunks:
    """Lists queued requests for the stores, as many chunks as they may know at a time."""

    def __init__(self) -> None:
        self.is_telling = False
        """Whether there are stores to tell."""
        self._waiting: dict[int, Sequence[OffloadKey]] = {}
        """Requests that stores shall be told of once there is room, the first one first."""
        self._told: dict[int, int] = {}
        """Request → chunks that stores were told of, or will be next."""
        self._num_told = 0
        self.to_tell: dict[int, list[bytes]] = {}
        """What stores are told next, by request; one without chunks waits no more."""

    def add(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Tell of a request soon; its first chunks count."""
        if self.is_telling and keys:
            self._waiting[number] = keys

    def leave(self, number: int) -> None:
        """Tell of a request no more."""
        self._waiting.pop(number, None)
        if num_told := self._told.pop(number, 0):
            self._num_told -= num_told
            if self.to_tell.pop(number, None) is None:  # or stores know nothing of it
                self.to_tell[number] = []

    def serve(self) -> None:
        """Take up requests as there is room."""
        while self._waiting and (left := MOST_TOLD - self._num_told) > 0:
            number = next(iter(self._waiting))
            keys: list[bytes] = list(islice(self._waiting.pop(number), left))
            self.to_tell[number] = keys
            self._told[number] = len(keys)
            self._num_told += len(keys)

    def take(self) -> list[tuple[int, list[bytes]]]:
        """Return what stores are to be told now: requests by number, with their chunks."""
        taken, self.to_tell = self.to_tell, {}
        return list(taken.items())
