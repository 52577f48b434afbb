"""Names of values, and the value that describes a namespace for operators."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from kvoffload.backends.redis.background import Background
from kvoffload.backends.redis.resp import ServerError

log = logging.getLogger(__name__)

PREFIX = "kvoffload"
_MAX_NAME_BYTES = 1024
_EVERY_S = 1.0
_REFUSED_S = 60.0
_OURS = re.compile(rb"kvoffload:[!-9;-~]+:(?:facts|[0-9a-z-]+:\{(?:[0-9a-f]{2})+\})")
"""Names as this backend makes them, in ASCII. Other names with the same front are foreign."""


def namespace_prefix(namespace: str) -> str:
    """Return the front of every name in a namespace."""
    return f"{PREFIX}:{quote(namespace, safe='')}:"


def is_ours(name: bytes) -> bool:
    """Return True if this backend makes such names."""
    return len(name) <= _MAX_NAME_BYTES and _OURS.fullmatch(name) is not None


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
    succeeded: a small command a second while the namespace is in use. ``send`` sends a command to
    the server of a name and returns the reply; it raises OSError.
    """

    def __init__(self, namespace: str, ttl_s: float, send: Callable[..., object]) -> None:
        self._name = f"{namespace_prefix(namespace)}facts".encode()
        self._ttl_ms = b"%d" % int(ttl_s * 1000)
        self._every_s = min(_EVERY_S, ttl_s / 4)
        self._send = send
        self._value = b""
        self._writer = Background("kvoffload-redis-facts", self._write, lambda: None)

    def set(self, facts: Mapping[str, str]) -> None:
        self._value = json.dumps(dict(facts), sort_keys=True).encode()
        self._writer.wake()

    def note_use(self) -> None:
        """Renew the value, so that it lives as long as the chunks in use."""
        if self._value:
            self._writer.wake()

    def close(self) -> None:
        self._writer.close()

    def join(self) -> None:
        """After :meth:`close`: wait for a write in progress."""
        self._writer.join()

    def _write(self) -> float:
        try:
            reply = self._send(self._name, b"PSETEX", self._name, self._ttl_ms, self._value)
        except OSError as error:
            reply = error
        if reply != b"OK":
            text = "redis: the description of the namespace could not be stored: %s"
            log.debug(text, reply)
            if isinstance(reply, ServerError) and reply.code in ("OOM", "NOPERM"):
                return _REFUSED_S
        return self._every_s
