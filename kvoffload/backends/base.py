"""What a backend is: a key-addressed store of whole chunks, below host memory.

A backend is one class: an ``Options`` struct, a constructor ``(options, namespace)`` and the five
coroutines of :class:`Backend`. Register it in the ``kvoffload.backends`` entry-point group, and
inherit :class:`kvoffload.testing.BackendSuite` in a short test class.

Small optional protocols sit beside it (:class:`Presence`, :class:`Describes`...); a backend that
has one simply defines its methods. There are no capability flags.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Backend(Protocol):
    """Key-addressed storage below host memory.

    Batch in, one answer per key out, in the order asked.
    All coroutines run on the I/O loop (``kvoffload-io``) and must not block it. The caller owns the
    memory it passes and keeps it untouched until the call returns; a backend keeps no reference
    afterwards. A call that is *cancelled* must not return before nothing of it reads or writes that
    memory any more (await the thread that does, shielded). A missing, damaged or foreign chunk, a
    full store and a lost connection are all ``False``; only misuse (lengths that differ) raises.
    """

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether a read would probably find it."""
        ...

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Fill ``into[i]`` (writable, contiguous bytes) with the chunk stored under ``keys[i]``.

        True means: exactly the bytes written under that key in this namespace, all
        ``len(into[i])`` of them, verified. After False the content of ``into[i]`` is undefined.
        """
        ...

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> list[bool]:
        """Store each chunk whole or not at all; True means it can be read back from now on.

        Equal keys mean equal bytes: a key already stored may be left as it is (True).
        """
        ...

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys; unknown ones are ignored."""
        ...

    async def close(self) -> None:
        """Release everything held. Idempotent; afterwards every call answers False."""
        ...


class BackendFactory(Protocol):
    """How a registered backend class is opened: ``cls(cls.Options(...), namespace)``.

    The constructor may touch the disk or open sockets lazily, must return quickly, and raises
    :class:`~kvoffload.errors.ConfigError` for settings that cannot work.
    """

    Options: Any

    def __call__(self, options: Any, namespace: str) -> Backend:
        """Open the backend for one namespace."""
        ...


@runtime_checkable
class Presence(Protocol):
    """Optional: answers "is this chunk here?" at once, on the engine's thread, without I/O."""

    def holds(self, key: bytes) -> bool | None:
        """True, False, or None for "ask again", which never lasts beyond the lookup deadline."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """A load of these keys just failed: answer False for them until they are written again."""
        ...


class Removal(NamedTuple):
    """A chunk left a backend by the backend's own decision."""

    key: bytes
    reason: str
    """``evicted``, ``expired``, ``corrupt``, ``purged``..."""


@runtime_checkable
class ReportsRemovals(Protocol):
    """Optional: a backend that evicts says what left, so that events stay true."""

    def take_removals(self) -> list[Removal]:
        """Return what left since the last call; called on the engine's thread, never blocks."""
        ...


class Usage(NamedTuple):
    """How full a store is, in bytes; ``capacity_bytes`` is None where the store sets the limit."""

    resident_bytes: int
    capacity_bytes: int | None
    chunks: int


@runtime_checkable
class ReportsUsage(Protocol):
    """Optional: figures for statistics."""

    def usage(self) -> Usage:
        """Current residency; called on the engine's thread, never blocks."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Monotonic counts by reason: ``read_missing``, ``corrupt_payload``, ``evicted``..."""
        ...


@runtime_checkable
class ReadsEach(Protocol):
    """Optional: says of each chunk of a read that it is there, so that its copy begins at once.

    A load then reads all it wants from the store in one call; from others it reads in small ones.
    """

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> list[bool]:
        """Do as :meth:`Backend.read`, and call ``arrived(i)`` as soon as ``into[i]`` is verified.

        At most once a chunk, on any thread, before this returns, and only where the answer will be
        True. ``arrived`` returns at once and does not raise.
        """
        ...


@runtime_checkable
class Describes(Protocol):
    """Optional: keeps the facts behind a namespace digest readable beside the data."""

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Store the facts; failing to is logged, never raised."""
        ...


@runtime_checkable
class RunsOnLoop(Protocol):
    """Optional: is told its loop before the first call, to connect early and to answer lookups."""

    def bind(self, loop: "AbstractEventLoop") -> None:
        """All coroutines will run on this loop. Called once, right after opening, on any thread."""
        ...


@runtime_checkable
class Fits(Protocol):
    """Optional: is asked, right after opening, whether it can be of use as it was configured."""

    @property
    def place(self) -> str:
        """Where the chunks are; no two tiers of one engine may have them at the same place."""
        ...

    def check_fit(self, chunk_bytes: int) -> None:
        """Refuse if not even one chunk of this size can be stored.

        Raises:
            ConfigError: names the setting that is too small.
        """
        ...
