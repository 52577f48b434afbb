"""What one server has in flight at most: chunks, bytes, and one lookup; loads go before stores."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvoffload.backends.redis.connection import Connection
from kvoffload.backends.redis.options import RedisOptions

MIN_IN_FLIGHT = 2
"""Chunks always allowed in flight to one server, so that it finds the next one waiting."""

Kind = Literal["lookup", "load", "store"]
_KINDS: tuple[Kind, ...] = ("lookup", "load", "store")


@dataclass(eq=False)
class Request:
    """A command to send, which any thread may cancel."""

    kind: Kind
    """Selects the connections and the failure count of the circuit breaker."""
    nbytes: int = 0
    """Bytes of chunk in either direction; counts towards the bytes in flight."""
    right: str = ""
    """The right that a user needs for it."""
    asking: bool = False
    """Send ASKING first, because a cluster is moving the key's slot to this server."""
    connection: Connection | None = None
    """The connection that it uses or, once it is answered, used."""
    is_busy: bool = False
    """Whether it uses the connection now."""
    is_cancelled: bool = False
    on_cancel: "Callable[[Request], None] | None" = field(default=None, repr=False)
    """Ends it, once it waits for a connection or has one."""

    def cancel(self) -> None:
        """End it: the call that makes it raises :class:`Lost` at once."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel(self)


class Bounds:
    """Lets requests wait until one more may be in flight.

    Args:
        options: The limits.
        lock: The node's; it guards all state here.
        check: Raises for a request that has to end.
    """

    def __init__(
        self, options: RedisOptions, lock: threading.RLock, check: Callable[[Request], None]
    ) -> None:
        self._options, self._lock, self._check = options, lock, check
        self._room = {kind: threading.Condition(lock) for kind in _KINDS}
        """What a request waits for until the bounds admit it."""
        self._waiting = dict.fromkeys(_KINDS, 0)
        self._num_waiting = 0
        self._under_way = dict.fromkeys(_KINDS, 0)
        self._bytes = 0

    def enter(self, request: Request) -> None:
        """Wait until the bounds admit a request; raises what ``check`` raises."""
        kind = request.kind
        with self._lock:
            self._check(request)
            while not self._admits(request):
                self._waiting[kind] += 1
                self._num_waiting += 1
                try:
                    self._room[kind].wait()
                finally:
                    self._waiting[kind] -= 1
                    self._num_waiting -= 1
                self._check(request)
            self._under_way[kind] += 1
            self._bytes += request.nbytes
            self._admit_another()

    def leave(self, request: Request) -> None:
        """End a request that was admitted."""
        with self._lock:
            self._under_way[request.kind] -= 1
            self._bytes -= request.nbytes
            request.is_busy = False
            self._admit_another()

    def wake(self) -> None:
        """Let every request that waits look whether it has to end."""
        for room in self._room.values():
            room.notify_all()

    def _admit_another(self) -> None:
        """Wake one request that waits; it wakes the next one, or waits again."""
        for kind in _KINDS if self._num_waiting else ():
            if self._waiting[kind]:
                self._room[kind].notify()
                if kind != "lookup":
                    return

    def _admits(self, request: Request) -> bool:
        if request.kind == "lookup":
            return not self._under_way["lookup"]
        if request.kind == "store" and self._waiting["load"]:
            return False
        transfers = self._under_way["load"] + self._under_way["store"]
        if transfers < MIN_IN_FLIGHT:
            return transfers < self._options.connections
        fits = self._bytes + request.nbytes <= self._options.max_inflight_bytes
        return fits and transfers < self._options.connections
