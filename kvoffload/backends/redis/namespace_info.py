"""The value that keeps readable what a namespace is a digest of; there as long as its chunks."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping

from kvoffload.backends.redis.connection import Lost, Outcome, Request
from kvoffload.backends.redis.resp import Line, ServerError, encode

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_REFUSED_S = 60.0


class NamespaceInfo:
    """Writes the facts of a namespace soon after each use of it, at most once a second.

    Nobody says when a server was emptied, so they are written again whatever became of them the
    last time: a small command a second, for as long as there is use. On the I/O loop's thread.

    Args:
        name: of the value.
        ttl_s: its time to live.
        send: hands a request to the server in charge of the name, if there is one.
    """

    def __init__(self, name: bytes, ttl_s: float, send: Callable[[Request], None]) -> None:
        self._name = name
        self._ttl_ms = b"%d" % int(ttl_s * 1000)
        self._every_s = min(_EVERY_S, ttl_s / 4)
        self._send = send
        self._command = b""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, facts: Mapping[str, str]) -> None:
        """Say what they are; they are written with the next use."""
        value = json.dumps(dict(facts), sort_keys=True).encode()
        self._command = encode(b"PSETEX", self._name, self._ttl_ms, value)

    def used(self) -> None:
        """Chunks were stored or loaded: see to it that the facts last as long as they."""
        if self._timer is None and self._command:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self._due - loop.time()), self._write)

    def close(self) -> None:
        """Write nothing any more."""
        self._command = b""
        if self._timer is not None:
            self._timer.cancel()

    def _write(self) -> None:
        self._timer = None
        self._due = asyncio.get_running_loop().time() + self._every_s
        self._send(Request(lambda: [self._command], Line(), 0, self._written))

    def _written(self, outcome: Outcome) -> None:
        if outcome == b"OK":
            return
        why = outcome.reason if isinstance(outcome, Lost) else outcome
        log.debug("redis: the facts of the namespace could not be stored: %s", why)
        if isinstance(outcome, ServerError) and outcome.code in ("OOM", "NOPERM"):
            self._due = asyncio.get_running_loop().time() + _REFUSED_S
