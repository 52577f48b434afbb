"""How a chunk lies on disk. A form keeps chunks; the store indexes, counts and evicts them.

There are two: a file of its own (``files``), and a slot of a segment (``slots``). Their methods
block, and raise OSError where nothing else is said.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvoffload.backends.disk.index import Name


class Seen(NamedTuple):
    """What a reader found in place of a chunk."""

    identity: int
    """Differs from that of whatever later takes the place."""
    allocated_bytes: int


class Draft(Protocol):
    """A place for one chunk that no reader sees yet."""

    @property
    def form(self) -> "Form":
        """Return the form that the place belongs to."""
        ...

    @property
    def overwrites(self) -> bool:
        """Return whether an evicted chunk is overwritten."""
        ...

    def write(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> tuple[str | None, int]:
        """Write header and chunk; return why that failed, or None, and the allocated bytes."""
        ...

    def publish(self, name: Name) -> int:
        """Let readers see the chunk; return the bytes of the chunk that it replaced."""
        ...

    def retract(self, name: Name) -> None:
        """Hide a published chunk again."""
        ...

    def drop(self) -> bool:
        """Free the place of a chunk that is not published; raises nothing.

        Returns False if it stays for now: the form releases its bytes later.
        """
        ...


class Form(Protocol):
    """Chunks by name, of one root."""

    def read(self, name: Name, key: bytes, target: memoryview) -> tuple[str | None, Seen | None]:
        """Fill ``target`` with a chunk of the own namespace; return a counter's reason, or None.

        Raises nothing. After damage it tells what was seen.
        """
        ...

    def drafts(self, chunk_bytes: int, count: int) -> Sequence[Draft]:
        """Return new places for so many chunks of this length."""
        ...

    def take_over_all(self, names: Sequence[Name], chunk_bytes: int) -> Mapping[Name, Draft]:
        """Hide chunks whose places suit those of this length, and return the places.

        Raises nothing. The rest is as before.
        """
        ...

    def used_ns(self, name: Name) -> int:
        """Return when any process used a chunk last; FileNotFoundError: it is gone."""
        ...

    def record_uses(self, uses: Mapping[Name, int]) -> None:
        """Tell other processes, and the next start, of uses of chunks that are there."""
        ...

    def allocated_bytes(self, name: Name) -> int:
        """Return the bytes that a chunk takes up; 0: it is gone."""
        ...

    def is_still(self, name: Name, seen: Seen) -> bool:
        """Return whether a chunk still is what a reader saw; FileNotFoundError: it is gone."""
        ...

    def sync(self, name: Name, *, is_new: bool) -> None:
        """Make a chunk durable; ``is_new``: its own writer calls."""
        ...

    def remove(self, name: Name) -> None:
        """Remove a chunk; FileNotFoundError: it is gone."""
        ...

    def set_aside(self, name: Name, path: str) -> None:
        """Move a damaged chunk into a file of its own; FileNotFoundError: it is gone."""
        ...
