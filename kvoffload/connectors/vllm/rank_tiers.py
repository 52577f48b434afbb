"""What the tiers of all ranks hold, as the scheduler knows it: from the workers' reports alone.

The scheduler's process opens no store, so that ranks may be on other machines.

Where stores list their chunks, workers relay what changes. A chunk is present if every rank's store
has its part. One dictionary maps each key to a bit mask of ranks, so that a lookup takes one step
whatever the number of ranks.

Where they list nothing, the workers ask them. A question goes to every worker with the next step,
and the answers come with later reports.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.backends.base import Removal
from kvoffload.config import OffloadConfig
from kvoffload.connectors.tier_io import tier_names
from kvoffload.io.presence import PresenceCache
from kvoffload.io.remote_tier import ANSWER_S, RemoteTier
from kvoffload.offload.manager import Tier

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


# ---- All tiers, for the scheduler ----

QUIET_S = 60.0
"""A listing that brings nothing for so long is no reason to keep an idle engine stepping."""


class RankTiers:
    """What each tier of all ranks holds; for the scheduler's thread alone.

    Args:
        config: the settings.
        ranks: the numbers of all ranks.
        listed: the tiers whose stores list their chunks; workers ask the rest.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: OffloadConfig,
        ranks: Sequence[int],
        listed: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._ranks = tuple(ranks)
        self._listed = frozenset(listed)
        self._clock = clock
        self.renew("")

    def renew(self, generation: str) -> None:
        """Begin with empty tiers: stored bytes mean something else from now on.

        Reports of stores that were opened before do not count.
        """
        self._generation = generation
        self._indexes: dict[str, TierIndex] = {}
        self._asked: dict[str, AskedTier] = {}
        config = self._config
        for name, _ in tier_names(config):
            if name in self._listed:
                index = TierIndex(self._ranks, config.lookup_timeout_s, self._clock)
                self._indexes[name] = index
            else:
                timeout_s = config.lookup_timeout_s + config.load_timeout_s
                self._asked[name] = AskedTier(len(self._ranks), timeout_s, self._clock)
        self.presences: dict[str, TierIndex | AskedTier] = {**self._indexes, **self._asked}
        self.tiers = tuple(
            Tier(name, self.presences[name], self.presences[name]) for name, _ in tier_names(config)
        )
        self._heard_s = self._clock()

    def apply(self, parts: Iterable[IndexPart], answers: Iterable[PresenceReply]) -> None:
        """Take in what workers report of their stores."""
        for part in parts:
            index = self._indexes.get(part.tier)
            if index is None or part.generation != self._generation:
                continue
            self._heard_s = self._clock()
            if part.is_first:
                index.restart(part.rank)
            index.apply(part.rank, part.added, part.removed)
            if part.is_complete:
                index.completed(part.rank)
        for answer in answers:
            asked = self._asked.get(answer.tier)
            if asked is not None and answer.generation == self._generation:
                asked.answer(answer.number, answer.present)

    @property
    def has_questions(self) -> bool:
        """Whether workers must ask their stores."""
        return any(asked.has_questions for asked in self._asked.values())

    def take_questions(self) -> dict[str, PresenceQuery]:
        """Return what workers must ask their stores with this step, by tier."""
        taken = ((name, asked.take_question()) for name, asked in self._asked.items())
        return {name: question for name, question in taken if question is not None}

    @property
    def are_listed(self) -> bool:
        """Whether reports list the chunks of some tier."""
        return bool(self._indexes)

    @property
    def is_waiting(self) -> bool:
        """Whether reports are to come: an idle engine must go on stepping to receive them."""
        if any(asked.is_waiting for asked in self._asked.values()):
            return True
        return (
            not all(index.is_complete for index in self._indexes.values())
            and self._clock() - self._heard_s < QUIET_S
        )


# ---- A tier whose stores list their chunks ----

_ANNOUNCED = 1
"""This engine told of the chunk as stored in the tier, and must tell of its removal."""
_FORGOTTEN = 2
"""A load of the chunk failed: absent until a rank announces it again."""
_FLAGS = _ANNOUNCED | _FORGOTTEN
_FIRST_RANK = 4
_MOST_BITS = 60
"""Masks below this size are small integers."""
_LEAST_LIMIT = 1 << 20
_MAX_ASKED = 1 << 16
"""Keys that may wait for an incomplete index at a time; further ones are absent."""


class TierIndex:
    """Presence of chunks in one tier, for the scheduler's thread alone.

    A rank that begins a new listing gets a new bit, so its old listing counts no more, and no key
    is visited. Memory is bounded by twice the chunks that ranks announced, or 2²⁰ of them.

    Args:
        ranks: their numbers.
        timeout_s: how long a lookup may stay at None while listings are incomplete.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._masks: dict[bytes, int] = {}
        self._bits = {rank: _FIRST_RANK << i for i, rank in enumerate(ranks)}
        self._required = sum(self._bits.values())
        self._complete = 0
        """The bits of the ranks whose listings are complete."""
        self._dead = 0
        """Former bits of ranks, which masks may still have."""
        self._has_garbage = False
        self._limit = _LEAST_LIMIT
        self._asked: dict[bytes, float] = {}
        """Until when a lookup of a key may stay at None."""
        self._removals: list[Removal] = []

    # ---- looking up ----

    def holds(self, key: bytes) -> bool | None:
        """Return whether every rank has a chunk; None while a listing may still bring it."""
        mask = self._masks.get(key, 0)
        if mask & (self._required | _FORGOTTEN) == self._required:
            return True
        here = self._required & mask
        if (self._required & ~here) & self._complete or (here and mask & _FORGOTTEN):
            return False
        if len(self._asked) >= _MAX_ASKED:
            return False
        now = self._clock()
        return None if now < self._asked.setdefault(key, now + self._timeout_s) else False

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """Count the leading chunks for which :meth:`holds` answers True."""
        get, required = self._masks.get, self._required
        wanted = required | _FORGOTTEN
        count = 0
        for key in keys:
            if get(key, 0) & wanted != required:
                break
            count += 1
        return count

    @property
    def is_complete(self) -> bool:
        """Whether every rank has listed what it had at its start."""
        return self._complete == self._required

    # ---- what ranks report ----

    def restart(self, rank: int) -> None:
        """Begin a new listing of a rank: what it announced before counts no more."""
        old = self._bits[rank]
        self._required &= ~old
        self._complete &= ~old
        self._dead |= old
        self._has_garbage = True
        if self._unused_bit() >> _MOST_BITS:
            self._sweep()
        self._bits[rank] = self._unused_bit()
        self._required |= self._bits[rank]

    def apply(self, rank: int, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Take in what appeared in a rank's store and what left it."""
        masks, bit = self._masks, self._bits[rank]
        for key in added:
            masks[key] = (masks.get(key, 0) | bit) & ~_FORGOTTEN
        for key in removed:
            mask = masks.get(key, 0) & ~bit
            if mask & ~_FORGOTTEN:
                masks[key] = mask
                self._has_garbage |= not mask & self._required
            else:
                masks.pop(key, None)
        if len(masks) > self._limit:
            if self._has_garbage:
                self._sweep()
            self._limit = max(_LEAST_LIMIT, 2 * len(self._masks))

    def completed(self, rank: int) -> None:
        """Note that a rank has listed all that it had at its start."""
        self._complete |= self._bits[rank]
        if self.is_complete:
            self._asked.clear()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Count chunks as absent until a rank announces them again."""
        for key in keys:
            mask = self._masks.get(key, 0)
            if mask:
                self._masks[key] = mask & ~_ANNOUNCED | _FORGOTTEN

    def written(self, keys: Iterable[bytes]) -> None:
        """Note that every rank has just stored these, and that they were told of as stored."""
        for key in keys:
            self._masks[key] = self._required | _ANNOUNCED

    def removed(self, removals: Iterable[Removal]) -> None:
        """Note which chunks some rank's store gave up; what it still has, its changes say."""
        for removal in removals:
            mask = self._masks.get(removal.key, 0)
            if mask & _ANNOUNCED:
                self._masks[removal.key] = mask & ~_ANNOUNCED
                self._has_garbage |= not mask & self._required
                self._removals.append(removal)

    def take_removals(self) -> list[Removal]:
        """Return what was told of as stored and left since, once each."""
        taken, self._removals = self._removals, []
        return taken

    # ---- bits ----

    def _unused_bit(self) -> int:
        """Return the lowest bit that no mask has."""
        used = _FLAGS | self._required | self._dead
        return ~used & (used + 1)

    def _sweep(self) -> None:
        """Drop the keys that no rank has, and free the bits of former listings."""
        live, kept = self._required, self._required | _FLAGS
        self._masks = {key: mask & kept for key, mask in self._masks.items() if mask & live}
        self._dead, self._has_garbage = 0, False


# ---- A tier whose stores list nothing ----

MAX_ANNOUNCED = 1_000_000
"""Chunks whose removal this engine tells of; of older ones it does not."""


@dataclass
class _Open:
    """A question that some ranks have not answered."""

    keys: list[bytes]
    present: list[bool]
    num_ranks: int


class AskedTier:
    """Presence of chunks in one tier, for the scheduler's thread alone.

    Args:
        num_ranks: workers that answer each question.
        timeout_s: how long a lookup may stay at None. Workers answer sooner, so that it is only
            reached by reports that are lost.
        clock: seconds, monotonic.
    """

    def __init__(
        self, num_ranks: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._clock = clock
        self._cache = PresenceCache(self._note_question, timeout_s, ANSWER_S, clock)
        self.has_questions = False
        """Whether :meth:`take_question` has something to return."""
        self._open: dict[int, _Open] = {}
        self._number = 0
        self._until_s = 0.0
        """When the last question counts as lost."""
        self._announced: dict[bytes, None] = {}
        self._removals: list[Removal] = []

    def holds(self, key: bytes) -> bool | None:
        """Return whether every rank has a chunk; None while it is being asked for."""
        return self._cache.holds(key)

    def _note_question(self) -> None:
        self.has_questions = True

    def take_question(self) -> PresenceQuery | None:
        """Return the chunks to ask for with this step; None for none."""
        now = self._clock()
        if now >= self._until_s:
            self._open.clear()
        keys = self._cache.take_questions() if self.has_questions else []
        self.has_questions = False
        if not keys:
            return None
        self._number += 1
        self._until_s = now + self._timeout_s
        self._open[self._number] = _Open(keys, [True] * len(keys), self._num_ranks)
        return PresenceQuery(self._number, keys)

    def answer(self, number: int, present: Sequence[bool]) -> None:
        """Take in one rank's answer; a chunk is present if all ranks say so."""
        question = self._open.get(number)
        if question is None or len(present) != len(question.keys):
            return
        question.present = [a and b for a, b in zip(question.present, present, strict=True)]
        question.num_ranks -= 1
        if not question.num_ranks:
            del self._open[number]
            self._cache.answer(question.keys, question.present)

    @property
    def is_waiting(self) -> bool:
        """Whether a question is to be sent or has no answer yet, nor is lost."""
        return self.has_questions or (bool(self._open) and self._clock() < self._until_s)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Count chunks as absent for a while, unless they are written again."""
        self._cache.forget(keys)
        for key in keys:
            self._announced.pop(key, None)

    def written(self, keys: Iterable[bytes]) -> None:
        """Note that every rank has just stored these, and that they were told of as stored."""
        for key in keys:
            self._cache.set(key, True)
            self._announced[key] = None
        while len(self._announced) > MAX_ANNOUNCED:
            del self._announced[next(iter(self._announced))]

    def removed(self, removals: Iterable[Removal]) -> None:
        """Note which chunks some rank's store gave up."""
        for removal in removals:
            self._cache.set(removal.key, False)
            if removal.key in self._announced:
                del self._announced[removal.key]
                self._removals.append(removal)

    def take_removals(self) -> list[Removal]:
        """Return what was told of as stored and left since, once each."""
        taken, self._removals = self._removals, []
        return taken


# ---- The tiers of one rank, for its worker ----

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
        self._listings: dict[str, int] = {}
        """For each tier, the number of the listing that was reported of last."""
        self._completed: set[str] = set()
        self._questions: list[_Asked] = []
        """Those without an answer."""
        for name, tier in tiers.items():
            # A server of the host that came later may list, and its changes are not taken.
            tier.relay(changes=name in self.listed)

    def renew(self, generation: str) -> None:
        """Report of the stores that were opened by this order to renew from now on."""
        self._generation = generation
        self._listings.clear()
        self._completed.clear()

    def take_parts(self) -> list[IndexPart]:
        """Return what changed since the last call, in portions."""
        return [part for name in self.listed if (part := self._part(name)) is not None]

    def _part(self, name: str) -> IndexPart | None:
        """Return the next changes of a tier; None if there is nothing to say."""
        tier = self._tiers[name]
        listing, is_complete = tier.listing, tier.is_complete
        is_known = self._listings.get(name) == listing and is_complete == (name in self._completed)
        if is_known and not tier.has_changes:
            return None
        part = IndexPart(self._rank, name, self._generation)
        if self._listings.get(name) != listing:
            # The first listing, or the tier's server was started again: all of it is told again.
            self._listings[name], part.is_first = listing, True
            self._completed.discard(name)
        changes = tier.take_changes(MAX_CHANGES)
        for key, present in changes:
            (part.added if present else part.removed).append(key)
        part.is_complete = is_complete and len(changes) < MAX_CHANGES
        is_news = part.is_first or (part.is_complete and name not in self._completed)
        if part.is_complete:
            self._completed.add(name)
        return part if changes or is_news else None

    def ask(self, questions: Mapping[str, PresenceQuery]) -> None:
        """Ask tiers that list nothing; their answers come with a later report."""
        for name, question in questions.items():
            tier = self._tiers[name]
            by_s = time.monotonic() + tier.lookup_timeout_s
            table = tier.ask_for(question.keys)
            self._questions.append(_Asked(name, self._generation, question, table, by_s))

    def take_answers(self) -> list[PresenceReply]:
        """Return the answers that are known by now."""
        if not self._questions:
            return []
        waiting, self._questions, now_s = self._questions, [], time.monotonic()
        answers = []
        for asked in waiting:
            present = [asked.table[key] for key in asked.question.keys]
            if None in present and now_s < asked.by_s:
                self._questions.append(asked)
                continue
            self._tiers[asked.tier].end_asking(asked.table)
            number, known = asked.question.number, list(map(bool, present))
            answers.append(PresenceReply(asked.tier, asked.generation, number, known))
        return answers
