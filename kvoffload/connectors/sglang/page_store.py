"""Stores and loads pages of an engine's own host memory, through a slab, in bounded time.

The engine's pages are not given to a store. A read that hangs would write into a page after the
call has answered and the engine has reused the page. So a call copies each page between the
engine's memory and a slot, without the GIL, and a late read keeps the slot only. All parts of a
page lie in one slot: they are one chunk. Only reads that cannot hang go into pages at once.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue

from kvoffload.backends.log_rate import Throttle
from kvoffload.config import OffloadConfig, human_bytes
from kvoffload.connectors.sglang.page_figures import PageFigures
from kvoffload.connectors.sglang.page_jobs import News, PageJob
from kvoffload.connectors.sglang.page_lookup import PageLookup
from kvoffload.connectors.sglang.pages_in_place import Page, PagesInPlace
from kvoffload.connectors.sglang.staging_slots import Lease, StagingSlots
from kvoffload.connectors.tier_io import TierIO
from kvoffload.errors import ConfigError
from kvoffload.identity import Fact
from kvoffload.io.protocol import Load, Store
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.timed_queue import next_within
from kvoffload.transfer.shared_memory import page_rounded

log = logging.getLogger(__name__)

PAGES_PER_JOB = 16
LOAD_BYTES, STORE_BYTES = 16 << 20, 4 << 20
"""A job of small pages has so many bytes: each job costs messages, tasks and wake-ups, some 0.3 ms
together. A store has less: its first page is written when all pages of the job are copied."""
MOST_STORE_BYTES = 32 << 20
"""A larger store job may take all staging slots; the copy of the next job must wait for it then."""
CLEAR_S = 30.0
"""How long a call waits until all pages are removed; SGLang's scheduler waits with it."""
RENEW_S = 5.0
"""How long an update of weights waits for new stores; SGLang's scheduler waits with it."""


class PageStore:
    """Pages on tiers. All methods may be called by several threads at once.

    Args:
        config: the settings.
        page_bytes: of the largest page.
        facts: everything that decides what the bytes mean.
        tokens_of: returns the tokens of a prompt that the page of a key holds.
        asks: see :class:`PageLookup`.

    Raises:
        ConfigError: a tier cannot be opened, or the staging memory cannot be had.
    """

    def __init__(
        self,
        config: OffloadConfig,
        page_bytes: int,
        facts: Mapping[str, Fact],
        tokens_of: Callable[[bytes], int] = lambda key: 0,
        *,
        asks: bool = False,
    ) -> None:
        self.slot_bytes = slot_bytes = page_rounded(page_bytes)  # for direct I/O
        num_slots = config.staging_bytes // slot_bytes
        if num_slots < 2:
            remedy = f"must hold at least two pages, which take {human_bytes(2 * slot_bytes)}"
            raise ConfigError("staging_bytes", human_bytes(config.staging_bytes), remedy)
        self._config = config
        self._io = TierIO(config, num_slots, slot_bytes, page_bytes, facts)
        if self._io.client is None:
            raise ConfigError("backends", [], "must name a tier")
        self._client = self._io.client
        self._tiers = list(self._client.tiers.values())
        self._staging = staging = StagingSlots(num_slots, len(self._tiers))
        # A call that hangs keeps the slots of its job, so a job has a small part of them.
        few, most = max(1, MOST_STORE_BYTES // slot_bytes), num_slots // 8
        self._pages_per_load = max(PAGES_PER_JOB, min(LOAD_BYTES // slot_bytes, most))
        self._pages_per_store = min(few, max(PAGES_PER_JOB, min(STORE_BYTES // slot_bytes, most)))
        self.figures = PageFigures(self._client, tokens_of, lambda: staging.num_busy * slot_bytes)
        """What became of pages."""
        self._lookup = PageLookup(self._tiers, config.lookup_timeout_s, asks=asks)
        self.lookup_deadline_s = self._lookup.deadline_s
        self._in_place = PagesInPlace(self._client)
        self._clearing = threading.Lock()
        self._changing = threading.Lock()
        """Held while a store is begun or barred: each store is of one generation."""
        self._num_bars = 0
        self._is_barred = False
        self._warnings = Throttle(log)

    @property
    def namespace(self) -> str:
        """The digest that the stores were opened with."""
        return self._io.namespace

    # ---- lookups ----

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Count the leading pages that tiers have; wait for a store at most its lookup timeout."""
        return self.leading(keys)[0]

    def leading(self, keys: Sequence[bytes], until_s: float | None = None) -> tuple[int, int]:
        """Count them, and those that precede the first one which no index had."""
        if self._is_barred:
            return 0, 0
        found, num_listed = self._lookup.leading(keys, until_s)
        self.figures.looked_up(found, len(keys))
        return found.total(), num_listed

    def present(
        self, keys: Sequence[bytes], num_listed: int, until_s: float | None = None
    ) -> list[bool]:
        """Tell of each page whether a tier has it; see :meth:`PageLookup.present`."""
        if self._is_barred:
            return [False] * len(keys)
        return self._lookup.present(keys, num_listed, until_s)

    # ---- loads ----

    def load(
        self, keys: Sequence[bytes], pages: Sequence[Page], until_s: float | None = None
    ) -> list[bool]:
        """Fill pages with what is stored under their keys, verified; False where nothing is.

        Args:
            keys: of the pages.
            pages: to fill.
            until_s: when to end, if not by the timeout of loads from now on.
        """
        sizes = self._sizes(keys, pages)
        ok = [False] * len(keys)
        until_s = until_s or time.monotonic() + self._config.load_timeout_s
        num_bars = self._num_bars
        if self._is_barred:
            self.figures.lose("load", "barred", len(keys))
            return ok
        tried: set[int] = set()
        brought: dict[str, list[bytes]] = {}
        for tier in self._tiers:
            listing, held = tier.listing, self._lookup.holds(tier, keys)
            absent = () if self._lookup.may_lag(tier) else (False,)
            wanted = [i for i, here in enumerate(held) if here not in absent and not ok[i]]
            if time.monotonic() < until_s:
                listed = [i for i in wanted if held[i]]
                asked = tier, listing, listed, keys, pages, sizes, until_s
                for i in self._in_place.load(*asked):
                    ok[i] = True
                left = deque(i for i in wanted if not ok[i])
                self._load_from(tier, left, keys, pages, sizes, ok, until_s)
                brought[tier.name] = [keys[i] for i in wanted if ok[i]]
            else:
                self._not_asked(tier, len({*wanted} - tried))
            tried.update(wanted)
        if num_bars != self._num_bars:  # the loaded pages are of earlier weights
            self.figures.lose("load", "barred", sum(ok))
            return [False] * len(keys)
        for name, loaded in brought.items():
            self.figures.loaded(name, loaded)
        self.figures.count("loaded", sum(ok))
        return ok

    def _load_from(
        self,
        tier: RemoteTier,
        left: "deque[int]",
        keys: Sequence[bytes],
        pages: Sequence[Page],
        sizes: Sequence[int],
        ok: list[bool],
        until_s: float,
    ) -> None:
        news: SimpleQueue[News] = SimpleQueue()
        running: set[PageJob] = set()
        listing = tier.listing
        while left or running:
            if left and self._staging.are_late(tier.name):
                self.figures.lose("load", "hung", len(left))
                left.clear()
            until = 0.0 if running else until_s
            if left and (lent := self._lend(left, until, storing=False)):
                job = PageJob(*lent, news, tier.name, self._staging)
                running.add(job)
                asked = [keys[i] for i in job.places]
                told_sizes = _shortened([sizes[i] for i in job.places])
                order = Load(0, tier.name, asked, list(job.lease.slots), told_sizes)
                self._client.begin(order, job)
                continue
            told = self._next(news, until_s) if running else None
            if told is None:
                break
            places, slots = told.job.places, told.job.lease.slots
            new = [number for number in told.numbers if not ok[places[number]]]
            if new:
                arrived = [pages[places[number]] for number in new]
                self._copy(arrived, [slots[number] for number in new], into_slot=False)
                for number in new:
                    ok[places[number]] = True
            if told.has_ended:
                running.remove(told.job)
                self._staging.release(told.job.lease)
                lost = [keys[i] for i in told.job.places if not ok[i]]
                self._forget(tier, listing, lost, told.reason)
        self._not_asked(tier, len(left))
        late = [keys[i] for job in running for i in job.places if not ok[i]]
        for job in running:
            job.give_up()
            self._staging.release(job.lease)
        self._forget(tier, listing, late, "deadline")

    def _not_asked(self, tier: RemoteTier, count: int) -> None:
        """Count pages for which there was no time; the tier may well have them."""
        if count:
            self.figures.lose("load", "deadline", count)
            self._warnings.warning("%s: no time was left to load %d pages", tier.name, count)

    def _forget(self, tier: RemoteTier, listing: int, keys: Sequence[bytes], reason: str) -> None:
        """Let a tier answer False for pages that it could not load; count why.

        A tier that was opened again meanwhile, as by a clear, may have stored them since.
        """
        if keys:
            self.figures.lose("load", reason, len(keys))
            self._warnings.warning("%s: %d pages not loaded: %s", tier.name, len(keys), reason)
            self._lookup.forget(tier, listing, keys)

    # ---- stores ----

    def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> list[bool]:
        """Store pages on all tiers, the head first.

        True where all tiers had the page, or one has stored it now.
        """
        sizes = self._sizes(keys, pages)
        until_s = time.monotonic() + self._config.store_timeout_s
        num_bars = self._num_bars
        if self._is_barred:
            self.figures.lose("store", "barred", len(keys))
            return [False] * len(keys)
        held = [self._lookup.holds(tier, keys) for tier in self._tiers]
        ok = [all(here) for here in zip(*held, strict=True)]
        self.figures.count("already_stored", sum(ok))
        left = deque(i for i, stored in enumerate(ok) if not stored)
        news: SimpleQueue[News] = SimpleQueue()
        running: set[PageJob] = set()
        while left or running:
            until = 0.0 if running else until_s
            if left and (lent := self._lend(left, until, storing=True)):
                places, lease = lent
                self._copy([pages[i] for i in places], lease.slots, into_slot=True)
                self._staging.release(lease)
                running |= self._store(places, lease, keys, sizes, news, num_bars)
                continue
            told = self._next(news, until_s) if running else None
            if told is None:
                break
            running.remove(told.job)
            for number in told.numbers:
                ok[told.job.places[number]] = True
            if missing := len(told.job.places) - len(told.numbers):
                self.figures.lose("store", told.reason, missing)
        for job in running:
            job.give_up()
        if late := len({*left, *(i for job in running for i in job.places)}):
            self.figures.lose("store", "deadline", late)
        self.figures.count("stored", sum(ok))
        return ok

    def _store(
        self,
        places: Sequence[int],
        lease: Lease,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        news: "SimpleQueue[News]",
        num_bars: int,
    ) -> set[PageJob]:
        """Begin the stores of copied pages on all tiers; of none if weights may have changed.

        A tier whose late calls keep its share of slots gets none either.
        """
        asked = [keys[i] for i in places]
        told_sizes = _shortened([sizes[i] for i in places])
        with self._changing:
            begun, is_barred = set[PageJob](), num_bars != self._num_bars
            for tier in self._tiers:
                if is_barred or self._staging.are_late(tier.name):
                    self._staging.release(lease)
                    if not is_barred:
                        self.figures.lose("store", "hung", len(asked))
                    continue
                begun.add(each := PageJob(places, lease, news, tier.name, self._staging))
                order = Store(0, tier.name, asked, list(lease.slots), told_sizes)
                self._client.begin(order, each)
        if is_barred:
            self.figures.lose("store", "barred", len(asked))
        return begun

    # ---- both ----

    def _sizes(self, keys: Sequence[bytes], pages: Sequence[Page]) -> list[int]:
        """Return the bytes of each page; ValueError: one does not fit into a slot."""
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys, but {len(pages)} pages")
        sizes = list(map(num_bytes, pages))
        if (most := max(sizes, default=0)) > self.slot_bytes:
            raise ValueError(f"a page of {most} bytes, slots have {self.slot_bytes}")
        return sizes

    def _lend(
        self, left: "deque[int]", until_s: float, *, storing: bool
    ) -> tuple[list[int], Lease] | None:
        """Take slots for the next pages, for this call and each tier that gets them.

        Callers wait for slots only if no job of theirs runs that will give some.
        """
        count = min(len(left), self._pages_per_store if storing else self._pages_per_load)
        num_holders = 1 + (len(self._tiers) if storing else 1)
        lease = self._staging.lend(count, num_holders, storing=storing, until_s=until_s)
        return ([left.popleft() for _ in lease.slots], lease) if lease else None

    @staticmethod
    def _next(news: "SimpleQueue[News]", until_s: float) -> News | None:
        try:
            return next_within(news, max(0.0, until_s - time.monotonic()))
        except Empty:
            return None

    def _copy(self, pages: Sequence[Page], slots: Sequence[int], *, into_slot: bool) -> None:
        """Copy pages between the engine's memory and slots; ctypes releases the GIL."""
        begun_s, copied, move = time.monotonic(), 0, ctypes.memmove
        start, slot_bytes = self._io.slab.address, self.slot_bytes
        for page, slot in zip(pages, slots, strict=True):
            begin = at = start + slot * slot_bytes
            for address, size in page:
                if into_slot:
                    move(at, address, size)
                else:
                    move(address, at, size)
                at += size
            copied += at - begin
        seconds = time.monotonic() - begun_s
        self.figures.copied(len(slots), copied, seconds, into_slot=into_slot)

    # ---- resets and the end ----

    def bar(self) -> None:
        """Load and store nothing from now on, in calls that run now as well.

        Stores that have begun go on: their pages were copied before, under the namespace of then.
        """
        with self._changing:
            self._is_barred = True
            self._num_bars += 1

    def begin_generation(self, name: str) -> None:
        """Go on with pages of new weights alone, which neither a restart nor another engine finds.

        Args:
            name: of the generation; no other start of any engine has it.
        """
        with self._clearing:
            try:
                self._io.renew(name, RENEW_S)
            except (ConfigError, OSError) as error:  # the server goes on trying
                self._warnings.warning("the tiers cannot be opened again yet: %s", error)
            with self._changing:
                self._is_barred = False

    def clear(self) -> None:
        """Remove all pages of this namespace, whichever engine stored them.

        Until that is done every page is a miss, and none is stored.

        Raises:
            ConfigError: it is not done yet; it goes on.
            OSError: a tier could not remove some, and serves them.
        """
        with self._clearing:
            self._io.clear(timeout_s=CLEAR_S)

    def close(self) -> None:
        """Close the stores. Idempotent; from now on every page is a miss."""
        self._io.close()


def num_bytes(page: Page) -> int:
    """Return the bytes of all parts of a page."""
    return sum(size for _, size in page)


def _shortened(sizes: list[int]) -> int | list[int]:
    """Return sizes as messages have them: one number if all are equal."""
    return sizes[0] if sizes.count(sizes[0]) == len(sizes) else sizes
