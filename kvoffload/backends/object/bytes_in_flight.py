"""The bound of chunk bytes in flight: a transfer waits for room, and loads go before stores."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from kvoffload.backends.object.failures import BUSY, CANCELLED, Failed

Kind = Literal["load", "store"]


class InFlightBytes:
    """Lets transfers wait until their bytes fit below a limit; one transfer always fits.

    Args:
        most: bytes in flight at most.
        patience_s: how long a transfer waits.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._room = threading.Condition()
        self._bytes = 0
        self._waiting_loads = 0

    @property
    def nbytes(self) -> int:
        """Bytes in flight now."""
        return self._bytes

    @contextlib.contextmanager
    def of(self, kind: Kind, nbytes: int, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Hold room for a transfer.

        Raises:
            Failed: it was cancelled, or there was no room in time.
        """
        self._enter(kind, nbytes, is_cancelled)
        try:
            yield
        finally:
            with self._room:
                self._bytes -= nbytes
                self._room.notify_all()

    def wake(self) -> None:
        """Let every transfer that waits look whether it was cancelled."""
        with self._room:
            self._room.notify_all()

    def _enter(self, kind: Kind, nbytes: int, is_cancelled: Callable[[], bool]) -> None:
        until = time.monotonic() + self._patience_s
        with self._room:
            self._waiting_loads += kind == "load"
            try:
                while not self._fits(kind, nbytes):
                    if is_cancelled():
                        raise Failed(CANCELLED)
                    if (left_s := until - time.monotonic()) <= 0:
                        raise Failed(BUSY)
                    self._room.wait(left_s)
                self._bytes += nbytes
            finally:
                self._waiting_loads -= kind == "load"
                if not self._waiting_loads:
                    self._room.notify_all()  # a store may go on

    def _fits(self, kind: Kind, nbytes: int) -> bool:
        if kind == "store" and self._waiting_loads:  # one of which fits, if nothing is in flight
            return False
        return not self._bytes or self._bytes + nbytes <= self._most
