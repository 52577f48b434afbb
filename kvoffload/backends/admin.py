"""The optional protocol behind the commands ``inspect``, ``gc``, ``verify`` and ``doctor``.

A command opens a store by its type, and calls the method of its name here. A class that inherits
:class:`Admin` defines what its store can do; a command whose method it leaves out is refused.

A store that can be examined without opening it, as a folder can, says so by a class attribute
``admin``: a callable that takes the options as they were given, and returns an :class:`Admin`.
"""

import mmap
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from kvoffload.backends.base import Backend
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

MEASURED_BYTES = 2 << 20
"""Size of a chunk with which ``doctor`` measures."""
SLOW_BYTES_PER_S = 200e6
"""Recomputation may be faster than a slower store."""
MEASURED_CHUNKS = 16
LEAST_DIGITS = 8
"""Least length of the beginning of a namespace's name that ``gc`` accepts."""
_DIGEST_DIGITS = 32
"""A name of so many hexadecimal digits, or more, is a digest."""


class Holding(NamedTuple):
    """The chunks of one namespace in a store."""

    namespace: str
    facts: Mapping[str, Any]
    """The facts that the namespace is a digest of, as far as they are stored with the data."""
    chunks: int
    stored_bytes: int
    """Bytes of its values or files, headers included."""
    expires_s: float | None = None
    """Seconds until its last chunk expires if none is used; None: some never do, or unknown."""
    used_s: float | None = None
    """Seconds since a chunk was last used; None: unknown."""
    figures: Mapping[str, Any] | None = None
    """The figures for ``inspect --json``; None: those above."""
    details: Sequence[str] = ()
    """Further lines for ``inspect -v``."""


class Overview(NamedTuple):
    """The state of a whole store."""

    figures: Mapping[str, Any]
    """For ``inspect --json``."""
    lines: Sequence[tuple[str, str]] = ()
    """For people: a title and its text, one pair a line."""
    times: Literal["expires in", "last used"] = "expires in"
    """Which time of a :class:`Holding` the table shows."""


class Aged(NamedTuple):
    """The chunks of a removal by age."""

    chunks: int
    """Removed, or in a dry run to be removed."""
    stored_bytes: int
    undated: int
    """Chunks that stay because their last use is unknown."""


class Garbage(NamedTuple):
    """What ``gc`` is asked to remove."""

    namespace: str | None = None
    """Only chunks of this one: its name, or the beginning of it."""
    unused_s: float | None = None
    """Only chunks that were not used for so long."""
    dry_run: bool = False
    """Remove nothing; report what would be removed."""


class Collected(NamedTuple):
    """What ``gc`` removed, or in a dry run would remove."""

    summary: str
    """For people, without the verb: ``3 chunks, 1.2 MiB``."""
    figures: Mapping[str, Any]
    """For ``--json``."""
    going: Sequence[str] = ()
    """Each removed thing, for the report of a dry run."""
    failures: Sequence[str] = ()
    """Each thing that could not be removed, and why."""


class Verified(NamedTuple):
    """What ``verify`` read, and what was wrong with it."""

    lines: Sequence[str]
    """For people."""
    figures: Mapping[str, Any]
    """For ``--json``."""
    is_sound: bool
    """Whether nothing was wrong."""


Verdict = Literal["ok", "warning", "failed"]


class Finding(NamedTuple):
    """The result of one check of ``doctor``."""

    check: str
    """``reachable``, ``policy``, ``rights``..."""
    verdict: Verdict
    detail: str
    """What was found, with figures."""
    remedy: str = ""
    """What to do about it; empty where nothing needs doing."""


@runtime_checkable
class Admin(Protocol):
    """Optional: examines a whole store and removes parts of it. Methods may take long.

    Raises:
        OSError: the store cannot be reached, or refuses.
        ConfigError: the store cannot do what is asked.
    """

    async def survey(self) -> list[Holding]:
        """Return the chunks of every namespace; for ``inspect``."""
        raise _missing(self, "inspect")

    async def overview(self, held: Sequence[Holding]) -> Overview:
        """Return the state of the store, which holds ``held``; for ``inspect``."""
        return Overview({"servers": []})

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove all chunks and facts of these namespaces; return how many values were removed."""
        return 0

    async def purge_unused(self, age_s: float, namespace: str | None, *, dry_run: bool) -> Aged:
        """Remove the chunks not used for so long, of one namespace or of all."""
        raise ConfigError("older-than", f"{age_s:g} s", "this store removes nothing by age")

    async def collect(self, wanted: Garbage) -> Collected:
        """Remove garbage; for ``gc``. By default by :meth:`purge` and :meth:`purge_unused`."""
        meant = None
        if wanted.namespace is not None:
            if wanted.unused_s is None and type(self).purge is Admin.purge:
                raise ConfigError("namespace", wanted.namespace, "this store removes no namespaces")
            held = {each.namespace: each for each in await self.survey()}
            meant = held[named(wanted.namespace, held)]
        if wanted.unused_s is not None:
            name = meant and meant.namespace
            found = await self.purge_unused(wanted.unused_s, name, dry_run=wanted.dry_run)
        elif meant is not None:
            found = Aged(meant.chunks, meant.stored_bytes, 0)
            if not wanted.dry_run:
                await self.purge([meant.namespace])
        else:
            remedy = "name one, or give --older-than; chunks that are not used expire by themselves"
            raise ConfigError("namespace", None, remedy)
        summary = f"{counted(found.chunks, 'chunk')}, {human_bytes(found.stored_bytes)}"
        if found.undated:
            summary += (
                f"; {found.undated} chunks stay: they live longer than ttl_s, so their age is "
                "unknown; give the ttl_s of the engines with -o"
            )
        figures = {
            "dry_run": wanted.dry_run,
            "removed": found.chunks,
            "freed_bytes": found.stored_bytes,
            "undated": found.undated,
        }
        return Collected(summary, figures)

    async def verify(
        self,
        *,
        repair: bool,
        share: float | None,
        bytes_per_s: int | None,
        progress: Callable[[int, int], None],
    ) -> Verified:
        """Read and check every chunk; for ``verify``.

        Args:
            repair: remove damaged chunks.
            share: the part of the chunks to read, at random; None: all.
            bytes_per_s: the most to read on average; None: no limit.
            progress: called with the bytes done and the bytes to do, on any thread.
        """
        raise _missing(self, "verify")

    async def diagnose(self) -> list[Finding]:
        """Check whether the store is fit to be a tier; for ``doctor``."""
        raise _missing(self, "doctor")

    async def close(self) -> None:
        """Release all resources."""


METHODS: Mapping[str, Sequence[str]] = {
    "inspect": ("survey",),
    "gc": ("collect", "purge", "purge_unused"),
    "verify": ("verify",),
    "doctor": ("diagnose",),
}
"""The methods of a command: a store offers the command if it defines one of them."""


def offers(store: type, command: str) -> bool:
    """Return whether a class defines what a command calls, beyond the defaults of Admin."""
    own = (getattr(store, name, None) for name in METHODS[command])
    defaults = [None, *(getattr(Admin, name) for name in METHODS[command])]
    return issubclass(store, Admin) and any(method not in defaults for method in own)


def is_digest(name: str) -> bool:
    """Return whether a namespace's name is a digest of facts, not a name that people give."""
    return len(name) >= _DIGEST_DIGITS and not set(name) - set("0123456789abcdef")


def counted(number: int, noun: str) -> str:
    """Write a number of things: ``counted(1, "chunk") == "1 chunk"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Write seconds for people: ``duration(5400) == "1.5 h"``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def named(wanted: str, names: Iterable[str], field: str = "namespace") -> str:
    """Return the namespace meant by a name or its beginning, as ``inspect`` shows it.

    Args:
        wanted: the name, or the beginning of it.
        names: all that there are.
        field: the option that has it, for the error.

    Raises:
        ConfigError: there is none, or more than one, or the beginning is too short.
    """
    known = set(names)
    if wanted in known:
        return wanted
    fits = [name for name in known if name.startswith(wanted)]
    if len(fits) == 1 and len(wanted) >= LEAST_DIGITS:
        return fits[0]
    if len(fits) > 1:
        problem = f"{len(fits)} namespaces begin like that; inspect --json has their whole names"
    elif fits:
        problem = f"the beginning of a name must have {LEAST_DIGITS} digits or more"
    else:
        problem = "there is no such namespace here; inspect lists them"
    raise ConfigError(field, wanted, problem)


async def measure(backend: Backend) -> list[tuple[int, float]]:
    """Measure stores and loads of some chunks, and remove them.

    Returns:
        For the stores and for the loads: how many failed, and the bytes a second.
    """
    keys = [secrets.token_bytes(36) for _ in range(MEASURED_CHUNKS)]
    # Each chunk in pages of its own, as direct I/O needs it.
    slots = [memoryview(mmap.mmap(-1, MEASURED_BYTES)) for _ in keys]
    for slot in slots:  # what no file system can compress
        slot[:] = secrets.token_bytes(MEASURED_BYTES)
    measured = []
    try:
        await backend.contains(keys)  # connects
        for call in (backend.write, backend.read):
            began = time.perf_counter()
            good = sum(map(bool, await call(keys, slots)))
            seconds = time.perf_counter() - began
            measured.append((len(keys) - good, good * MEASURED_BYTES / seconds))
        return measured
    finally:
        await backend.remove(keys)


def _missing(store: object, command: str) -> ConfigError:
    return ConfigError("type", type(store).__name__, f"this backend does not offer {command}")
