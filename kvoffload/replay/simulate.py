"""Run requests through policies and count hits: the model of a store, without the store.

A request looks up its blocks from the head; an engine can use the *contiguous prefix* it finds.
Then the policy is told what the manager of host memory tells it, in the same order. All blocks are
touched, tail first, and the prefix is pinned and unpinned. Missing blocks are stored in place of
victims that are not of the request. At last the request's blocks are put in order, tail first.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice, takewhile

from kvoffload.policies.base import Policy
from kvoffload.replay.requests import Keys, Requests

Progress = Callable[[int], None]
"""Called now and then with the number of blocks used since the last call."""
Weights = Mapping[bytes, float]
"""How many uses each use of a block stands for, in a sample; empty if it is the whole trace."""
WHOLE: Weights = {}

_REPORT_EVERY = 256


@dataclass
class Hits:
    """The hits of one replay, in blocks; of a sample, an estimate for the whole trace."""

    accesses: float = 0
    prefix: float = 0
    """Blocks found in a contiguous prefix of their request: what an engine would load."""
    blocks: float = 0
    """Blocks found anywhere, those of the prefix among them."""

    def count(self, request: Keys, prefix: int, hits: Sequence[bool], weights: Weights) -> None:
        """Add one request, with what its lookup found."""
        if weights:
            each = [weights[key] for key in request]
            self.accesses += sum(each)
            self.prefix += sum(each[:prefix])
            self.blocks += sum(compress(each, hits))
        else:
            self.accesses += len(request)
            self.prefix += prefix
            self.blocks += sum(hits)

    @property
    def prefix_rate(self) -> float:
        """Share of all blocks asked for that a contiguous prefix answered."""
        return self.prefix / self.accesses if self.accesses else 0.0

    @property
    def block_rate(self) -> float:
        """Share of all blocks asked for that were there."""
        return self.blocks / self.accesses if self.accesses else 0.0


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


class Level:
    """One tier of a replay of several: its blocks, ordered by its policy as the manager does it."""

    def __init__(self, name: str, capacity: int, policy: Policy) -> None:
        self.name = name
        self.held: set[bytes] = set()
        self.prefix: float = 0
        """Blocks of contiguous prefixes that came from here."""
        self._capacity = capacity
        self._policy = policy

    def serve(self, keys: Sequence[bytes], loaded: Sequence[bytes]) -> None:
        """Use blocks of a request, of which some are loaded from here; store those that are new."""
        policy, held = self._policy, self.held
        # A request that names a block twice has it once.
        keys, loaded = list(dict.fromkeys(keys)), list(dict.fromkeys(loaded))
        backwards = keys[::-1]
        policy.touch(backwards)
        policy.remove(loaded)  # pinned while they are copied
        policy.add(loaded[::-1])
        new = [key for key in keys if key not in held]
        self._make_room(len(new), frozenset(keys if len(new) < len(keys) else ()))
        stored = new[: self._capacity - len(held)]
        policy.add(stored[::-1])
        held.update(stored)
        ended = [key for key in backwards if key in held]
        policy.remove(ended)
        policy.add(ended)

    def _make_room(self, count: int, kept: frozenset[bytes]) -> None:
        """Evict until there is room for so many blocks, or only kept ones are left."""
        policy, held = self._policy, self.held
        short, spared = len(held) + count - self._capacity, list[bytes]()
        while short > 0 and (victims := policy.victims(short)):
            gone = [key for key in victims if key not in kept]
            spared += [key for key in victims if key in kept]
            held.difference_update(gone)
            short -= len(gone)
        policy.add(spared)


def replay_levels(
    requests: Sequence[Keys],
    levels: Sequence[Level],
    progress: Progress | None = None,
    weights: Weights = WHOLE,
) -> Hits:
    """Use a chain of stores; every block stored is written to all of them.

    A level counts a use only of the blocks that were read from it, since a hit above never asks
    below. What is read from below is put into every level above. ``levels``, nearest first and new,
    receive their counts.
    """
    found = Hits()
    missing = len(levels)
    for request in _reported(requests, progress):
        sources = [_source(key, levels) for key in request]
        prefix = _leading(source < missing for source in sources)
        found.count(request, prefix, [source < missing for source in sources], weights)
        for at, level in enumerate(levels):
            asked = [key for key, source in zip(request, sources, strict=True) if source >= at]
            heads = zip(request[:prefix], sources, strict=False)
            loaded = [key for key, source in heads if source == at]
            level.prefix += sum(weights.get(key, 1) for key in loaded) if weights else len(loaded)
            level.serve(asked, loaded)
    return found


def _source(key: bytes, levels: Sequence[Level]) -> int:
    """Return the number of the first level that holds a block; that of no level if none does."""
    for at, level in enumerate(levels):
        if key in level.held:
            return at
    return len(levels)


def _leading(found: Iterable[bool]) -> int:
    return sum(takewhile(bool, found))


def infinite(requests: Sequence[Keys], weights: Weights = WHOLE) -> Hits:
    """Count the hits of a store that holds everything."""
    found = Hits()
    held: set[bytes] = set()
    for request in requests:
        hits = [key in held for key in request]
        found.count(request, _leading(hits), hits, weights)
        held.update(request)
    return found


def belady(
    requests: Requests,
    capacity: int,
    progress: Progress | None = None,
    weights: Weights = WHOLE,
    takes_each: bool = False,
) -> Hits:
    """Count the hits of a store that knows the future: no policy has more.

    It evicts the block whose next use is the farthest (L. Belady, 1966), or does not take the new
    one if that is the one. Of one request's blocks the tail counts as used last. A head is used
    whenever its tail is, so the store always holds whole prefixes. Its block hits are then its
    prefix hits as well, and a bound for both. If it ``takes_each`` new block, as host memory does,
    it bounds what an order of eviction can do.
    """
    never, next_use = requests.accesses, _next_uses(requests)
    held: dict[int, int] = {}  # block → its next use
    farthest = _Farthest(held, len(requests.keys))
    found = Hits()
    at = 0
    for request, blocks in zip(_reported(requests, progress), requests.blocks(), strict=True):
        hits = [block in held for block in blocks]
        found.count(request, _leading(hits), hits, weights)
        dues = dict(zip(blocks, next_use[at : at + len(blocks)], strict=True))
        at += len(blocks)
        if takes_each:
            for block in dues:
                held.pop(block, None)
            while held and len(held) + len(dues) > capacity:
                del held[farthest.find()]
            for block, due in islice(dues.items(), capacity):
                held[block] = due
                farthest.add(block, due)
            continue
        for block in [block for block in dues if block in held]:
            if dues[block] == never:
                del held[block]  # its last use was this one
            else:
                held[block] = dues[block]
                farthest.add(block, dues[block])
            del dues[block]
        for block, due in dues.items():
            if due == never:
                continue
            if len(held) >= capacity:
                victim = farthest.find()
                if held[victim] <= due:
                    continue
                del held[victim]
            held[block] = due
            farthest.add(block, due)
    return found


def _next_uses(requests: Requests) -> "array[int]":
    """For each use of a block, in order: when it is used again; the number of uses: never."""
    uses = requests.accesses
    kind = "I" if uses < 1 << 32 else "Q"
    next_use = array(kind, [uses]) * uses
    next_of = array(kind, [uses]) * len(requests.keys)
    at = uses
    for blocks in requests.blocks_backwards():
        for block in reversed(blocks):
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
