"""The error replies of one server: which are failures, and which are only logged."""

import logging
import threading
import time
from collections.abc import Callable

from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.redis.handshake import IN_STEP
from kvoffload.backends.redis.resp import ServerError
from kvoffload.backends.redis.server_request import Request

log = logging.getLogger(__name__)

_FORBIDDEN_S = 30.0
_FULL_S = 1.0
_SAY_AGAIN_S = 600.0
_REMEDIES = {
    "OOM": "set maxmemory-policy to allkeys-lru, or volatile-lru if shared; or give more maxmemory",
    "MISCONF": "turn persistence off (CONFIG SET save ''), or mend what the server's log names",
    "NOREPLICAS": "mend its replicas, or lower min-replicas-to-write",
}
"""Error code → what makes a server take stores again that refuses all of them."""


class Refusals:
    """Counts error replies, and pauses stores where they are refused. Any thread may call it."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._noting = threading.Lock()
        self._full_until = 0.0
        self._missing_rights: set[str] = set()
        self._refused = Throttle(log, _SAY_AGAIN_S)

    @property
    def is_full(self) -> bool:
        """True for a moment after the server refused a store for good reason."""
        return time.monotonic() < self._full_until

    def is_failure(self, error: ServerError, request: Request, server: str) -> bool:
        """Note an error reply; return whether the connection must end, as after a failure."""
        self._count(f"refused_{error.code.lower()}")
        if error.code == "NOPERM":
            if request.kind == "store":
                self._forbid_stores(error, server)
                return False
            self._warn_missing_right(error, request.right, server)
            if request.kind == "lookup":
                return False  # loads and stores work without this right
        if remedy := _REMEDIES.get(error.code):
            self._full_until = time.monotonic() + _FULL_S
            self._refused.warning("redis at %s: no stores: %s; %s", server, error.text, remedy)
        return error.code not in IN_STEP

    def _warn_missing_right(self, error: ServerError, right: str, server: str) -> None:
        with self._noting:
            is_known = right in self._missing_rights
            self._missing_rights.add(right)
        if not is_known:
            remedy = f"(ACL SETUSER <user> +{right} ~kvoffload:* allows it)"
            log.warning("redis at %s: %s %s", server, error.text, remedy)

    def _forbid_stores(self, error: ServerError, server: str) -> None:
        """Pause stores for a user without the right; loads and lookups continue."""
        with self._noting:
            was_full, self._full_until = self.is_full, time.monotonic() + _FORBIDDEN_S
        if not was_full:
            text = "redis at %s: no stores for %.0f s: %s (ACL SETUSER <user> +psetex allows them)"
            log.warning(text, server, _FORBIDDEN_S, error.text)
