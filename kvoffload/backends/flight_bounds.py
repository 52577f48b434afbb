"""What a store has in flight at most: a transfer waits for room, and loads go before stores."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Kind = Literal["lookup", "load", "store"]
_KINDS: tuple[Kind, ...] = ("lookup", "load", "store")


@dataclass(eq=False)
class Transfer:
    """A request to a server."""

    kind: Kind
    nbytes: int = 0
    """Bytes of chunk in either direction; counts towards the bytes in flight."""


T = TypeVar("T", bound=Transfer)


class InFlight(Generic[T]):
    """Lets transfers wait until one more may be in flight; one lookup may run at the same time.

    Args:
        most_bytes: of all transfers together.
        check: Raises for a transfer that has to end.
        least: Transfers that fit whatever their bytes are.
        most: Transfers that fit, without the lookup.
        patience_s: How long a transfer waits.
        lock: Guards all state.
    """

    def __init__(
        self,
        most_bytes: int,
        check: Callable[[T], None],
        *,
        least: int = 1,
        most: float = math.inf,
        patience_s: float = 1e6,
        lock: "threading.RLock | None" = None,
    ) -> None:
        self._most_bytes, self._check = most_bytes, check
        self._least, self._most, self._patience_s = least, most, patience_s
        self._lock = lock or threading.RLock()
        self._room = {kind: threading.Condition(self._lock) for kind in _KINDS}
        """What a transfer waits for."""
        self._waiting: list[Kind] = []
        """The kinds of the transfers that wait."""
        self._num_in_flight = dict.fromkeys(_KINDS, 0)
        self.nbytes = 0
        """Bytes in flight now."""

    def enter(self, transfer: T) -> None:
        """Wait for room; raises what ``check`` raises, and TimeoutError."""
        kind = transfer.kind
        with self._lock:
            self._check(transfer)
            if not self._admits(transfer):
                self._wait(transfer)
            self._num_in_flight[kind] += 1
            self.nbytes += transfer.nbytes
            if self._waiting:
                self._admit_another()

    def leave(self, transfer: T) -> None:
        """End a transfer that was admitted."""
        with self._lock:
            self._num_in_flight[transfer.kind] -= 1
            self.nbytes -= transfer.nbytes
            if self._waiting:
                self._admit_another()

    def wake(self) -> None:
        """Let every transfer that waits look whether it has to end."""
        with self._lock:
            for room in self._room.values():
                room.notify_all()

    def _wait(self, transfer: T) -> None:
        until_s = time.monotonic() + self._patience_s
        self._waiting.append(transfer.kind)
        try:
            while not self._admits(transfer):
                if not self._room[transfer.kind].wait(until_s - time.monotonic()):
                    raise TimeoutError("no room in time")
                self._check(transfer)
        finally:
            self._waiting.remove(transfer.kind)
            self._admit_another()

    def _admit_another(self) -> None:
        """Wake one transfer that waits; it wakes the next one, or waits again."""
        for kind in _KINDS:
            if kind in self._waiting:
                self._room[kind].notify()
                if kind != "lookup":
                    return

    def _admits(self, transfer: T) -> bool:
        if transfer.kind == "lookup":
            return not self._num_in_flight["lookup"]
        if transfer.kind == "store" and "load" in self._waiting:
            return False
        transfers = self._num_in_flight["load"] + self._num_in_flight["store"]
        fits = transfers < self._least or self.nbytes + transfer.nbytes <= self._most_bytes
        return fits and transfers < self._most
