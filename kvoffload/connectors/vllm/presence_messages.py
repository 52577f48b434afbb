"""What workers tell the scheduler of the chunks in their stores: plain data, pickled each step."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class IndexPart:
    """Changes in what one rank's store holds; the first parts list everything."""

    rank: int
    tier: str
    generation: str
    """The order to renew that the store was opened by; a part of an earlier one does not count."""
    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    is_first: bool = False
    """A new listing begins: what this rank told before of this tier counts no more."""
    is_complete: bool = False
    """All that was stored at the rank's start is listed."""


@dataclass
class Question:
    """Scheduler → workers: which of these chunks has a store that lists nothing?"""

    number: int
    keys: list[bytes]


@dataclass
class Answer:
    """One rank's answer to a :class:`Question`; False for chunks that the store did not name."""

    tier: str
    generation: str
    number: int
    present: Sequence[bool]
