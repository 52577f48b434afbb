"""An engine of SGLang's kind on the model's tiers: its threads store and load pages all the time.

Each page that a load calls loaded has the bytes that were stored under its key and generation, and
no page is written to once the call that had it has ended. Counters say what the calls answered.
"""

import contextlib
import hashlib
import random
import threading
import time
from collections import Counter
from functools import partial
from itertools import count

from kvoffload.config import parse_config
from kvoffload.connectors.sglang.page_store import PageStore
from kvoffload.errors import ConfigError
from kvoffload.transfer.shared_memory import page_rounded
from tests.support.host_pages import Pool
from tests.support.random_model.cache import PERIOD
from tests.support.random_model.engine import others
from tests.support.random_model.spoiled import spoil

PARTS = ((1000, 472), (4096,), (8192, 4096))
"""Bytes of the parts of a page."""
LONG_PARTS = ((1 << 19, 1 << 19), (1 << 19, (1 << 19) + 4096))
"""Those beside chunks of about 1 MiB: the first have slots, the others files."""
MOST = 12
"""Pages of a call."""
PROMPTS = 8
CALL_S = 10.0
"""How much longer than its timeout a call may take on a busy machine."""


class PageEngine:
    """One that stores, one that loads, and what a scheduler orders meanwhile.

    Args:
        draw: the only source of chance.
        settings: of the other engines.
        kind: of their KV cache.
    """

    generations = count(1)

    def __init__(self, draw, settings, kind):
        self.draw = draw
        self._parts = draw.choice(LONG_PARTS if kind == "about 1 MiB" else PARTS)
        self._page = sum(self._parts)
        names = ("backends", "serve", "lookup_timeout_s", "load_timeout_s", "store_timeout_s", "io")
        self._settings = {name: settings[name] for name in names if name in settings}
        self._tiers = settings.get("backends")
        staging_bytes = draw.choice((4, 16, 64)) * page_rounded(self._page)
        self._settings |= {"cpu_bytes": 0, "staging_bytes": staging_bytes}
        self._asks = draw.random() < 0.5
        self._calls = threading.Condition()
        """Guards the generation, and the number of stores that are about to begin."""
        self._beginning = 0
        self._goes_on = threading.Event()
        self._threads, self.wrong = [], []
        self.counts = Counter()
        self._start()

    def _start(self):
        if self._tiers:
            self._settings["backends"] = others(self.draw, self._tiers)
            for tier in self._settings["backends"]:
                if tier["type"] == "rough":  # direct I/O leaves nothing to read in place
                    tier["io"] = self.draw.choice(("direct", "buffered", "buffered"))
        self.generation, config = "plain", parse_config(self._settings)
        self.store = PageStore(config, self._page, {"model": "pages"}, asks=self._asks)
        in_place = self.store._in_place
        in_place.load = partial(self._in_place, in_place.load)
        self._seen = Counter()

    def close(self):
        """Close in the midst of calls."""
        self.store.close()
        self.end()

    # ---- what a scheduler orders; on the model's thread ----

    def begin(self):
        """Let the threads store and load."""
        self._goes_on.set()
        for call in (self._save, self._load, self._load):
            self._threads.append(threading.Thread(target=self._run, args=(call,), daemon=True))
            self._threads[-1].seed = self.draw.randrange(1 << 30)
            self._threads[-1].start()

    def end(self):
        """Wait until the threads have ended; what they saw is right."""
        self._goes_on.clear()
        for thread in self._threads:
            thread.join(CALL_S + 3)
            assert not thread.is_alive(), "a call of pages hangs"
        self._threads.clear()
        assert not self.wrong, self.wrong

    def update_weights(self):
        """Go on with other weights; loads and stores that began before run on."""
        with self._calls:
            self.generation = None
            has_begun = self._calls.wait_for(lambda: not self._beginning, CALL_S)
            assert has_begun, "a store of pages does not begin"
        self.store.bar()
        name = f"pages {next(self.generations)}"
        self.store.begin_generation(name)
        with self._calls:
            self.generation = name

    def clear(self):
        """Remove all pages; a tier that cannot goes on trying."""
        with contextlib.suppress(ConfigError, OSError):
            self.store.clear()

    def restart(self):
        """Begin again with the plain weights."""
        self.end()
        self.check()
        self.store.close()
        self._start()
        self.begin()

    # ---- on threads of its own ----

    def _run(self, call):
        draw, pool = random.Random(threading.current_thread().seed), self._pool()
        while self._goes_on.is_set() and not self.wrong:
            first = draw.randrange(PROMPTS)
            keys = prompt(first, draw.randint(1, MOST))
            try:
                call(keys, pool)
            except Exception as error:
                self.wrong.append(f"{call.__name__}: {error!r}")
            time.sleep(draw.choice((0.0, 0.001, 0.02)))

    def _save(self, keys, pool):
        with self._calls:
            if (generation := self.generation) is None:
                return
            self._beginning += 1
        pool.put([self._content(key, generation) for key in keys])
        ok = self._call(self.store.save, _Keys(keys, self._begin), pool)
        self._see("stored", sum(ok))

    def _begin(self):
        with self._calls:
            self._beginning -= 1
            self._calls.notify_all()

    def _load(self, keys, pool):
        store, generation = self.store, self.generation
        leading = store.num_leading(keys)
        if not leading:
            return
        pool.memory[:] = bytes([99]) * len(pool.memory)
        ok = self._call(store.load, keys, pool)
        after = pool.read(range(len(keys)))
        meant = {generation, self.generation}
        for key, is_loaded, data in zip(keys, ok, after, strict=True):
            if is_loaded and data not in [self._content(key, each) for each in meant]:
                self.wrong.append(f"wrong bytes of page {key!r} of generation {meant}")
        self._see("loaded", sum(ok))
        time.sleep(0.002)
        if pool.read(range(len(keys))) != after:
            self.wrong.append("a page was written to after its load had ended")

    def _in_place(self, load, *asked):
        loaded = load(*asked)
        self.counts["pages in place"] += len(loaded)
        return loaded

    def _pool(self):
        return Pool(self._parts, MOST)

    def _content(self, key, generation):
        """The bytes of a page; they have a period, as those of the other engines have."""
        seed = hashlib.blake2b(key + str(generation).encode(), digest_size=PERIOD).digest()
        return (seed * (self._page // PERIOD + 1))[: self._page]

    def _call(self, call, keys, pool):
        begun_s = time.monotonic()
        ok = call(keys, pool.pages(range(len(keys))))
        took_s = time.monotonic() - begun_s
        assert len(ok) == len(keys), f"{len(ok)} answers for {len(keys)} pages"
        assert took_s < CALL_S, f"a call of pages took {took_s:.1f} s"
        return ok

    def _see(self, event, number):
        with self._calls:
            self._seen[event] += number
            self.counts[f"pages {event}"] += number

    # ---- at rest; on the model's thread ----

    def left(self):
        """What is held only while a call runs, by name."""
        store, client = self.store, self.store._client
        found = {
            "slots": store._staging.num_busy,
            "late slots": sum(map(abs, store._staging.late.values())),
            "slots for stores": abs(store._staging._for_stores - store._staging._num_slots // 2),
            "I/O jobs": len(client._jobs.unanswered) + len(client._jobs.late),
            "bytes unsent": len(client._link._out),
            "tables of questions": sum(len(tier._asked_for) for tier in client.tiers.values()),
        }
        return {name: number for name, number in found.items() if number}

    def check(self):
        """Check that counters say what the calls have answered."""
        counted = self.store.figures.by_event()
        for event in ("loaded", "stored"):
            assert counted.get(event, 0) == self._seen[event], (event, counted, self._seen)

    def stores_and_loads(self, ways):
        """Return whether a page that is stored now comes back; the first ones are spoiled."""
        keys, pool = [b"rest %d" % self.draw.randrange(1 << 60)], self._pool()
        pool.put([self._content(keys[0], self.generation)])
        self._see("stored", sum(self._call(self.store.save, keys, pool)))
        until_s = time.monotonic() + 3.0
        while not self.store.num_leading(keys):
            if time.monotonic() > until_s:
                return False
            time.sleep(0.01)
        if is_spoiled := bool(ways):
            content = self._content(keys[0], self.generation)[:PERIOD]
            spoil(ways.pop(), keys, [content], *self.stores)
        pool.memory[:] = bytes(len(pool.memory))
        ok = self._call(self.store.load, keys, pool)
        self._see("loaded", sum(ok))
        assert not ok[0] or pool.read(range(1)) == [self._content(keys[0], self.generation)], (
            "wrong bytes"
        )
        return ok[0] and not is_spoiled


class _Keys(list):
    """Keys that tell when a store is asked for them: it has noted the bars of before."""

    def __init__(self, keys, looked_at):
        super().__init__(keys)
        self._looked_at = looked_at

    def __iter__(self):
        looked_at, self._looked_at = self._looked_at, lambda: None
        looked_at()
        return super().__iter__()


def prompt(first, number):
    """Keys of a prompt: each begins with the first one."""
    return [b"prompt %d page %d" % (first, i) for i in range(number)]
