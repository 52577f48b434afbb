"""What an ended request says of its session's return: one message for the order of each store."""

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from kvoffload.policies.return_order import ExpectedReturns

Key = Annotated[bytes, Meta(max_length=4096)]
"""No store takes one so long. A server bounds what it keeps of an engine by the number of keys."""


class ToldReturn(NamedTuple):
    """A claim that was made, or that has ended."""

    claim: Key
    """The claimant's name; see :meth:`ExpectedReturns.expect`."""
    keys: Sequence[Key]
    """The chunks of the request's prompt, head first."""
    in_s: Annotated[float, Meta(ge=0)] | None
    """In how many seconds its session needs them again; None: it says nothing."""
    num_used: Annotated[int, Meta(ge=0)]
    """How many leading chunks other requests use as well."""

    def apply(self, claims: ExpectedReturns) -> None:
        """Let a store's claims follow."""
        if self.in_s is None:
            claims.withdraw(self.claim)
        else:
            claims.expect(self.claim, self.keys, self.in_s)
        if self.num_used:
            claims.used(self.keys[: self.num_used])


class LatestReturns:
    """The last word of each claimant, for stores that cannot take it in yet.

    The oldest ones are forgotten beyond :data:`MOST_CLAIMANTS` and :data:`MOST_CHUNKS`.
    """

    MOST_CLAIMANTS, MOST_CHUNKS = 1024, 1 << 14

    def __init__(self) -> None:
        self._told: OrderedDict[bytes, tuple[ToldReturn, float]] = OrderedDict()
        """Claimant → what it said, and when its session returns."""
        self._num_chunks = 0

    def note(self, returns: Iterable[ToldReturn]) -> None:
        """Take in what requests that have ended said, the latest last."""
        now_s = time.monotonic()
        for told in returns:
            if before := self._told.pop(told.claim, None):
                self._num_chunks -= len(before[0].keys)
            if told.in_s is not None:
                self._told[told.claim] = told, now_s + told.in_s
                self._num_chunks += len(told.keys)
        while len(self._told) > self.MOST_CLAIMANTS or (
            self._num_chunks > self.MOST_CHUNKS and len(self._told) > 1
        ):
            _, (told, _) = self._told.popitem(last=False)
            self._num_chunks -= len(told.keys)

    def to_come(self) -> list[ToldReturn]:
        """Return what is to be said now of the sessions that are not late."""
        now_s, told = time.monotonic(), self._told.values()
        due = [(each, due_s - now_s) for each, due_s in told if due_s > now_s]
        return [each._replace(in_s=in_s, num_used=0) for each, in_s in due]
