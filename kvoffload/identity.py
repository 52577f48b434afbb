"""The namespace: a digest of everything that decides what stored bytes mean.

Two engines may exchange chunks only if their facts agree to the last byte. Facts are resolved
values (the dtype the worker really uses, not ``"auto"``), given as text. Connectors collect them by
exclusion: each field of an engine's configuration is a fact, unless it is known to change no byte
of the KV cache (:mod:`kvoffload.connectors.configuration`).
"""

import hashlib
from collections.abc import Mapping

_VERSION = b"kvoffload-namespace-v1"
Fact = str | int | bool | bytes | None

LABEL = "label."
"""How the name of a fact begins that is kept for people, and is no part of the digest."""
_SHORT_DIGITS = 16


def namespace(**facts: Fact) -> str:
    """Digest facts into a namespace: 64 hex digits, the same in every process and language.

    Labels are left out; see :data:`LABEL`.

    Each fact becomes ``name, type, value``, each preceded by its length, in the order of the names.
    So no two different sets of facts spell the same bytes. Nothing is shortened.

    Raises:
        TypeError: a fact is not a str, int, bool, bytes or None: anything else has no one spelling.
    """
    digest = hashlib.sha256(_framed(_VERSION))
    for name in sorted(facts):
        if name.startswith(LABEL):
            continue
        kind, value = _spell(name, facts[name])
        digest.update(_framed(name.encode()) + _framed(kind) + _framed(value))
    return digest.hexdigest()


def readable(facts: Mapping[str, Fact]) -> dict[str, str]:
    """Return facts as text, stored with the data so that people can see what a digest means."""
    return {
        name: value.hex() if isinstance(value, bytes) else str(value)
        for name, value in sorted(facts.items())
    }


def short(namespace: str) -> str:
    """Return the digits by which logs, ``inspect`` and metrics name a namespace."""
    return namespace[:_SHORT_DIGITS]


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _spell(name: str, value: Fact) -> tuple[bytes, bytes]:
    if value is None:
        return b"none", b""
    if isinstance(value, bool):
        return b"bool", b"1" if value else b"0"
    if isinstance(value, int):
        return b"int", str(value).encode()
    if isinstance(value, str):
        return b"str", value.encode()
    if isinstance(value, bytes):
        return b"bytes", value
    raise TypeError(f"fact {name} = {value!r}: must be str, int, bool, bytes or None")
