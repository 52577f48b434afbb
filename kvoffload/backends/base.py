"""What a backend is: a key-addressed store of whole chunks, below host memory.

A backend is one class: an ``Options`` struct, a constructor ``(options, namespace)`` and the five
coroutines of :class:`Backend`. Register it in the ``kvoffload.backends`` entry-point group, and
inherit :class:`kvoffload.testing.BackendSuite` in a short test class. Most stores need only three
blocking functions, or coroutines, that move bytes: see
:class:`kvoffload.backends.threaded.ThreadedBackend` and
:class:`kvoffload.backends.asynchronous.AsyncBackend`.

Four protocols are optional: :class:`LocalIndex`, :class:`Observable`, :class:`ReadsEach` and
:class:`Spares`.
Inherit one and define what differs from its defaults. Operators' commands call one method each:
see :mod:`kvoffload.backends.admin`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.policies.told_return import ToldReturn


class _Answer(Enum):
    """More than a bool, and equal to the bool it stands for."""

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, bool) and other == bool(self))

    def __hash__(self) -> int:
        return hash(bool(self))

    def __radd__(self, count: int) -> int:
        return count + bool(self)  # so that sum(answers) counts the hits


class WriteResult(_Answer):
    """What became of a chunk; a backend may answer a write with plain bools instead."""

    PRESENT = "present"
    """It can be read back, and nothing was moved: the store had it."""


Written = bool | WriteResult


class ReadResult(_Answer):
    """Why a chunk was read or not: true for ``HIT`` alone.

    A backend may answer a read with plain bools instead; False then counts as ``MISSING``.
    """

    HIT = "hit"
    MISSING = "missing"
    """No chunk of this length, of this version and under a key of this engine is stored."""
    CORRUPT = "corrupt"
    """A chunk is stored, and its verification failed."""
    LATE = "late"
    """The store did not answer by its deadline."""
    UNAVAILABLE = "unavailable"
    """The store could not be asked, or refused."""

    @classmethod
    def of(cls, reason: str) -> "ReadResult":
        """Return the result behind a counter's reason; an empty one is a hit."""
        if reason.startswith("corrupt"):
            return cls.CORRUPT
        return _BY_REASON.get(reason, cls.UNAVAILABLE)

    def __bool__(self) -> bool:
        return self is ReadResult.HIT


_BY_REASON = {
    "": ReadResult.HIT,
    "missing": ReadResult.MISSING,
    "length": ReadResult.MISSING,
    "other_version": ReadResult.MISSING,
    "other_key": ReadResult.MISSING,
    "lost_timeout": ReadResult.LATE,
}
Answers = Sequence[bool | ReadResult]
"""The answers of a read, one a key."""


def reason_of(answers: Answers) -> str:
    """Return why a read brought less than was asked: its first miss, or empty."""
    for answer in answers:
        if answer is not ReadResult.HIT and not answer:  # the first is quick, and mostly enough
            return answer.value if isinstance(answer, ReadResult) else ReadResult.MISSING.value
    return ""


class Backend(Protocol):
    """Key-addressed storage below host memory.

    Each coroutine takes a batch and returns one answer a key, in the order asked. All coroutines
    run on the I/O loop (``kvoffload-io``) and must not block it. The caller owns the memory it
    passes and keeps it untouched until the call returns; a backend keeps no reference afterwards.
    A *cancelled* call returns only when nothing of it reads or writes that memory any more: await
    the thread that does, shielded. A missing, damaged or foreign chunk, a full store and a lost
    connection are all ``False``; only misuse (lengths that differ) raises.

    An engine begins with ``contains([])``, so that a store may connect before it is needed.
    """

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a read would probably find it."""
        ...

    async def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> Answers:
        """Fill ``into[i]`` (writable, contiguous bytes) with the chunk stored under ``keys[i]``.

        True means: exactly the bytes written under that key in this namespace, all
        ``len(into[i])`` of them, verified. After a miss the content of ``into[i]`` is undefined.
        A :class:`ReadResult` in place of False says why.
        """
        ...

    async def write(self, keys: Sequence[bytes], chunks: Sequence[memoryview]) -> Sequence[Written]:
        """Store each chunk whole or not at all; True means it can be read back from now on.

        Equal keys mean equal bytes: a key already stored may be left as it is, which
        :class:`WriteResult` tells.
        """
        ...

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys; unknown ones are ignored."""
        ...

    async def close(self) -> None:
        """Release all resources. Idempotent; afterwards every call answers False."""
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
class LocalIndex(Protocol):
    """Optional: an index in memory of all chunks of a store, which lists them for one reader.

    The reader is the engine's process: it keeps a copy, and need not ask through ``contains``. All
    methods are called on the I/O loop and do no I/O.
    """

    def holds(self, key: bytes) -> bool:
        """Return whether a read would probably find the chunk."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Answer False for these keys, whose load just failed, until they are written again."""
        ...

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        """Return keys whose presence changed since they were last returned, with the presence.

        At most ``limit`` of them, each key once. The first calls list every chunk that is present.
        A key may be returned although nothing changed.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether every chunk that earlier processes stored has been returned; stays True."""
        ...


class Removal(NamedTuple):
    """A chunk left a backend by the backend's own decision."""

    key: bytes
    reason: str
    """``evicted``, ``expired``, ``corrupt``, ``purged``..."""


class Usage(NamedTuple):
    """How full a store is, in bytes; None is unknown.

    ``capacity_bytes`` is None where the store sets the limit.
    """

    resident_bytes: int | None
    capacity_bytes: int | None
    chunks: int | None
    gauges: Mapping[str, int] = MappingProxyType({})
    """Numbers that rise and fall: ``up`` (0 while the store cannot be reached), ``connections``."""


MOST_DESCRIBED = 256
"""Namespaces whose facts an engine reads at its start: the last used, or those with most chunks."""


class Described(NamedTuple):
    """A namespace of a store, with the facts behind it."""

    namespace: str
    facts: Mapping[str, str]
    chunks: int
    """Chunks that were found of it, or an estimate; 0: it has none."""
    stored_bytes: int | None = None
    """Bytes of its chunks, or an estimate; None: unknown."""
    used_s: float | None = None
    """Seconds since an engine last used it; None: unknown."""


@runtime_checkable
class Observable(Protocol):
    """Optional: figures, removals and limits of a store.

    All methods are called on the I/O loop. No method but ``describe`` and ``described`` does I/O.
    """

    def usage(self) -> Usage:
        """Return the current usage."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Return monotonic counts by reason: ``read_missing``, ``corrupt_payload``, ``evicted``."""
        ...

    def take_removals(self) -> list[Removal]:
        """Return the chunks evicted since the last call."""
        return []

    async def describe(self, facts: Mapping[str, str]) -> None:
        """Keep the facts behind the namespace digest readable; a failure is logged, not raised."""

    async def described(self) -> Sequence[Described]:
        """Return the namespaces of this store, for the log line that explains a cold start.

        Called once, in the background of the start. A call is to be cheap: a store may look at a
        part of what it has. If the own namespace has chunks, it alone is enough.
        """
        return ()

    @property
    def place(self) -> str:
        """Where the chunks are, if two tiers of an engine must not share it; else empty."""
        return ""

    def check_fit(self, chunk_bytes: int) -> None:
        """Refuse a store too small for one chunk of this size.

        Raises:
            ConfigError: names the setting that is too small.
        """
        capacity = self.usage().capacity_bytes
        if capacity is not None and capacity < chunk_bytes:
            remedy = f"must hold at least one chunk, which takes {human_bytes(chunk_bytes)}"
            raise ConfigError("capacity", human_bytes(capacity), remedy)


@runtime_checkable
class ReadsEach(Protocol):
    """Optional: reports each chunk of a read as it arrives, so that its copy begins at once.

    A load reads all its chunks from such a store in one call, and from another store in small ones.
    """

    async def read_each(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> Answers:
        """Do as :meth:`Backend.read`, and call ``arrived(i)`` as soon as ``into[i]`` is verified.

        At most once a chunk, on any thread, before this returns, and only where the answer will be
        True. ``arrived`` returns at once and does not raise.
        """
        ...


@runtime_checkable
class Spares(Protocol):
    """Optional, for a store that evicts: learns which chunks are needed next."""

    def spare(self, keys: Collection[bytes]) -> None:
        """Evict these chunks last, and those of the call before as usual again.

        Called on the I/O loop, does no I/O, and as soon as the store is open. Keys that the store
        has not count when it stores or finds them. The store evicts what it is told to spare if
        nothing else is left.
        """
        ...

    def expect(self, returns: Sequence[ToldReturn], share: float) -> None:
        """Evict by when sessions need their chunks again, where that is told.

        Called on the I/O loop, does no I/O. Keys that the store has not count when it stores them.
        The default ignores it. A store with a :class:`~kvoffload.policies.base.Policy` wraps it in
        a :class:`~kvoffload.policies.return_order.ReturnOrder`, and applies each return to that.

        Args:
            returns: what requests that have ended said, the latest last.
            share: the part of the store that such chunks may hold while other chunks need room.
        """
        return


def check_lengths(keys: Sequence[bytes], memory: Sequence[memoryview]) -> None:
    """Refuse a batch that has not one piece of memory for each key; raises ValueError."""
    if len(keys) != len(memory):
        raise ValueError(f"{len(keys)} keys, but {len(memory)} buffers")
