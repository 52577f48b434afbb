"""What the engine's process knows of a tier: which chunks it has, and its figures."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import indexOf
from typing import Any

from kvoffload.backends.base import Removal, Usage
from kvoffload.backends.header import CHECK_OF, CHECKS
from kvoffload.io.presence import PresenceCache
from kvoffload.io.protocol import (
    Answered,
    Figures,
    Forgotten,
    Load,
    PresenceChanges,
    Present,
    Removed,
    Store,
)
from kvoffload.metrics import names
from kvoffload.metrics.samples import LOADS, STORES, Sample, Traffic

ANSWER_S = 2.0
"""How long an answer of ``contains`` is believed, whatever it is."""
MAX_REMOVALS = 1 << 16
"""Removals kept for an engine that may never ask; older ones are lost to it."""
_OWN_METRICS = ("up", "breakers_open", "server_evictions")
"""Gauges of a store that have metrics of their own."""
_OF_ALL = 5
"""The first checks: their counters begin at 0; the rest appear with the first chunk that fails."""


class RemoteTier:
    """Presence and figures of one tier, from the server's messages.

    Of a store with an index there is a copy of the index, changed by announcements alone. A store
    without an index is asked. Where another process decides, :meth:`relay` hands both on to it, and
    this one remembers neither. The engine's thread calls the public methods, none of which waits.
    The client's thread calls those that take messages. Each step on what they share is atomic.

    Args:
        name: of the tier.
        lookup_timeout_s: how long an answer may be None.
        ask: called when there are new questions, or keys to forget; returns at once.
    """

    def __init__(self, name: str, lookup_timeout_s: float, ask: Callable[[], None]) -> None:
        self.name = name
        self.lookup_timeout_s = lookup_timeout_s
        """How long an answer of the store may take."""
        self._ask = ask
        self._removals: deque[Removal] = deque(maxlen=MAX_REMOVALS)
        self.is_listed = False
        """Whether the store has an index, so that its chunks are listed."""
        self.is_shared = False
        """Whether processes of this host that open the store alike see each other's chunks."""
        self._cache: PresenceCache | None = None
        self._lock = threading.Lock()
        """Guards what is known of the store's chunks while it is replaced, changed or taken."""
        self._keys: set[bytes] = set()
        self._asked_for: list[dict[bytes, bool | None]] = []
        """Tables of questions without an answer."""
        self._relayed: dict[bytes, bool] | None = None
        """Chunks that appeared or left since they were last taken; None unless they are relayed."""
        self._keeps_changes = False
        self._loads, self._stores = Traffic(LOADS, name), Traffic(STORES, name)
        self._counting = threading.Lock()
        """Held while traffic is added: also threads that read in place do that."""
        self._told: tuple[Counter[str], Figures | None] = (Counter(), None)
        """What earlier openings of the store have counted, and the figures of this one. They are
        replaced together, because any thread reads them."""
        self.listing = 0
        """Counts the listings: each begins with nothing, when the store is opened again."""
        self.reset()

    # ---- on the engine's thread ----

    def holds(self, key: bytes) -> bool | None:
        """Return True, False, or None for "ask again", at most for the lookup timeout."""
        if (cache := self._cache) is not None:  # another thread may reset the tier
            return cache.holds(key)
        if key in self._keys:
            return True
        if self.is_complete or time.monotonic() >= self._patient_until_s:
            return False
        return None

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys that an index holds."""
        return indexOf(chain(map(self._keys.__contains__, keys), (False,)), False)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Answer False for these keys until they are stored again.

        A closed store has nothing to forget: whatever failed, failed because it was closed.
        """
        cache, known, forgetting, unsent = self._cache, self._keys, self._forgetting, self.unsent
        if not self.is_open:  # read last: a reset from now on concerns none of these sets
            return
        if cache is not None:
            cache.forget(keys)
        else:
            # First, so that no announcement from before this call brings the keys back.
            forgetting.update(keys)
            known.difference_update(keys)
        unsent.extend(keys)
        # A failed load forgets its chunks one by one: they are sent together. The check comes last,
        # so that keys appended as the client's thread ended its taking cause a call.
        if len(unsent) <= len(keys):
            self._ask()

    def has_read(self, chunks: int, num_bytes: int, seconds: float) -> None:
        """Count chunks that the engine has read itself; on any thread."""
        with self._counting:
            self._loads.add(chunks, num_bytes, seconds)

    @property
    def is_up(self) -> bool:
        """Whether the store can be asked."""
        usage = self.usage
        return self.is_open and (usage is None or usage.gauges.get("up", 1) > 0)

    # ---- the same, for another process ----

    def relay(self, *, changes: bool) -> None:
        """Let :meth:`take_changes` and :meth:`ask_for` tell what the store has, and no lookup.

        Before the first change of a listing was taken, all that is there counts as changed.

        Args:
            changes: whether they are taken. If not, none is kept.
        """
        self._keeps_changes = changes
        with self._lock:
            if self._relayed is None:
                self._relayed = dict.fromkeys(self._keys if changes else (), True)
            self._keys.clear()
            self._cache = None

    @property
    def has_changes(self) -> bool:
        """Whether :meth:`take_changes` has something to return."""
        return bool(self._relayed)

    def take_changes(self, limit: int) -> list[tuple[bytes, bool]]:
        """Return chunks of this listing whose presence changed, with their presence now."""
        with self._lock:
            relayed = self._relayed or {}
            taken = [relayed.popitem() for _ in range(min(limit, len(relayed)))]
            if not relayed:
                self._relayed = {}  # an emptied dictionary keeps the memory of a long listing
        return taken

    def ask_for(self, keys: Sequence[bytes]) -> dict[bytes, bool | None]:
        """Ask a store without an index for chunks; return a table that its answers come into.

        The answers have come by :attr:`lookup_timeout_s`, or will not. :meth:`end_asking` follows.
        """
        answers: dict[bytes, bool | None] = dict.fromkeys(keys)
        self._asked_for.append(answers)
        self._questions.extend(keys)
        self._ask()
        return answers

    def end_asking(self, answers: dict[bytes, bool | None]) -> None:
        """Expect no more answers for this table."""
        self._asked_for = [each for each in self._asked_for if each is not answers]

    def take_removals(self) -> list[Removal]:
        """Return the chunks that the store removed by itself since the last call."""
        if not self._removals:
            return []
        return [self._removals.popleft() for _ in range(len(self._removals))]

    @property
    def usage(self) -> Usage | None:
        """The store's usage as it was last told; None if the store tells none."""
        _, figures = self._told
        return Usage(*figures.usage) if figures else None

    @property
    def counters(self) -> Mapping[str, int]:
        """The store's counters since this process began, as they were last told."""
        counted, figures = self._told
        now = figures.counters if figures else {}
        return counted + Counter(now) if counted else now

    def samples(self) -> Iterator[Sample]:
        """Yield all that is known of the tier now, but which chunks it has; on any thread."""
        tier, usage = self.name, self.usage
        gauges = dict(usage.gauges) if usage else {}
        yield names.TIER_UP, (tier,), int(self.is_up)
        yield names.BREAKERS_OPEN, (tier,), gauges.get("breakers_open", 0)
        yield names.SERVER_EVICTIONS, (tier,), gauges.get("server_evictions", 0)
        if usage is not None:
            if usage.resident_bytes is not None:
                yield names.RESIDENT_BYTES, (tier,), usage.resident_bytes
            if usage.capacity_bytes is not None:
                yield names.CAPACITY_BYTES, (tier,), usage.capacity_bytes
            for name, value in {"chunks": usage.chunks, **gauges}.items():
                if value is not None and name not in _OWN_METRICS:
                    yield names.TIER_GAUGES, (tier, name), value
        yield from self._loads.samples()
        yield from self._stores.samples()
        corrupt = Counter(dict.fromkeys(CHECKS[:_OF_ALL], 0))
        for reason, count in self.counters.items():
            if (check := CHECK_OF.get(reason)) is not None:
                corrupt[check] += count
            else:
                yield names.TIER_EVENTS, (tier, reason), count
        for check, count in corrupt.items():
            yield names.CORRUPT_CHUNKS, (tier, check), count

    # ---- on the client's thread ----

    def reset(self) -> None:
        """Forget everything: the store is closed, or is another one now."""
        self.is_open = False  # first: see :meth:`forget`
        """Whether the store has opened since the last reset."""
        self.in_place: dict[str, Any] = {}  # before the number: who reads that, and then this
        """What an engine must know to read chunks itself; empty: it cannot."""
        self.listing += 1
        with self._lock:
            self._keys = set()
            if self._relayed is not None:
                self._relayed = {}
        self._asked_for = []
        self._questions: deque[bytes] = deque()
        self._forgetting: set[bytes] = set()
        self.unsent: deque[bytes] = deque()
        """Keys that the server must forget."""
        self._cache = None
        self.is_complete = False
        """Whether the copy has all that the index has."""
        self.is_met = False
        """Whether the store has said a first word of what it has."""
        self._patient_until_s = time.monotonic() + self.lookup_timeout_s
        self._told = Counter(self.counters), None
        self.has_news = True
        """Whether something came since an engine that relays the store set this to False, which it
        does before it looks. So it is set after each change."""

    def opened(
        self, has_index: bool, is_shared: bool = False, in_place: dict[str, Any] | None = None
    ) -> None:
        """Take in that the store is open."""
        self._patient_until_s = time.monotonic() + self.lookup_timeout_s
        self.is_complete, self.is_met = False, not has_index
        self.is_listed, self.is_shared = has_index, is_shared
        with self._lock:
            if not has_index and self._relayed is None:
                self._cache = PresenceCache(self._ask, self.lookup_timeout_s, ANSWER_S)
        self.is_open, self.in_place = True, in_place or {}
        self.has_news = True

    def refused(self) -> None:
        """Take in that the store is closed, or cannot be opened now: it has nothing."""
        self.is_complete = True
        self.has_news = True

    def take(self, message: Any) -> None:
        """Take in what the server says of the open store."""
        match message:
            case PresenceChanges():
                self.announced(message)
            case Forgotten():  # announcements of these keys from now on count again
                self._forgetting.difference_update(message.keys)
            case Present():
                self.answered(message)
            case Removed():
                self._removals.extend(Removal(*removal) for removal in message.removals)
            case Figures():
                self._told = self._told[0], message
        self.has_news = True

    def announced(self, message: PresenceChanges) -> None:
        """Take in changes of the index, unless the tier is reset meanwhile."""
        keys, forgetting = self._keys, self._forgetting
        if not self.is_open:  # read after these sets: a reset replaces them
            return
        added = message.added
        if forgetting:
            added = [key for key in added if key not in forgetting]
        with self._lock:
            if keys is not self._keys:
                return
            if self._relayed is not None:
                if self._keeps_changes:
                    self._relayed.update(dict.fromkeys(added, True))
                    self._relayed.update(dict.fromkeys(message.removed, False))
            else:
                keys.update(added)
                keys.difference_update(message.removed)
        if forgetting:
            keys.difference_update(list(forgetting))
        self.is_met = True
        self.is_complete = message.complete or self.is_complete

    def moved(self, order: Load | Store, answer: Answered, is_current: bool = True) -> None:
        """Take in the answer of a load or store; an index announces stored keys by itself."""
        sizes, ok = order.sizes, answer.ok
        good = ok.count(1)  # a chunk that the store had was not moved
        if isinstance(sizes, int):
            num_bytes = sizes * good
        else:
            num_bytes = sum(size for size, fine in zip(sizes, ok, strict=True) if fine == 1)
        traffic = self._loads if isinstance(order, Load) else self._stores
        with self._counting:
            traffic.add(good, num_bytes, answer.io_time_s)
        cache = self._cache
        if is_current and cache is not None and isinstance(order, Store):
            for key, fine in zip(order.keys, ok, strict=True):
                if fine:
                    cache.set(key, True)

    def take_forgotten(self) -> list[bytes]:
        """Return the keys that the server must forget, before it gets any further store."""
        unsent = self.unsent
        taken: list[bytes] = []
        # Until none is left: a key that another thread appends meanwhile causes no call.
        while unsent:
            taken.append(unsent.popleft())
        return taken

    def take_questions(self) -> list[bytes]:
        """Return the keys to ask the store for."""
        if (cache := self._cache) is not None:
            return cache.take_questions()
        questions = self._questions
        return [questions.popleft() for _ in range(len(questions))]

    def answered(self, message: Present) -> None:
        """Take in the answers to questions."""
        if (cache := self._cache) is not None:
            cache.answer(message.keys, message.answers)
        for asked in self._asked_for:
            pairs = zip(message.keys, message.answers, strict=True)
            asked.update((key, there) for key, there in pairs if key in asked)
