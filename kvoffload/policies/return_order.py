"""The order by expected return, over any policy: the chunk that is needed last leaves first.

A *claim* says when its claimant uses the chunks of a prompt again. Chunks under a claim are ordered
by the soonest of their claims. All other chunks are in the wrapped policy, which decides as ever.

A claim that is overdue by ``d`` seconds is expected in ``d + 5`` s more. A claimant who does not
come is thus believed less and less. The two orders are compared by the age at which the wrapped
policy evicts. A claim protects nothing once it is overdue by more, or while it is due in more than
eight times that age.

The claims are a tree, as prompts are. A chunk under a claim knows the chunk before it. The claim
that is expected last gives up its chunks, tail first, until another claim covers what is left.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from typing import Protocol

from kvoffload.policies.base import Policy

GRACE_S = 5.0
"""A claim that is due now is expected within this time."""
SURE = 8.0
"""A claim due within so many ages still protects: most of the chunks that the wrapped policy evicts
are not used again at all."""
MAX_CLAIMS = 1 << 15
"""Claims at a time; one more ends the claim that is expected last."""
NAMED_PER_ENTRY = 2
"""Chunks under claims, for each entry of the store: a claim may name chunks that it has not."""
_USED, _LEFT = b"used ", b"left "
_WATCHED = 32
_FADES = 0.75


class ExpectedReturns(Protocol):
    """What claimants say of the chunks of their prompts; keys are head first."""

    def expect(self, claim: bytes, keys: Sequence[bytes], in_s: float) -> None:
        """Say when a claimant uses chunks again; replaces what it said before.

        Args:
            claim: the claimant's name. The name of a claimant without one is its last chunk: a
                later prompt with this chunk fulfils the claim.
            keys: the chunks of its prompt; those that the store has not count when they are added.
            in_s: seconds from now, 0 or more; infinite: never.
        """
        ...

    def withdraw(self, claim: bytes) -> None:
        """End a claim, if there is one: its chunks return to the wrapped policy."""
        ...

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that a request without a claim used chunks.

        Those under a claim are then expected as after one more claim, for this moment.
        """
        ...

    def has_claim(self, claim: bytes) -> bool:
        """Whether a claimant's last claim still covers chunks."""
        ...


class _Claim:
    """What one claimant said. ``tail`` is the last chunk that it still covers; None: it ended."""

    __slots__ = ("due_s", "name", "tail")

    def __init__(self, name: bytes, due_s: float, tail: bytes) -> None:
        self.name = name
        self.due_s = due_s
        self.tail: bytes | None = tail


class _ByDue:
    """Finds the claim that is expected last; a claim that ended is dropped when it is found."""

    def __init__(self) -> None:
        self._numbers = count()
        self._first: list[tuple[float, int, _Claim]] = []
        self._last: list[tuple[float, int, _Claim]] = []

    def add(self, claim: _Claim, num_claims: int) -> None:
        if 2 * len(self._first) > 3 * num_claims + 128:
            self._first = [item for item in self._first if item[2].tail is not None]
            self._last = [(-due_s, number, claim) for due_s, number, claim in self._first]
            heapq.heapify(self._first)
            heapq.heapify(self._last)
        number = next(self._numbers)
        heapq.heappush(self._first, (claim.due_s, number, claim))
        heapq.heappush(self._last, (-claim.due_s, number, claim))

    def furthest(self, now_s: float) -> tuple[_Claim | None, float]:
        """Return the claim that is expected last, and in how many seconds."""
        first, last = self._ends()
        if first is None or last is None:
            return None, -inf
        overdue_s = now_s - first.due_s
        if overdue_s > 0 and overdue_s + GRACE_S > last.due_s - now_s:
            return first, overdue_s + GRACE_S
        return last, last.due_s - now_s

    def first(self) -> _Claim | None:
        """Return the claim that is due first."""
        return self._ends()[0]

    def _ends(self) -> tuple[_Claim | None, _Claim | None]:
        for heap in (self._first, self._last):
            while heap and heap[0][2].tail is None:
                heapq.heappop(heap)
        return (self._first[0][2], self._last[0][2]) if self._first else (None, None)


class ReturnOrder:
    """Orders the chunks under claims; the rest is in the wrapped policy. A policy itself.

    While no claim lives, each call is one call of the wrapped policy. Work is O(1) a chunk, and
    O(log n) a claim.

    Args:
        normal: the order of chunks without a claim; used by this object alone.
        capacity: of the store in entries.
        share: the part of the store that chunks under claims hold at most while other chunks need
            room.
        now_s: a clock; only differences count.
    """

    def __init__(
        self,
        normal: Policy,
        capacity: int,
        share: float = 0.5,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.normal = normal
        self.capacity = capacity
        """Of the store in entries; a store whose entries differ in size may change it."""
        self._share = share
        self._now_s = now_s
        self._claims: dict[bytes, _Claim] = {}
        self._by_due = _ByDue()
        # Chunk under a claim → the chunk before it in its prompt.
        self._before: dict[bytes, bytes | None] = {}
        # Such a chunk → the claims that end at it and the chunks behind it, beyond the first.
        self._forks: dict[bytes, int] = {}
        # Such chunks that are not in the order: pinned, or not stored.
        self._away: set[bytes] = set()
        # A few chunks of the wrapped policy, with their last use; and the age at which they leave.
        self._watched: dict[bytes, float] = {}
        self._age_s = inf

    # ---- claims ----

    def expect(self, claim: bytes, keys: Sequence[bytes], in_s: float) -> None:
        keys = list(dict.fromkeys(keys))
        self._fulfil(keys)
        before = self._claims.pop(claim, None)
        if keys:
            self._cover(keys)
            self._put(_Claim(claim, self._now_s() + in_s, keys[-1]))
        if before is not None:
            self._replace(before, keys)
        most_named = NAMED_PER_ENTRY * self.capacity
        while len(self._claims) > MAX_CLAIMS or len(self._before) > most_named:
            furthest, _ = self._by_due.furthest(self._now_s())
            if furthest is None:
                break
            del self._claims[furthest.name]
            self._end(furthest)

    def withdraw(self, claim: bytes) -> None:
        if before := self._claims.pop(claim, None):
            self._end(before)

    def used(self, keys: Sequence[bytes]) -> None:
        self._fulfil(keys)
        if self._before.keys().isdisjoint(keys):
            return
        tail = next(filter(self._before.__contains__, reversed(keys)))
        before = self._claims.pop(_USED + tail, None)
        self._forks[tail] = self._forks.get(tail, 0) + 1
        self._put(_Claim(_USED + tail, self._now_s(), tail))
        if before is not None:
            self._end(before)

    def has_claim(self, claim: bytes) -> bool:
        return claim in self._claims

    def _fulfil(self, keys: Sequence[bytes]) -> None:
        """End the claims without a claimant's name whose last chunk a prompt has."""
        if not self._claims.keys().isdisjoint(keys):
            for key in keys:
                self.withdraw(key)

    def _put(self, claim: _Claim) -> None:
        self._claims[claim.name] = claim
        self._by_due.add(claim, len(self._claims))

    def _cover(self, keys: Sequence[bytes]) -> None:
        """Put chunks under one more claim, head first, each once."""
        before = self._before
        new: list[bytes] = []
        known = None
        for key in reversed(keys):
            if key in before:
                known = key
                self._forks[key] = self._forks.get(key, 0) + 1
                break
            new.append(key)
        here = list(filter(self.normal.__contains__, new))
        self._take_out(here)
        if len(here) < len(new):
            self._away.update(set(new).difference(here))
        before.update(zip(new, [*new[1:], known][: len(new)], strict=True))

    def _leave(self, claim: _Claim, most: float = inf) -> list[bytes]:
        """Take chunks that no other claim covers from under a claim, tail first."""
        left: list[bytes] = []
        tail = claim.tail
        while tail is not None and len(left) < most:
            if forks := self._forks.pop(tail, 0):
                if forks > 1:
                    self._forks[tail] = forks - 1
                tail = None
            else:
                left.append(tail)
                tail = self._before.pop(tail)
        claim.tail = tail
        if self._away and not self._away.isdisjoint(left):
            here = [key for key in left if key not in self._away]
            self._away.difference_update(left)
            return here
        return left

    def _replace(self, claim: _Claim, keys: Sequence[bytes]) -> None:
        """End the claim that a claimant made before: what only its last prompt had leaves first.

        Where the new prompt does not go on from that one, the claimant has two, as an agent with
        its helpers. Then the claim lives on, until a prompt with its last chunk comes.
        """
        tail = claim.tail
        if tail is None or tail in self._forks:
            self._leave(claim)
            return
        place = {key: number for number, key in enumerate(keys)}
        at: bytes | None = tail
        left = 0
        while at is not None and at not in place and left <= len(keys):
            left, at = left + 1, self._before[at]
        if at is not None and left <= place.get(at, -1):
            claim.tail = None
            again = self._claims.pop(_LEFT + tail, None)  # it lost its tail since
            self._put(_Claim(_LEFT + tail, inf, tail))
            if again is not None:
                self._end(again)
        else:
            self.withdraw(tail)
            claim.name = tail
            self._claims[tail] = claim

    def _end(self, claim: _Claim) -> None:
        self._put_in(self._leave(claim))

    # ---- the policy ----

    def _split(self, keys: Sequence[bytes]) -> tuple[Sequence[bytes], list[bytes]]:
        """Return the keys without a claim, and those under one."""
        if self._before.keys().isdisjoint(keys):
            return keys, []
        under = list(filter(self._before.__contains__, keys))
        return [key for key in keys if key not in self._before], under

    def add(self, keys: Sequence[bytes]) -> None:
        free, under = self._split(keys)
        self._away.difference_update(under)
        if free:
            self._put_in(free)

    def _put_in(self, keys: Sequence[bytes]) -> None:
        """Put chunks without a claim into their order; watch one of them."""
        self.normal.add(keys)
        if keys and len(self._watched) < _WATCHED:
            self._watched[keys[len(keys) // 2]] = self._now_s()

    def _take_out(self, keys: Sequence[bytes]) -> None:
        self.normal.remove(keys)
        if not self._watched.keys().isdisjoint(keys):
            for key in self._watched.keys() & set(keys):
                del self._watched[key]

    def touch(self, keys: Sequence[bytes]) -> None:
        self.normal.touch(keys)
        if self._watched and not self._watched.keys().isdisjoint(keys):
            now_s = self._now_s()
            for key in self._watched.keys() & set(keys):
                self._watched[key] = now_s

    def remove(self, keys: Sequence[bytes]) -> None:
        free, under = self._split(keys)
        self._away.update(under)
        if free:
            self._take_out(free)

    def victims(self, count: int) -> Sequence[bytes]:
        taken: list[bytes] = []
        now_s = self._now_s()
        while self._claims and len(taken) < count:
            claim, most = self._least_wanted(now_s), count - len(taken)
            if claim is None:
                claim, _ = self._by_due.furthest(now_s)
                if len(self.normal):
                    most = min(most, self._num_under - int(self._share * self.capacity))
            if claim is None or most <= 0:
                break
            taken += self._leave(claim, most)
            if claim.tail is None:
                del self._claims[claim.name]
        if len(taken) < count:
            normal = self.normal.victims(count - len(taken))
            self._note_age(normal, now_s)
            taken += normal
            if len(taken) < count and self._num_under and not len(self.normal):
                taken += self.victims(count - len(taken))
        return taken

    def _least_wanted(self, now_s: float) -> _Claim | None:
        """Return a claim whose chunks are worth less than those that the wrapped policy evicts."""
        claim, in_s = self._by_due.furthest(now_s)
        if claim is None or in_s == inf or in_s > SURE * (self._age_s + GRACE_S):
            return claim
        first = self._by_due.first()
        return first if first is not None and now_s - first.due_s > self._age_s else None

    def _note_age(self, victims: Iterable[bytes], now_s: float) -> None:
        for key in self._watched.keys() & set(victims):
            age_s = max(0.0, now_s - self._watched.pop(key))
            known = self._age_s < inf
            self._age_s = _FADES * self._age_s + (1 - _FADES) * age_s if known else age_s

    @property
    def _num_under(self) -> int:
        return len(self._before) - len(self._away)

    def __len__(self) -> int:
        return len(self.normal) + self._num_under

    def __contains__(self, key: object) -> bool:
        if key in self._before:
            return key not in self._away
        return key in self.normal

    def clear(self) -> None:
        """Take all keys out; what claimants said holds for keys that are added from now on."""
        self.normal.clear()
        self._away.update(self._before)
        self._watched.clear()
