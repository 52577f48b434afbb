"""The setting ``encryption`` of a tier: where its keys are, and which files are refused.

No error, log line or repr made here contains any part of a key.
"""

import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvoffload.config import convert
from kvoffload.errors import HIDDEN, ConfigError
from kvoffload.extras import check_extra

if TYPE_CHECKING:
    from kvoffload.backends.encryption import CipherSeal

ENCRYPTION = "encryption"
"""The name of the setting, next to the options of any tier that can encrypt."""
MIN_KEY_CHARS = 32
MOST_KEYS = 16
_MOST_BYTES = 64 << 10
_MIN_DISTINCT = 8
"""Distinct characters of a key; even hexadecimal random bytes have more."""
_OPEN_TO_OTHERS = 0o027
"""Rights that a key's file must not give: a group may read it, as a pod's group does."""
_RANDOM = "write a random one: openssl rand -hex 32"


class Encryption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the keys of a tier's chunks are; ``docs/guides/encryption.md`` has the whole."""

    key_file: str = ""
    """File with a key a line, each of 32 characters or more, as ``openssl rand -hex 32`` prints.
    The first key encrypts; chunks under any of them are read. Only the engine's user may read
    the file, or a group that may not write it."""
    key_env: str = ""
    """Environment variable with the same lines, in place of ``key_file``."""

    def __post_init__(self) -> None:
        if bool(self.key_file) == bool(self.key_env):
            raise ConfigError("key_file", self.key_file, "name a file of keys, or key_env instead")

    def seal(self, where: str = "") -> "CipherSeal":
        """Read the keys; return what encrypts with them.

        Args:
            where: prefix of field names in errors.

        Raises:
            ConfigError: a file or a key cannot be used, or the extra ``encryption`` is missing.
        """
        given = {"key_file": self.key_file} if self.key_file else {"key_env": self.key_env}
        check_extra(ENCRYPTION, given, where)
        from kvoffload.backends.encryption import CipherSeal

        return CipherSeal(_keys(self, f"{where}{ENCRYPTION}."))


def read_encryption(options: Mapping[str, Any], where: str = "") -> "CipherSeal | None":
    """Return what encrypts a tier's chunks by its options; None: they are stored as they are.

    Raises:
        ConfigError: see :meth:`Encryption.seal`; or the setting is wrong.
    """
    given = options.get(ENCRYPTION)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        remedy = 'must be an object: {"key_file": "/run/secrets/kvoffload"}'
        raise ConfigError(f"{where}{ENCRYPTION}", HIDDEN, remedy)
    return convert(given, Encryption, f"{where}{ENCRYPTION}.").seal(where)


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier's options without this setting: those of the backend itself."""
    return {name: value for name, value in options.items() if name != ENCRYPTION}


def _keys(settings: Encryption, where: str) -> list[bytes]:
    """Return the keys, the first one first; raises ConfigError."""
    name = "key_file" if settings.key_file else "key_env"
    value = settings.key_file or settings.key_env
    field = f"{where}{name}"
    content = _file(field, value) if settings.key_file else _variable(field, value)
    lines = [line.strip() for line in content.splitlines()]
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line and not line.startswith(b"#")]
    if not numbered:
        raise ConfigError(field, value, f"has no key; {_RANDOM}")
    if len(numbered) > MOST_KEYS:
        raise ConfigError(field, value, f"has {len(numbered)} keys: at most {MOST_KEYS} may stay")
    for i, line in numbered:
        if len(line) < MIN_KEY_CHARS:
            least = f"a key has {MIN_KEY_CHARS} characters or more"
            raise ConfigError(field, value, f"line {i} has {len(line)}; {least}; {_RANDOM}")
        if len(set(line)) < _MIN_DISTINCT:
            raise ConfigError(field, value, f"line {i} has few distinct characters; {_RANDOM}")
        if not all(0x20 < each < 0x7F for each in line):
            raise ConfigError(field, value, f"line {i} is no text of printable characters")
    return [line for _, line in numbered]


def _variable(field: str, name: str) -> bytes:
    content = os.environ.get(name)
    if content is None:
        raise ConfigError(field, name, "this environment variable is not set")
    return os.fsencode(content)


def _file(field: str, path: str) -> bytes:
    """Read a file that no other user can read or change; raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hang
    except (OSError, ValueError) as error:
        raise ConfigError(field, path, f"cannot be read: {_words(error)}") from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(field, path, "must be a file")
        if facts.st_uid not in (os.geteuid(), 0):
            remedy = "chown it to the engine's user"
            raise ConfigError(field, path, f"belongs to user {facts.st_uid}; {remedy}")
        mode = stat.S_IMODE(facts.st_mode)
        if mode & _OPEN_TO_OTHERS:
            problem = f"its mode {mode:04o} opens it to other users"
            raise ConfigError(field, path, f"{problem}; chmod 600 {path}")
        content = os.read(fd, _MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read: {_words(error)}") from error
    finally:
        os.close(fd)
    if len(content) > _MOST_BYTES:
        raise ConfigError(field, path, f"has more than {_MOST_BYTES} bytes: is it the right file?")
    return content


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or "not the name of a file"
