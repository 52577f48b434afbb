"""Run requests through policies and count hits: the model of a store, without the store.

A request looks up its blocks from the head; an engine can use the *contiguous prefix* it finds.
Then all its blocks are used, tail first, and missing blocks are stored in place of victims.
"""

import heapq
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import TypeVar

from kvoffload.policies.base import Policy
from kvoffload.replay.requests import Keys, Requests

Progress = Callable[[int], None]
"""Called now and then with the number of blocks used since the last call."""
Weights = Mapping[bytes, float]
"""How many uses each use of a block stands for, in a sample; empty if it is the whole trace."""
WHOLE: Weights = {}

_REPORT_EVERY = 256
_T = TypeVar("_T")


@dataclass
class Hits:
    """The hits of one replay, in blocks; of a sample, an estimate for the whole trace."""

    accesses: float = 0
    prefix: float = 0
    """Blocks found in a contiguous prefix of their request: what an engine would load."""
    blocks: float = 0
    """Blocks found anywhere."""

    def count(
        self, request: Keys, prefix: int, hits_backwards: Sequence[bool], weights: Weights
    ) -> None:
        """Add one request."""
        if weights:
            each = [weights[key] for key in request]
            self.accesses += sum(each)
            self.prefix += sum(each[:prefix])
            self.blocks += sum(compress(reversed(each), hits_backwards))
        else:
            self.accesses += len(request)
            self.prefix += prefix
            self.blocks += sum(hits_backwards)

    @property
    def prefix_rate(self) -> float:
        """Share of all blocks asked for that a contiguous prefix answered."""
        return self.prefix / self.accesses if self.accesses else 0.0

    @property
    def block_rate(self) -> float:
        """Share of all blocks asked for that were there."""
        return self.blocks / self.accesses if self.accesses else 0.0


@dataclass
class Level:
    """One tier of a replay of several, nearest first."""

    name: str
    capacity: int
    policy: Policy
    prefix: float = 0
    """Blocks of contiguous prefixes that came from here."""


def _reported(requests: Sequence[Keys], progress: Progress | None) -> Iterator[Keys]:
    """Hand out the requests, telling ``progress``."""
    if progress is None:
        yield from requests
        return
    since = 0
    for at, request in enumerate(requests):
        yield request
        since += len(request)
        if at % _REPORT_EVERY == 0 or at == len(requests) - 1:
            progress(since)
            since = 0


def _prefix(request: Iterable[_T], held: Collection[_T]) -> int:
    return sum(takewhile(bool, map(held.__contains__, request)))


def replay(
    requests: Sequence[Keys],
    policy: Policy,
    capacity: int,
    progress: Progress | None = None,
    weights: Weights = WHOLE,
) -> Hits:
    """Use one store of ``capacity`` blocks; the policy must be new."""
    found = Hits()
    held: set[bytes] = set()
    for request in _reported(requests, progress):
        prefix = _prefix(request, held)
        hits: list[bool] = []
        used: list[bytes] = []
        for key in reversed(request):
            used.append(key)
            hit = key in held
            hits.append(hit)
            if hit:
                continue
            policy.touch(used)
            used = []
            if len(held) >= capacity:
                held.difference_update(policy.victims(1))
            policy.add((key,))
            held.add(key)
        policy.touch(used)
        found.count(request, prefix, hits, weights)
    return found


def replay_levels(
    requests: Sequence[Keys],
    levels: Sequence[Level],
    progress: Progress | None = None,
    weights: Weights = WHOLE,
) -> Hits:
    """Use a chain of stores; every block stored is written to all of them.

    A level counts a use only of the blocks that were read from it, since a hit above never asks
    below. What is read from below is put into every level above. ``levels`` receive their counts.
    """
    found = Hits()
    held: list[set[bytes]] = [set() for _ in levels]

    def put(at: int, key: bytes) -> None:
        level = levels[at]
        if key not in held[at]:
            if len(held[at]) >= level.capacity:
                held[at].difference_update(level.policy.victims(1))
            level.policy.add((key,))
            held[at].add(key)

    for request in _reported(requests, progress):
        sources = [
            next((at for at, there in enumerate(held) if key in there), None) for key in request
        ]
        prefix = 0
        for key, source in zip(request, sources, strict=True):
            if source is None:
                break
            levels[source].prefix += weights.get(key, 1)
            prefix += 1
        sources.reverse()
        for key, source in zip(reversed(request), sources, strict=True):
            deepest = len(levels) - 1 if source is None else source
            for level in levels[: deepest + 1]:
                level.policy.touch((key,))
            for at in range(deepest + 1):
                put(at, key)
        found.count(request, prefix, [source is not None for source in sources], weights)
    return found


def infinite(requests: Sequence[Keys], weights: Weights = WHOLE) -> Hits:
    """Count the hits of a store that holds everything."""
    found = Hits()
    held: set[bytes] = set()
    for request in requests:
        hits = [key in held for key in reversed(request)]
        found.count(request, _prefix(request, held), hits, weights)
        held.update(request)
    return found


def belady(
    requests: Requests,
    capacity: int,
    progress: Progress | None = None,
    weights: Weights = WHOLE,
) -> Hits:
    """Count the hits of a store that knows the future: no policy has more *block* hits.

    It evicts the block whose next use is the farthest (L. Belady, 1966), or does not take the new
    one if that is the one. It is a bound on block hits; prefix hits follow it closely, but are not
    what it maximises.
    """
    never, next_use = requests.accesses, _next_uses(requests)
    held: dict[int, int] = {}  # block → its next use
    farthest = _Farthest(held, len(requests.keys))
    found = Hits()
    at = 0
    for request, blocks in zip(_reported(requests, progress), requests.blocks(), strict=True):
        prefix = _prefix(blocks, held)
        hits: list[bool] = []
        for block in reversed(blocks):
            due = next_use[at]
            at += 1
            hits.append(block in held)
            if hits[-1]:
                pass
            elif due == never:
                continue
            elif len(held) >= capacity:
                victim = farthest.find()
                if held[victim] <= due:
                    continue
                del held[victim]
            if due == never:
                del held[block]  # its last use was this one
                continue
            held[block] = due
            farthest.add(block, due)
        found.count(request, prefix, hits, weights)
    return found


def _next_uses(requests: Requests) -> "array[int]":
    """For each use of a block, tails first: when it is used again; the number of uses: never."""
    uses = requests.accesses
    kind = "I" if uses < 1 << 32 else "Q"
    next_use = array(kind, [uses]) * uses
    next_of = array(kind, [uses]) * len(requests.keys)
    at = uses
    for blocks in requests.blocks_backwards():
        for block in blocks:
            at -= 1
            next_use[at] = next_of[block]
            next_of[block] = at
    return next_use


class _Farthest:
    """Finds the block whose next use is the farthest, among those that ``held`` has.

    The heap holds single numbers, which name both the next use and the block. A block's entry is
    stale once ``held`` has another next use for it. Stale entries are dropped before they outnumber
    the live ones.
    """

    def __init__(self, held: Mapping[int, int], num_blocks: int) -> None:
        self._held = held
        self._num_blocks = num_blocks
        self._heap: list[int] = []

    def add(self, block: int, due: int) -> None:
        if len(self._heap) > 2 * len(self._held) + 1024:
            self._heap = [self._entry(*item) for item in self._held.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, self._entry(block, due))

    def find(self) -> int:
        while True:
            due, block = divmod(-self._heap[0], self._num_blocks)
            if self._held.get(block) == due:
                return block
            heapq.heappop(self._heap)

    def _entry(self, block: int, due: int) -> int:
        return -(due * self._num_blocks + block)
