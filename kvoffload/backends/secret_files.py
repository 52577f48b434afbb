"""Secrets of a tier's settings, from files and environment variables.

No error made here contains any part of a secret.
"""

import os
import stat
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError

MIN_SECRET_BYTES = 32
_MIN_DISTINCT = 8
"""Distinct bytes of a secret; even hexadecimal random bytes have more."""


def read_file(field: str, path: str) -> bytes:
    """Return the content of the file that a setting names; raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read: {error.strerror}") from error


def read_text(options: Any, name: str, ends: str | None = None) -> str:
    """Return a secret from its environment variable, else from its file; empty without both.

    Args:
        options: have the fields ``<name>_env`` and ``<name>_file``.
        name: of the secret.
        ends: characters to strip from its ends; None: white space.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    variable, file = getattr(options, f"{name}_env"), getattr(options, f"{name}_file")
    if variable:
        if secret := os.environ.get(variable, "").strip(ends):
            return secret
        state = "empty" if variable in os.environ else "not set"
        raise ConfigError(f"{name}_env", variable, f"this environment variable is {state}")
    if not file:
        return ""
    content = read_file(f"{name}_file", file)
    secret = content.decode(errors="replace").strip(ends)  # a decode error would contain it
    if "\ufffd" in secret:
        raise ConfigError(f"{name}_file", file, "must hold the secret as text, and is not UTF-8")
    if not secret:
        raise ConfigError(f"{name}_file", file, "is empty: write the secret into it")
    return secret


def read_key(path: str, context: str) -> bytes | None:
    """Derive a key of 32 bytes, for one use, from a ``secret_file``; None without a file.

    Raises:
        ConfigError: the file cannot be read, or its content can be guessed.
    """
    if not path:
        return None
    secret = read_file("secret_file", path).strip()
    if is_guessable(secret, MIN_SECRET_BYTES):
        remedy = f"needs at least {MIN_SECRET_BYTES} random bytes: openssl rand -hex 32"
        raise ConfigError("secret_file", path, remedy)
    return derived(secret, context)


def derived(secret: bytes, context: str) -> bytes:
    """Return 32 bytes for one use of a secret, which reveal nothing of it."""
    import blake3

    digest: bytes = blake3.blake3(secret, derive_key_context=context).digest()
    return digest


def refuse_with_encryption(secret_file: str) -> None:
    """Refuse a secret together with ``encryption``; raises ConfigError."""
    if secret_file:
        remedy = "encrypted chunks are authenticated by their key: leave this out"
        raise ConfigError("secret_file", secret_file, remedy)


def is_guessable(secret: bytes | str, min_length: int) -> bool:
    """Return whether a secret is short, or has few distinct characters."""
    return len(secret) < min_length or len(set(secret)) < _MIN_DISTINCT


def exposure(field: str, path: str) -> list[tuple[str, str]]:
    """Return a weakness and its remedy if other users of this machine may read or write a file."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode) if path else 0
    except OSError:
        return []  # the code that reads the file reports it
    if not mode & 0o077:
        return []
    problem = f"{field} = {path!r}: its mode {mode:04o} opens the secret to other users"
    return [(problem, f"chmod 600 {path}")]
