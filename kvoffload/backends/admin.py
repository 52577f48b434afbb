"""The optional protocols behind the commands ``inspect``, ``gc``, ``verify`` and ``doctor``.

Each protocol is one method. A command opens a store by its type, and calls the method of its
protocol in :data:`COMMANDS`. A store without the method does not offer the command.

A store that can be examined without opening it, as a folder can, says so by a class attribute
``admin``: a callable that takes the options as they were given. It returns an object with these
methods and ``close()``.
"""

import asyncio
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from kvoffload.backends.base import Backend
from kvoffload.backends.blocking_pool import begin_once, run_once
from kvoffload.backends.seals import Seal
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

MEASURED_BYTES = 2 << 20
"""Size of a chunk with which ``doctor`` measures."""
SLOW_BYTES_PER_S = 200e6
"""Recomputation may be faster than a slower store."""
MEASURED_CHUNKS = 16
LEAST_DIGITS = 8
"""Least length of the beginning of a namespace's name that ``gc`` accepts."""
HUNG_S = 30.0
"""Longer than each step of ``doctor`` takes on a device or a mount that is fit to be a tier."""
_DIGEST_DIGITS = 32
"""A name of so many hexadecimal digits, or more, is a digest."""
T = TypeVar("T")


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


class Survey(NamedTuple):
    """The state of a whole store; for ``inspect`` and ``top``."""

    held: Sequence[Holding]
    """One entry a namespace."""
    figures: Mapping[str, Any] = MappingProxyType({"servers": []})
    """The figures of the store for ``inspect --json``, without the namespaces."""
    lines: Sequence[tuple[str, str]] = ()
    """For people: a title and its text, one pair a line."""
    times: Literal["expires in", "last used"] = "expires in"
    """Which time of a :class:`Holding` the table shows."""


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
    """What could not be removed, and why: a line for each reason is enough."""

    @classmethod
    def of_chunks(
        cls, chunks: int, stored_bytes: int, wanted: Garbage, why: str = "", **more: int
    ) -> "Collected":
        """Return the removal of chunks alone; ``why`` some stay, and further figures."""
        figures = {"dry_run": wanted.dry_run, "removed": chunks, "freed_bytes": stored_bytes}
        if unknown := more.get("unknown"):
            why = f"; of {counted(unknown, 'further chunk')} it is not known whose they are"
        summary = f"{counted(chunks, 'chunk')}, {human_bytes(stored_bytes)}{why}"
        return cls(summary, figures | more)


class Check(NamedTuple):
    """What ``verify`` is asked to read."""

    repair: bool = False
    """Remove damaged chunks."""
    share: float | None = None
    """The part of the chunks to read, at random; None: all."""
    bytes_per_s: int | None = None
    """The most to read on average; None: no limit."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the bytes done and the bytes to do, on any thread."""


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


# ---- what a store may offer ------------------------------------------------------------------
# Methods may take long. They raise OSError if the store cannot be reached or refuses, and
# ConfigError if it cannot do what is asked.


@runtime_checkable
class Surveys(Protocol):
    """Optional: for ``inspect``, and ``top`` of a store."""

    async def survey(self) -> Survey:
        """Return the chunks of every namespace, and the state of the store."""
        ...


@runtime_checkable
class Collects(Protocol):
    """Optional: for ``gc``."""

    async def collect(self, wanted: Garbage) -> Collected:
        """Remove garbage."""
        ...


@runtime_checkable
class Erases(Protocol):
    """Optional: for ``gc --tenant``."""

    async def erase(self, tenant: bytes, wanted: Garbage) -> Collected:
        """Remove the chunks of a tenant, which ``write`` got with them, if ``wanted`` fits.

        Without an age or a namespace, all of them. The figures have ``unknown``: how many chunks do
        not tell whose they are, and stay.
        """
        ...


@runtime_checkable
class Verifies(Protocol):
    """Optional: for ``verify``; :mod:`kvoffload.backends.verification` helps."""

    async def verify(self, wanted: Check) -> Verified:
        """Read and check chunks."""
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """Optional: for ``doctor``."""

    async def diagnose(self) -> list[Finding]:
        """Check whether the store is fit to be a tier."""
        ...


@runtime_checkable
class Purges(Protocol):
    """Optional: for ``cache clear`` and SGLang's ``clear``, which fail without it."""

    async def purge(self, namespaces: Sequence[str]) -> int:
        """Remove all chunks and facts of these namespaces; return how many values were removed."""
        ...


COMMANDS: Mapping[str, type] = {
    "inspect": Surveys,
    "gc": Collects,
    "verify": Verifies,
    "doctor": Diagnoses,
}
"""The protocol of each command."""


class Command:
    """One command of an operator, at work on a thread; another thread may end it.

    Args:
        cipher: decrypts the engines' chunks, if they are encrypted.
    """

    def __init__(self, cipher: Seal | None = None) -> None:
        self.cipher = cipher
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """End the command soon: its next step raises OSError."""
        self._is_cancelled.set()

    def pause(self, seconds: float = 0.0) -> None:
        """Wait; raises OSError once cancelled."""
        if self._is_cancelled.wait(seconds) if seconds else self._is_cancelled.is_set():
            raise ConnectionError("cancelled")

    async def run(self, work: Callable[..., T], *given: Any) -> T:
        """Do ``work(self, *given)`` on its own thread, which ends soon after a cancellation."""
        try:
            return await run_once(work, self, *given)
        finally:
            self.cancel()


async def answered(path: str, work: Callable[..., T], *given: Any, extra_s: float = 0) -> T:
    """Do a step of ``doctor`` on a thread of its own, which a path that hangs keeps for ever.

    Raises:
        TimeoutError: it has not ended in :data:`HUNG_S` and what it may need more; see
            :func:`hung`.
    """
    within_s = HUNG_S + extra_s
    begun = asyncio.wrap_future(begin_once(work, *given))
    try:
        await asyncio.wait([begun], timeout=within_s)
    except asyncio.CancelledError:  # the step removes what it has made
        await asyncio.wait([begun], timeout=within_s)
        raise
    if not begun.done():
        raise TimeoutError(f"{path} has not answered for {within_s:.0f} s")
    return begun.result()


def hung(error: TimeoutError) -> Finding:
    """Return the finding of a device or a mount that hangs."""
    remedy = "see the kernel's log, and the server of a mount; engines go on without what hangs"
    return Finding("reachable", "failed", str(error), remedy)


def first_of(check: str, *rows: tuple[object, Verdict, str, str]) -> Finding:
    """Return the finding of the first row that applies.

    Args:
        check: its name.
        rows: whether the row applies, verdict, detail and remedy.
    """
    return next(Finding(check, *row[1:]) for row in rows if row[0])


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


async def measure(backend: Backend, chunks: int = MEASURED_CHUNKS) -> list[tuple[int, float]]:
    """Measure stores and loads of some chunks, and remove them.

    Returns:
        For the stores and for the loads: how many failed, and the bytes a second.
    """
    keys = [secrets.token_bytes(36) for _ in range(chunks)]
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


async def throughput(
    backend: Backend, examined: Sequence[Finding], if_failed: str, if_slow: str
) -> list[Finding]:
    """Add what :func:`measure` finds, with a store's own remedies, unless a check failed."""
    findings = list(examined)
    if any(finding.verdict == "failed" for finding in examined):
        return findings
    for what, (failed, per_s) in zip(("store", "load"), await measure(backend), strict=True):
        detail = f"{what}: {human_bytes(per_s)}/s with chunks of {human_bytes(MEASURED_BYTES)}"
        failure = f"{failed} of {MEASURED_CHUNKS} chunks failed; {detail}"
        finding = first_of(
            "throughput",
            (failed, "failed", failure, if_failed),
            (per_s < SLOW_BYTES_PER_S, "warning", detail, if_slow),
            (True, "ok", detail, ""),
        )
        findings.append(finding)
    return findings
