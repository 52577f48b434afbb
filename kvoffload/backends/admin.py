"""Optional protocols for operators: look at a whole store, empty a part of it, find what is wrong.

The command line (``inspect``, ``gc``, ``doctor``) opens a backend by its name like everybody else
and asks for these.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable


class Holding(NamedTuple):
    """What a store holds of one namespace."""

    namespace: str
    facts: Mapping[str, str]
    """What the namespace is a digest of, as far as it was stored beside the data."""
    chunks: int
    stored_bytes: int
    """Bytes of its values or files, headers included."""
    expires_s: float | None = None
    """Seconds until its last chunk expires if none is used; None: some never do, or unknown."""


@runtime_checkable
class Surveys(Protocol):
    """Optional: says what the store holds, of all namespaces."""

    async def survey(self) -> list[Holding]:
        """Look at everything, in small steps; may take long.

        Raises:
            OSError: the store cannot be reached, or refuses to be looked at.
        """
        ...


class ServerTotal(NamedTuple):
    """How full one server is, with all that it holds."""

    server: str
    used_bytes: int
    limit_bytes: int | None
    """None: it has no limit of its own."""


@runtime_checkable
class TellsTotals(Protocol):
    """Optional: says how full the servers of the store are, without a look at what they hold."""

    async def totals(self) -> list[ServerTotal]:
        """Ask each server; one that does not tell is left out.

        Raises:
            OSError: a server cannot be reached.
        """
        ...


@runtime_checkable
class Purges(Protocol):
    """Optional: removes whole namespaces."""

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove all chunks and facts of these namespaces, in small steps; return how many values.

        Raises:
            OSError: the store cannot be reached, or refuses.
        """
        ...


class Aged(NamedTuple):
    """What a removal by age came to."""

    chunks: int
    """Removed, or in a dry run to be removed."""
    stored_bytes: int
    undated: int
    """Chunks that stay because the store does not tell when they were last used."""


@runtime_checkable
class PurgesByAge(Protocol):
    """Optional: removes chunks that nothing has used for some time."""

    async def purge_unused(self, age_s: float, namespace: str | None, *, dry_run: bool) -> Aged:
        """Remove what was not used for so long, of one namespace or of all, in small steps.

        Raises:
            ConfigError: the store cannot tell such an age.
            OSError: the store cannot be reached, or refuses.
        """
        ...


class Finding(NamedTuple):
    """One thing looked into."""

    check: str
    """``reachable``, ``policy``, ``rights``..."""
    verdict: Literal["ok", "warning", "failed"]
    detail: str
    """What was found, with figures."""
    remedy: str = ""
    """What to do about it; empty where nothing needs doing."""


@runtime_checkable
class Diagnoses(Protocol):
    """Optional: examines its store and says what an operator should change."""

    async def diagnose(self) -> list[Finding]:
        """Look into everything that matters, each as one finding; never raises."""
        ...
