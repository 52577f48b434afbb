"""Exceptions. Only misuse and bad configuration raise; a broken store is a miss, never an error."""

import re
from collections.abc import Mapping

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*")
_VARIABLE = re.compile(r"[A-Z_0-9]*")
_PATH = re.compile(r"(~|\.{0,2}/).*|.{0,31}", re.DOTALL)
_SECRETS = ("password", "passwd", "secret", "token", "key", "username", "sentinel_username")
HIDDEN = "***"
"""What stands for something that must not be shown."""


def shown(value: object, field: str = "") -> object:
    """Redact a setting for error messages: keep a URL's scheme, hide passwords and user names.

    A URL has secrets in too many places to tell them from the rest. In a wrong URL, half of a
    password with a ``/`` is a path. Containers are redacted item by item.

    Args:
        value: anything; what needs no hiding comes back as it is.
        field: the name it was given under.
    """
    name = field.rpartition(".")[2].lower()
    if name in _SECRETS:
        return value if value is None else HIDDEN
    if field.endswith("_env") and isinstance(value, str):
        return value if _VARIABLE.fullmatch(value) else HIDDEN  # perhaps the password itself
    if field.endswith("_file") and isinstance(value, str) and not _PATH.fullmatch(value):
        return HIDDEN  # perhaps the key itself
    if isinstance(value, bytes):
        text = value.decode("latin-1")
        return value if shown(text) == text else HIDDEN.encode()
    if isinstance(value, str):
        scheme, mark, _ = value.partition("://")
        if mark:
            return f"{scheme}{mark}{HIDDEN}" if _SCHEME.fullmatch(scheme) else HIDDEN
        return HIDDEN if name == "url" or ":" in value.rpartition("@")[0] else value
    if isinstance(value, Mapping):
        return {shown(key): shown(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    return value


class KVOffloadError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A setting is wrong: names the field, the value and what would be right.

    Raised at start, before anything is touched. No part of the error has what :func:`shown` hides
    of the value; a remedy must not quote it either.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = str(shown(field))
        self.value = shown(value, field) if self.field == field else HIDDEN
        self.remedy = remedy
        super().__init__(f"{self.field} = {self.value!r}: {remedy}")


def check_setting(settings: object, name: str, is_right: object, remedy: str) -> None:
    """Raise ConfigError, with the setting's value, unless it is right."""
    if not is_right:
        raise ConfigError(name, getattr(settings, name), remedy)


class KVCacheSpecError(KVOffloadError, ValueError):
    """KV cache formats that cannot be what they claim, or cannot share a group."""


class InsufficientMemoryError(KVOffloadError, ValueError):
    """The memory given cannot hold what was asked for; the message says how much would do."""


class UsageError(KVOffloadError, RuntimeError):
    """The caller broke a contract (completed a load never prepared, freed a request twice...)."""
