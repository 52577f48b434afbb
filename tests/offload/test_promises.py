"""Which loads from tiers are promised: those that arrive in time, and sooner than computed."""

import pytest
from manager_parts import Store, keys, new_manager, put

from kvoffload.offload import promises
from kvoffload.offload.base import ReqContext
from kvoffload.offload.promises import LEAST_S, PROBE_DECLINES, PROBE_S, Speed

MIB = 1 << 20
TOKENS = 16


class Engine:
    """A manager over slow tiers, with a clock; chunks of 1 MiB and of 16 tokens."""

    def __init__(self, *held, timeout_s=5.0, slots=4000):
        self.stores = [Store(each) for each in held]
        self.manager = new_manager(
            slots, self.stores, slot_bytes=MIB, load_timeout_s=timeout_s, promote=False
        )
        self.now_s = 100.0
        self.manager._host.now_s = lambda: self.now_s
        self.requests = 0

    def context(self):
        self.requests += 1
        return ReqContext(f"r{self.requests}")

    @property
    def declined(self):
        """Requests that loaded nothing from a tier, for whichever reason."""
        lookups = self.manager.figures.lookups
        return sum(n for (_, result), n in lookups.items() if result in ("declined", "not_in_time"))

    def compute(self, tokens_per_s):
        for _ in range(4):
            self.manager.promises.prefilled(tokens_per_s, 1.0)

    def find(self, wanted, context):
        """Look up as connectors do: until what is found is worth it."""
        while True:
            hits, _ = self.manager.lookup_prefix(wanted, context)
            found = wanted[:hits]
            if not hits or self.manager.promises.is_worth_loading(found, hits * TOKENS, context):
                return hits

    def begin(self, wanted):
        return self.manager.begin_load(wanted, self.context())

    def end(self, job, seconds, ok=None, reason=""):
        ok = ok or (True,) * len(job.keys)
        job.ok, job.seconds, job.reason = ok, seconds, reason
        self.manager.complete(job, ok, reason=reason)
        self.manager.reset_cache()  # the chunks are on the tier alone again

    def load(self, wanted, seconds, **end):
        job = self.begin(wanted)
        self.now_s += seconds
        self.end(job, seconds, **end)

    def learn(self, *wanted, start_s=0.0, mib_per_s=100.0, times=4):
        for _ in range(times):
            for each in wanted:
                self.load(each, start_s + len(each) / mib_per_s)


def test_what_is_not_known_declines_nothing():
    a = keys("a", 50)
    engine = Engine(a)
    assert engine.find(a, engine.context()) == 50
    engine.learn(a, mib_per_s=1, times=3)
    engine.compute(10**9)
    assert engine.find(a, engine.context()) == 50  # three loads say nothing of the tier
    engine.load(a, 50.0)
    assert engine.find(a, engine.context()) == 0
    slow = Engine(a)
    slow.learn(a, mib_per_s=1)
    assert slow.find(a, slow.context()) == 50  # nothing is known of the engine


def test_a_load_that_takes_longer_than_computing_is_declined_and_counted_once_a_request():
    a = keys("a", 100)
    engine = Engine(a)
    engine.learn(a)  # one second; 1,600 tokens
    engine.compute(1500)
    assert engine.find(a, engine.context()) == 100
    engine.compute(2000)
    put(engine.manager, a[:10])
    context = engine.context()
    for _ in range(100):  # the request waits, and is looked at in every step
        assert engine.find(a, context) == 10  # what host memory has is still used
    assert engine.manager.lookup(a[10], context) is False
    assert engine.manager.explain(a, context) == ["CPU"] * 10 + ["too_slow"] * 90
    assert engine.manager.explain(a)[10] == "TIER0"
    assert engine.manager.figures.lookups["tier0", "declined"] == 1
    assert engine.declined == 1
    engine.manager.retire((), context)
    assert engine.manager.lookup(a[10], context) is True  # another request of that name


def test_a_short_load_is_worth_it_however_fast_the_engine_is():
    a = keys("a", 100)
    engine = Engine(a)
    engine.learn(a, mib_per_s=100 / LEAST_S)
    engine.compute(10**9)
    assert engine.find(a, engine.context()) == 100
    engine.learn(a, mib_per_s=90 / LEAST_S)
    assert engine.find(a, engine.context()) == 0


def test_a_tier_that_is_declined_leaves_the_load_to_the_next_one():
    a = keys("a", 100)
    engine = Engine(a, a[:60])
    engine.learn(a)
    engine.compute(10_000)
    context = engine.context()
    assert engine.find(a, context) == 60
    job = engine.manager.begin_load(a[:60], context)
    assert job.media() == ["TIER1"] * 60
    assert engine.manager.explain(a, context)[59:61] == ["fetching", "too_slow"]


def test_what_waits_in_the_queue_of_a_tier_counts():
    a, b, c = keys("a", 100), keys("b", 100), keys("c", 100)
    engine = Engine([*a, *b, *c])
    engine.learn(a)
    engine.compute(1000)  # 1.6 s for a prompt, which takes 1 s to load
    first = engine.begin(a)
    assert engine.find(b, engine.context()) == 0
    engine.now_s += 0.5
    assert engine.find(b, engine.context()) == 100  # half of the first has arrived by now
    second = engine.manager.begin_load(b, engine.context())
    assert engine.find(c, engine.context()) == 0
    engine.now_s += 0.5
    engine.end(first, 1.0)
    assert engine.find(c, engine.context()) == 0
    engine.now_s += 1.0
    engine.end(second, 1.5)
    assert engine.find(c, engine.context()) == 100


def test_a_load_that_ends_early_leaves_the_queue_early():
    a, b, c = keys("a", 100), keys("b", 100), keys("c", 100)
    engine = Engine([*a, *b, *c])
    engine.learn(a)
    engine.compute(700)  # 2.3 s for a prompt
    first, second = engine.begin(a), engine.begin(b)
    assert engine.find(c, engine.context()) == 0
    engine.now_s += 0.1
    engine.end(first, 0.1)
    assert engine.find(c, engine.context()) == 100  # one second for the other, and one for it
    engine.now_s += 0.1
    engine.end(second, 0.2)
    engine.begin(a)
    assert engine.find(c, engine.context()) == 100


def test_loads_that_run_at_the_same_time_do_not_make_a_tier_look_slow():
    a, b = keys("a", 100), keys("b", 100)
    engine = Engine([*a, *b])
    engine.compute(1500)
    for _ in range(8):  # two at a time: each takes two seconds, the tier loads 100 MiB/s
        jobs = [engine.begin(a), engine.begin(b)]
        engine.now_s += 2.0
        for job in jobs:
            engine.end(job, 2.0)
    assert engine.find(a, engine.context()) == 100


def test_no_load_is_promised_whose_first_chunk_would_wait_longer_than_the_timeout():
    a, b, c = keys("a", 300), keys("b", 300), keys("c", 1)
    engine = Engine([*a, *b, *c])  # nothing is known of the engine
    engine.learn(a)
    engine.begin(a)
    assert engine.find(b, engine.context()) == 300
    engine.begin(b)
    context = engine.context()
    assert engine.find(c, context) == 0  # six seconds
    assert engine.manager.explain(c, context) == ["not_in_time"]
    assert engine.manager.figures.lookups["tier0", "not_in_time"] == 1
    assert engine.declined == 1
    engine.now_s += 1.5
    assert engine.find(c, engine.context()) == 1
    assert engine.find(c, context) == 0  # the request was told once


def test_a_tier_that_is_late_is_taken_to_be_as_late_again():
    a, c = keys("a", 100), keys("c", 1)
    engine = Engine([*a, *c])
    engine.learn(a)
    job = engine.begin(a)
    engine.now_s += 1.0 + 4.9
    assert engine.find(c, engine.context()) == 1
    engine.now_s += 0.2
    assert engine.find(c, engine.context()) == 0  # it hangs, perhaps
    engine.end(job, 6.1)
    assert engine.find(c, engine.context()) == 1


def declined(engine, wanted, count):
    return [engine.find(wanted, engine.context()) for _ in range(count)].count(0)


def test_a_declined_tier_is_tried_again_now_and_then_and_one_that_became_fast_is_used():
    a = keys("a", 100)
    engine = Engine(a)
    engine.learn(a)
    engine.compute(10_000)
    engine.now_s += PROBE_S
    assert declined(engine, a, PROBE_DECLINES) == PROBE_DECLINES
    context = engine.context()
    assert [engine.find(a, context) for _ in range(9)] == [100] * 9  # until it is admitted
    job = engine.manager.begin_load(a, context)
    assert declined(engine, a, 40) == 40  # one request tries it, not all
    engine.now_s += 1.0
    engine.end(job, 1.0)
    assert declined(engine, a, 40) == 40  # it is as slow as before
    engine.now_s += PROBE_S
    for _ in range(8):  # it has become fast
        assert engine.find(a, engine.context()) == 100
        engine.load(a, 0.1)
    assert engine.find(a, engine.context()) == 100
    engine.learn(a, mib_per_s=10)
    assert declined(engine, a, 1)


def test_a_load_that_fails_or_stalls_does_not_tell_how_fast_a_tier_is():
    a = keys("a", 100)
    engine = Engine(a)
    engine.learn(a)
    engine.compute(1500)
    for _ in range(8):
        engine.load(a, 0.001, ok=(False,) * 100, reason="missing")
        engine.stores[0].held.update(a)
        engine.load(a, 5.0, ok=(True,) * 50 + (False,) * 50, reason="deadline")
        engine.stores[0].held.update(a)
    assert engine.find(a, engine.context()) == 100
    engine.compute(1700)
    assert engine.find(a, engine.context()) == 0


@pytest.mark.parametrize("large", [10, 1000])
def test_a_time_is_fitted_to_a_start_and_a_time_per_byte(large):
    times = Speed()
    for _ in range(4):
        assert times.seconds(large * MIB) is None
        times.add(MIB, 0.005 + 0.001)
    assert times.seconds(MIB) == pytest.approx(0.006)
    assert times.seconds(2 * MIB) == pytest.approx(0.012)  # the start is not known yet
    assert times.seconds(large * MIB) is None  # nor are large loads
    times.add(large * MIB, 0.005 + 0.001 * large)
    assert times.seconds(large * MIB) == pytest.approx(0.005 + 0.001 * large, rel=1e-3)
    assert times.seconds(5 * MIB) == pytest.approx(0.010, rel=1e-3)


def test_a_fit_to_odd_samples_stays_sound():
    times = Speed()
    for _ in range(4):
        times.add(MIB, 2.0)
        times.add(4 * MIB, 1.0)  # larger and faster: the host was busy
    assert 1.0 < times.seconds(4 * MIB) < 2.0
    stuck = Speed()
    for _ in range(5):
        stuck.add(0, 5.0)
    assert stuck.seconds(MIB) is None


def test_requests_that_never_end_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(promises, "MAX_DECLINED", 3)
    a = keys("a", 100)
    engine = Engine(a)
    engine.learn(a)
    engine.compute(10_000)
    contexts = [engine.context() for _ in range(4)]
    assert [engine.find(a, each) for each in contexts] == [0] * 4
    assert engine.manager.lookup(a[0], contexts[0]) is True
    assert engine.manager.lookup(a[0], contexts[3]) is False
