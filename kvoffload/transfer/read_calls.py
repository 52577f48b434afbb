"""The read calls of a load from tiers.

Chunks may take turns in host slots: a slot is read into again when the copy out of it has ended.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.backends.base import Backend, ReadsEach
from kvoffload.messages import Fetch, OffloadKey
from kvoffload.transfer.base import Fence
from kvoffload.transfer.layout import Moves

KEYS_PER_CALL = 8
"""Chunks in one read call of a store that does not report each chunk as it arrives."""


@dataclass(eq=False)
class ReadCall:
    """One read call of a load, and the copies of its chunks."""

    tier: str
    backend: Backend
    positions: Sequence[int]
    """The chunks' places in the load."""
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    before: "tuple[ReadCall, ...]"
    """Earlier calls that use these slots."""
    copied: set[int] = field(default_factory=set)
    """Numbers of the call's chunks whose copies were launched or refused."""
    fences: list[Fence] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def released(self) -> None:
        """Wait until the call no longer writes its slots, and no copy reads them."""
        await self.ended.wait()
        for fence in self.fences:
            if not fence.done():
                await asyncio.get_running_loop().run_in_executor(None, fence.wait)


def read_calls(
    fetches: Sequence[Fetch], moves: Moves, backends: Mapping[str, Backend]
) -> Iterator[ReadCall]:
    """Cut a load into read calls; each names the earlier calls that use its slots."""
    last: dict[int, ReadCall] = {}
    for fetch in fetches:
        backend = backends[fetch.tier]
        limit = len(fetch.keys) if isinstance(backend, ReadsEach) else KEYS_PER_CALL
        slots = moves.take(fetch.positions).host_slots.tolist()
        for start, end in portions(slots, limit):
            mine = slots[start:end]
            before = dict.fromkeys(last[slot] for slot in mine if slot in last)
            positions, keys = fetch.positions[start:end], fetch.keys[start:end]
            call = ReadCall(fetch.tier, backend, positions, keys, mine, tuple(before))
            last.update(dict.fromkeys(mine, call))
            yield call


def portions(slots: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut a load into read calls, as (start, end) of each.

    No call is longer than ``limit`` or repeats a slot. Where chunks take turns in the slots, a call
    takes half of them. While it reads, the chunks of the call before are copied out of the rest.
    """
    distinct = len(set(slots))
    if distinct < len(slots):
        limit = min(limit, max(1, distinct // 2))
    taken: set[int] = set()
    start = 0
    for i, slot in enumerate(slots):
        if len(taken) == limit or slot in taken:
            yield start, i
            start, taken = i, set()
        taken.add(slot)
    if taken:
        yield start, len(slots)


class ArrivalBatches:
    """Hands numbers from other threads to the I/O loop: as many at once as have arrived.

    Made on the loop.

    Args:
        take: called on the loop with the numbers that arrived since the last call.
    """

    def __init__(self, take: Callable[[Sequence[int]], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._new: deque[int] = deque()
        self._called = False

    def add(self, i: int) -> None:
        """Add a number; from any thread, returns at once."""
        self._new.append(i)
        if not self._called:
            self._called = True
            # A closed loop refuses: the job was answered at shutdown.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        # Reset first, so that a number added from now on causes another call.
        self._called = False
        self._take([self._new.popleft() for _ in range(len(self._new))])
