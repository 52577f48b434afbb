"""Exceptions. Only misuse and bad configuration raise; a broken store is a miss, never an error."""


class KVOffloadError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A setting is wrong: names the field, the value and what would be right.

    Raised at start, before anything is touched.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field} = {value!r}: {remedy}")


class KVCacheSpecError(KVOffloadError, ValueError):
    """KV cache formats that cannot be what they claim, or cannot share a group."""


class InsufficientMemoryError(KVOffloadError, ValueError):
    """The memory given cannot hold what was asked for; the message says how much would do."""


class UsageError(KVOffloadError, RuntimeError):
    """The caller broke a contract (completed a load never prepared, freed a request twice...)."""
