"""What an ended request says of its session's return: one message for the order of each store."""

from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.policies.return_order import ExpectedReturns


class ToldReturn(NamedTuple):
    """A claim that was made, or that has ended."""

    claim: bytes
    """The claimant's name; see :meth:`ExpectedReturns.expect`."""
    keys: Sequence[bytes]
    """The chunks of the request's prompt, head first."""
    in_s: float | None
    """In how many seconds its session needs them again; None: it says nothing."""
    num_used: int
    """How many leading chunks other requests use as well."""

    def apply(self, claims: ExpectedReturns) -> None:
        """Let a store's claims follow."""
        if self.in_s is None:
            claims.withdraw(self.claim)
        else:
            claims.expect(self.claim, self.keys, self.in_s)
        if self.num_used:
            claims.used(self.keys[: self.num_used])
