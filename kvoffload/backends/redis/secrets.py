"""Passwords and keys from files and the environment: reading them, and what is weak about them.

No text made here has any part of a secret.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvoffload.errors import ConfigError

MIN_SECRET_BYTES = 32
MIN_PASSWORD_CHARS = 16
_MIN_DISTINCT = 8
"""Different bytes; random ones repeat less, written in hexadecimal, too."""


class Weakness(NamedTuple):
    """Something that makes a secret less of one, with its remedy."""

    problem: str
    remedy: str


def read_file(field: str, path: str) -> bytes:
    """Read a file that a setting names.

    Raises:
        ConfigError: it cannot be read; the error names the setting.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read: {error.strerror}") from error


def read_password(name: str, variable: str, file: str) -> str:
    """Read a password from an environment variable or a file; empty if neither is named.

    Args:
        name: of the settings, without ``_env`` and ``_file``.
        variable: the environment variable; goes before the file.
        file: its path.

    Raises:
        ConfigError: what is named is not there, is empty, or is no text.
    """
    if variable:
        if not os.environ.get(variable):
            state = "empty" if variable in os.environ else "not set"
            raise ConfigError(f"{name}_env", variable, f"this environment variable is {state}")
        return os.environ[variable]
    if not file:
        return ""
    try:
        password = read_file(f"{name}_file", file).decode().strip("\r\n")
    except UnicodeDecodeError:
        password = None  # raised outside of here: that error carries the password
    if password is None:
        raise ConfigError(f"{name}_file", file, "must hold the password as text, and is not UTF-8")
    if not password:
        raise ConfigError(f"{name}_file", file, "is empty: write the password into it")
    return password


def value_key(file: str) -> bytes | None:
    """Derive the key that authenticates values from ``secret_file``; None if there is none.

    Raises:
        ConfigError: the file is missing, too short or too regular, or the ``blake3`` extra is
            not installed.
    """
    if not file:
        return None
    secret = read_file("secret_file", file).strip()
    remedy = "write random bytes into it: openssl rand -hex 32"
    if len(secret) < MIN_SECRET_BYTES:
        problem = f"needs at least {MIN_SECRET_BYTES} bytes of secret"
        raise ConfigError("secret_file", file, f"{problem}; {remedy}")
    if len(set(secret)) < _MIN_DISTINCT:
        raise ConfigError(
            "secret_file", file, f"has few different bytes and can be guessed; {remedy}"
        )
    try:
        import blake3
    except ImportError:
        raise ConfigError(
            "secret_file", file, "needs its extra: pip install 'kvoffload[blake3]'"
        ) from None
    derived: bytes = blake3.blake3(secret, derive_key_context="kvoffload redis values v1").digest()
    return derived


def weak_password(name: str, password: str) -> list[Weakness]:
    """Say whether a password is short or regular enough to be guessed."""
    if not password or (
        len(password) >= MIN_PASSWORD_CHARS and len(set(password)) >= _MIN_DISTINCT
    ):
        return []
    problem = f"the {name} is shorter than {MIN_PASSWORD_CHARS} characters, or repeats few of them"
    return [Weakness(problem, "use a random one: ACL GENPASS, or openssl rand -hex 32")]


def exposed_files(files: Mapping[str, str]) -> list[Weakness]:
    """Say which files other users of this machine may read or write.

    Args:
        files: paths by the settings that name them; empty paths are left out.
    """
    found = []
    for field, path in files.items():
        try:
            mode = stat.S_IMODE(Path(path).stat().st_mode) if path else 0
        except OSError:
            continue  # whoever reads it says so
        if mode & 0o077:
            problem = f"{field} = {path!r}: its mode {mode:04o} lets other users at the secret"
            found.append(Weakness(problem, f"chmod 600 {path}"))
    return found
