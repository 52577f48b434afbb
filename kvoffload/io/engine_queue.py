"""What requests in an engine's queue need, as the I/O server tells it to the stores."""

import asyncio
from collections.abc import Callable, Collection
from itertools import chain

from kvoffload.io.protocol import Await

PAUSE_S = 0.05
"""Time in which changes are told together."""


class EngineQueue:
    """The requests in the queue of one engine; used on the event loop.

    Args:
        most_keys: what requests need beyond so many keys is evicted as usual.
        tell: tells the stores what all requests need.
    """

    def __init__(self, most_keys: float, tell: Callable[[Collection[bytes]], None]) -> None:
        self._most_keys, self._tell = most_keys, tell
        self._loop = asyncio.get_running_loop()
        self.needs: dict[int, list[bytes]] = {}
        """Request → chunks that it needs."""
        self._num_keys = 0
        """Those chunks, and a further one for each request."""
        self._is_to_tell = False
        """Whether stores will soon be told of a change."""
        self._told_s = 0.0
        """How long that took the last time."""

    def take(self, message: Await) -> None:
        """Note what a request needs, and tell of it soon."""
        number, keys = message.request, message.keys
        if before := self.needs.pop(number, None):
            self._num_keys -= len(before) + 1
        if keys and self._num_keys + len(keys) < self._most_keys:
            self.needs[number] = keys
            self._num_keys += len(keys) + 1
        if not self._is_to_tell:
            self._is_to_tell = True
            # A long queue takes a tenth of the loop's time, and no more.
            self._loop.call_later(max(PAUSE_S, 9 * self._told_s), self._tell_all)

    def keys(self) -> frozenset[bytes]:
        """Return the chunks that all requests need."""
        return frozenset(chain.from_iterable(self.needs.values()))

    def _tell_all(self) -> None:
        begun_s, self._is_to_tell = self._loop.time(), False
        self._tell(self.keys())
        self._told_s = self._loop.time() - begun_s
