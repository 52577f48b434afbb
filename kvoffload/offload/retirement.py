"""The order of an ended request's chunks: tails leave before heads, as a tail needs its head."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse

from kvoffload.messages import OffloadKey
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.tiers import WriteThrough

LISTED_PER_SLOT = 8
"""Bound of the chunks in all lists of ended requests, for each host slot. While a tier hangs, each
request with the same long head lists it again."""


@dataclass(slots=True)
class _Ended:
    """A request that ended while chunks of it were in flight."""

    chunks: Sequence[OffloadKey]
    """From its head to the last that was in flight; later ones are in order already."""
    num_in_flight: int


class Retirement:
    """Puts chunks in order when their request ends, and again after its last transfer in flight.

    A chunk that is being stored, loaded or written to a tier is out of the eviction order. After an
    unsettled write it stays out until its slot is released. It returns at the recent end: behind
    its head, if the request has ended meanwhile. All prompts with a chunk have the same chunks
    before it, so one entry a chunk is enough.

    Args:
        host: its idle chunks are put in order.
        write_through: lists the chunks that wait for a tier.
    """

    def __init__(self, host: HostCache, write_through: WriteThrough) -> None:
        self._host = host
        self._write_through = write_through
        self._in_flight: OrderedDict[OffloadKey, _Ended] = OrderedDict()
        self._num_listed = 0

    def retire(self, keys: Sequence[OffloadKey]) -> None:
        """Put an ended request's chunks in order, and again when those in flight have landed."""
        self._host.put_in_order(reversed(keys))
        places = [place for place in self._places() if not place.keys().isdisjoint(keys)]
        if not places:
            return
        in_flight = {key for place in places for key in filter(place.__contains__, keys)}
        late = {key: i for i, key in enumerate(keys) if key in in_flight}
        ended = _Ended(keys[: max(late.values()) + 1], len(late))
        before = [self._in_flight[key] for key in late if key in self._in_flight]
        self._in_flight.update(dict.fromkeys(late, ended))
        self._num_listed += len(ended.chunks)
        self._landed(before, keys)
        while self._num_listed > LISTED_PER_SLOT * self._host.num_slots:
            self._count_landed(self._in_flight.popitem(last=False)[1])

    def landed(self, keys: Iterable[OffloadKey]) -> None:
        """Note chunks whose transfers have ended, or will not begin."""
        if self._in_flight:
            waiting = filter(self._in_flight.__contains__, dict.fromkeys(keys))
            self._landed(map(self._in_flight.pop, self._not_in_flight(waiting)))

    def _landed(self, requests: Iterable[_Ended], in_order: Sequence[OffloadKey] = ()) -> None:
        """Count one landed chunk of each request; put complete requests in order.

        Many requests may share a prompt: only the chunks of the longest one are put in order.
        """
        done = [ended for ended in requests if self._count_landed(ended)]
        if not done:
            return
        covered = set(in_order)
        for ended in sorted(done, key=lambda it: -len(it.chunks)):
            if not covered.issuperset(ended.chunks):
                covered.update(ended.chunks)
                self._host.put_in_order(reversed(ended.chunks))

    def _count_landed(self, ended: _Ended) -> bool:
        """Wait for one chunk less of a request; return whether it was the last."""
        ended.num_in_flight -= 1
        if ended.num_in_flight:
            return False
        self._num_listed -= len(ended.chunks)
        return True

    def _places(self) -> list[Mapping[OffloadKey, object]]:
        """Return the tables of chunks that are out of the order, or soon will be."""
        host = self._host
        return [host.incoming, host.fetching, host.pinned, *self._write_through.waiting()]

    def _not_in_flight(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        for place in self._places():
            keys = filterfalse(place.__contains__, keys)
        return list(keys)

    def clear(self) -> None:
        """Forget all ended requests."""
        self._in_flight.clear()
        self._num_listed = 0
