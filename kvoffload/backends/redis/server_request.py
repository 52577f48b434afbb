"""A command for one server."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvoffload.backends.flight_bounds import Transfer
from kvoffload.backends.redis.connection import Connection


@dataclass(eq=False)
class Request(Transfer):
    """A command to send, which any thread may cancel.

    Its kind selects the connections and the failure count of the circuit breaker.
    """

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
