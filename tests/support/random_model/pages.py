"""An engine of SGLang's kind on the model's tiers: its threads store and load pages all the time.

Each page that a load calls loaded has the bytes that were stored under its key and generation, and
no page is written to once the call that had it has ended. Counters say what the calls answered.
"""

import hashlib
import random
import threading
import time
from collections import Counter
from itertools import count

from kvoffload.config import parse_config
from kvoffload.connectors.sglang.page_store import PageStore
from tests.support.host_pages import Pool
from tests.support.random_model.cache import PERIOD

PARTS = (1000, 472)
"""Bytes of the parts of a page."""
PAGE = sum(PARTS)
MOST = 12
"""Pages of a call."""
PROMPTS = 8
CALL_S = 10.0
"""How much longer than its timeout a call may take on a busy machine."""


def content(key, generation):
    """The bytes of a page; they have a period, as those of the other engines have."""
    seed = hashlib.blake2b(key + str(generation).encode(), digest_size=PERIOD).digest()
    return (seed * (PAGE // PERIOD + 1))[:PAGE]


class PageEngine:
    """One that stores, one that loads, and what a scheduler orders meanwhile.

    Args:
        draw: the only source of chance.
        settings: of the other engines.
    """

    generations = count(1)

    def __init__(self, draw, settings):
        self.draw = draw
        names = ("backends", "serve", "lookup_timeout_s", "load_timeout_s", "store_timeout_s", "io")
        self._settings = {name: settings[name] for name in names if name in settings}
        if "backends" in settings:
            self._settings["backends"] = list(settings["backends"])
        self._settings |= {"cpu_bytes": 0, "staging_bytes": draw.choice((4, 16, 64)) * 4096}
        self._asks = draw.random() < 0.5
        self._calls = threading.Condition()
        """Guards the generation, and the number of stores that run."""
        self._storing = 0
        self._goes_on = threading.Event()
        self._threads, self.wrong = [], []
        self.counts = Counter()
        self._start()

    def _start(self):
        self.generation, config = "plain", parse_config(self._settings)
        self.store = PageStore(config, PAGE, {"model": "pages"}, asks=self._asks)
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
        """Go on with other weights; loads that began before run on."""
        self.store.bar()
        with self._calls:  # what they store was computed before
            self.generation = None
            assert self._calls.wait_for(lambda: not self._storing, CALL_S), "a store of pages hangs"
        name = f"pages {next(self.generations)}"
        self.store.begin_generation(name)
        with self._calls:
            self.generation = name

    def restart(self):
        """Begin again with the plain weights."""
        self.end()
        self.check()
        self.store.close()
        self.draw.shuffle(self._settings.get("backends", []))
        self._start()
        self.begin()

    # ---- on threads of its own ----

    def _run(self, call):
        draw, pool = random.Random(threading.current_thread().seed), Pool(PARTS, MOST)
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
            self._storing += 1
        try:
            pool.put([content(key, generation) for key in keys])
            ok = self._call(self.store.save, keys, pool)
        finally:
            with self._calls:
                self._storing -= 1
                self._calls.notify_all()
        self._see("stored", sum(ok))

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
            if is_loaded and data not in [content(key, each) for each in meant]:
                self.wrong.append(f"wrong bytes of page {key!r} of generation {meant}")
        self._see("loaded", sum(ok))
        time.sleep(0.002)
        if pool.read(range(len(keys))) != after:
            self.wrong.append("a page was written to after its load had ended")

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

    def stores_and_loads(self):
        """Return whether a page that is stored now comes back."""
        keys, pool = [b"rest %d" % self.draw.randrange(1 << 60)], Pool(PARTS, MOST)
        pool.put([content(keys[0], self.generation)])
        self._see("stored", sum(self._call(self.store.save, keys, pool)))
        until_s = time.monotonic() + 3.0
        while not self.store.num_leading(keys):
            if time.monotonic() > until_s:
                return False
            time.sleep(0.01)
        pool.memory[:] = bytes(len(pool.memory))
        ok = self._call(self.store.load, keys, pool)
        self._see("loaded", sum(ok))
        assert not ok[0] or pool.read(range(1)) == [content(keys[0], self.generation)], (
            "wrong bytes"
        )
        return ok[0]


def prompt(first, number):
    """Keys of a prompt: each begins with the first one."""
    return [b"prompt %d page %d" % (first, i) for i in range(number)]
