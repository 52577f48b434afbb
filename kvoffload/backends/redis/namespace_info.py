"""Names of values, and the value that describes a namespace for operators."""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from kvoffload.backends.redis.connection import Lost, Outcome, RedisRequest
from kvoffload.backends.redis.resp import Line, ServerError, encode

log = logging.getLogger(__name__)

PREFIX = "kvoffload"
_EVERY_S = 1.0
_REFUSED_S = 60.0
_OURS = re.compile(rb"kvoffload:[!-9;-~]+:(?:facts|[0-9a-z-]+:\{(?:[0-9a-f]{2})+\})")
"""Names as this backend makes them, in ASCII. Other names with the same front are foreign."""


def namespace_prefix(namespace: str) -> str:
    """Return the front of every name in a namespace."""
    return f"{PREFIX}:{quote(namespace, safe='')}:"


def is_ours(name: bytes) -> bool:
    """Return True if this backend makes such names."""
    return _OURS.fullmatch(name) is not None


def is_info(name: bytes) -> bool:
    """Return True for the name of a :class:`NamespaceInfo` value."""
    return name.endswith(b":facts")


def namespace_of(name: bytes) -> str:
    """Return the namespace in one of our names."""
    return unquote(name.split(b":")[1].decode())


def read_facts(value: Any) -> dict[str, str]:
    """Return the facts in the value of a :class:`NamespaceInfo`; empty for anything else."""
    try:
        return msgspec.json.decode(value or b"{}", type=dict[str, str])
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError):
        return {}


class NamespaceInfo:
    """Writes the description of a namespace soon after each use, at most once a second.

    A server does not announce a flush. The value is therefore written again even if the last write
    succeeded: a small command a second while the namespace is in use. ``send`` sends it to the
    server of its name. All code runs on the I/O loop's thread.
    """

    def __init__(
        self, namespace: str, ttl_s: float, send: Callable[[bytes, RedisRequest], None]
    ) -> None:
        self._name = f"{namespace_prefix(namespace)}facts".encode()
        self._ttl_ms = b"%d" % int(ttl_s * 1000)
        self._every_s = min(_EVERY_S, ttl_s / 4)
        self._send = send
        self._command = b""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, facts: Mapping[str, str]) -> None:
        value = json.dumps(dict(facts), sort_keys=True).encode()
        self._command = encode(b"PSETEX", self._name, self._ttl_ms, value)

    def note_use(self) -> None:
        """Renew the value, so that it lives as long as the chunks in use."""
        if self._timer is None and self._command:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self._due - loop.time()), self._write)

    def close(self) -> None:
        self._command = b""
        if self._timer is not None:
            self._timer.cancel()

    def _write(self) -> None:
        self._timer = None
        self._due = asyncio.get_running_loop().time() + self._every_s
        request = RedisRequest("lookup", lambda: [self._command], Line(), done=self._written)
        self._send(self._name, request)

    def _written(self, outcome: Outcome) -> None:
        if outcome == b"OK":
            return
        why = outcome.reason if isinstance(outcome, Lost) else outcome
        log.debug("redis: the description of the namespace could not be stored: %s", why)
        if isinstance(outcome, ServerError) and outcome.code in ("OOM", "NOPERM"):
            self._due = asyncio.get_running_loop().time() + _REFUSED_S
