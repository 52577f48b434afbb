"""What a worker tells the scheduler of its rank's tiers: changes of listings, and answers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.io.remote_tier import RemoteTier

# ---- Messages, pickled each step ----


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
class PresenceQuery:
    """Scheduler → workers: which of these chunks has a store that lists nothing?"""

    number: int
    keys: list[bytes]


@dataclass
class PresenceReply:
    """One rank's reply to a :class:`PresenceQuery`; False for chunks that it did not name."""

    tier: str
    generation: str
    number: int
    present: Sequence[bool]


# ---- The tiers of one rank ----

MAX_CHANGES = 1024
"""Keys of one tier in a report: to collect, send and take in more would delay a step."""


class _Asked(NamedTuple):
    """A question of the scheduler's that has no answer yet."""

    tier: str
    generation: str
    question: PresenceQuery
    table: dict[bytes, bool | None]
    """The presence of its keys, as far as that is known."""
    by_s: float
    """When what is not known counts as absent."""


class WorkerPresence:
    """The tiers of one rank; the engine's thread calls all methods.

    Args:
        rank: this worker's number.
        tiers: what this process knows of each.
    """

    def __init__(self, rank: int, tiers: Mapping[str, RemoteTier]) -> None:
        self._rank = rank
        self._tiers = dict(tiers)
        self._generation = ""
        self.listed = frozenset(name for name, tier in tiers.items() if tier.is_listed)
        """The tiers whose chunks are reported; the scheduler asks about the rest."""
        self._told: dict[str, tuple[int, bool]] = {}
        """For each tier, the number of the listing that was reported of last; whether all of it."""
        self._down = frozenset[str]()
        """The tiers that were last reported as down."""
        self.questions: list[_Asked] = []
        """Those without an answer."""
        for name, tier in tiers.items():
            # A server of the host that came later may list, and its changes are not taken.
            tier.relay(changes=name in self.listed)

    def renew(self, generation: str) -> None:
        """Report of the stores that were opened by this order to renew from now on."""
        self._generation = generation
        self._told.clear()

    def take_down(self) -> frozenset[str] | None:
        """Return the tiers that cannot be asked now; None if they are those of the last call."""
        down = frozenset(name for name, tier in self._tiers.items() if not tier.is_up)
        if down == self._down:
            return None
        self._down = down
        return down

    def take_parts(self) -> list[IndexPart]:
        """Return what changed since the last call, in portions."""
        return [part for name in self.listed if (part := self._part(name)) is not None]

    def _part(self, name: str) -> IndexPart | None:
        """Return the next changes of a tier; None if there is nothing to say."""
        tier = self._tiers[name]
        listing, is_complete = tier.listing, tier.is_complete
        told, was_complete = self._told.get(name, (None, False))
        if (told, was_complete) == (listing, is_complete) and not tier.has_changes:
            return None
        part = IndexPart(self._rank, name, self._generation)
        # The first listing, or the tier's server was started again: all of it is told again.
        part.is_first = told != listing
        changes = tier.take_changes(MAX_CHANGES)
        for key, present in changes:
            (part.added if present else part.removed).append(key)
        part.is_complete = is_complete and len(changes) < MAX_CHANGES
        is_news = part.is_first or (part.is_complete and not was_complete)
        is_told = part.is_complete or (was_complete and not part.is_first)
        self._told[name] = listing, is_told
        if tier.has_changes:  # the next portion
            tier.has_news = True
        return part if changes or is_news else None

    def ask(self, questions: Mapping[str, PresenceQuery]) -> None:
        """Ask tiers that list nothing; their answers come with a later report."""
        for name, question in questions.items():
            tier = self._tiers[name]
            by_s = time.monotonic() + tier.lookup_timeout_s
            table = tier.ask_for(question.keys)
            self.questions.append(_Asked(name, self._generation, question, table, by_s))

    def take_answers(self) -> list[PresenceReply]:
        """Return the answers that are known by now."""
        waiting, self.questions, now_s = self.questions, [], time.monotonic()
        answers = []
        for asked in waiting:
            present = [asked.table[key] for key in asked.question.keys]
            if None in present and now_s < asked.by_s:
                self.questions.append(asked)
                continue
            self._tiers[asked.tier].end_asking(asked.table)
            number, known = asked.question.number, list(map(bool, present))
            answers.append(PresenceReply(asked.tier, asked.generation, number, known))
        return answers
