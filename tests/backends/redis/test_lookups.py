"""Lookups of an engine in Redis: answered by the server, or from what the engine's side knows."""

import pytest

from kvoffload import open_backend
from kvoffload.io.protocol import Load, Store
from kvoffload.io.remote_tier import ANSWER_S
from kvoffload.testing.backends import CHUNK_BYTES, keys_of, payload_of
from kvoffload.transfer.slab import Slab
from tests.support.host_server import Job
from tests.support.io_rig import call, client_over
from tests.support.redis_engine import PATIENT
from tests.support.redis_server import BINARY, MISSING, free_port

needs_redis = pytest.mark.skipif(BINARY is None, reason=MISSING)
NUM_SLOTS = 4


class Engine:
    """Looks up, stores and loads through an I/O client, on a clock of its own."""

    def __init__(self, url, until, **options):
        self.until, self.now_s = until, 0.0
        self.backend = open_backend("redis", {"url": url, **PATIENT, **options}, "lookups")
        self.slab = Slab(NUM_SLOTS, CHUNK_BYTES)
        self.client = client_over({"redis": self.backend}, self.slab, lookup_timeout_s=30.0)
        self.tier = self.client.tiers["redis"]
        self.tier._cache._clock = lambda: self.now_s

    def answers(self, keys):
        """Look up like a scheduler: again until every key has an answer."""
        found = self.until(lambda: [self.known(keys)] if None not in self.known(keys) else None)
        return found[0]

    def known(self, keys):
        return [self.tier.holds(key) for key in keys]

    def store(self, keys):
        for i, key in enumerate(keys):
            self.slab.slot(i, CHUNK_BYTES)[:] = payload_of(key, CHUNK_BYTES)
        return self._moved(Store, keys)

    def load(self, keys):
        return self._moved(Load, keys)

    def counted(self, name):
        async def count():
            return {**self.backend.counters(), **self.backend.usage().gauges}.get(name, 0)

        return call(self.client, count())

    def _moved(self, kind, keys):
        job = Job()
        order = kind(0, "redis", list(keys), list(range(len(keys))), CHUNK_BYTES)
        self.client.begin(order, job)
        self.until(job.over.is_set)
        return list(map(bool, job.ok))


@pytest.fixture
def engine_on(until):
    engines = []

    def engine(url, **options):
        engines.append(Engine(url, until, **options))
        return engines[-1]

    yield engine
    for each in engines:
        each.client.close()


@needs_redis
def test_what_another_engine_stored_is_found_by_asking(server, engine_on):
    writer, asking, keys = engine_on(server.url), engine_on(server.url), keys_of(3)
    assert writer.store(keys[:2]) == [True] * 2
    assert asking.known(keys) == [None] * 3
    assert asking.answers(keys) == [True, True, False]


@needs_redis
def test_what_was_stored_is_present_without_a_question(server, engine_on, until):
    engine, keys = engine_on(server.url), keys_of(2)
    assert engine.store(keys) == [True] * 2
    until(lambda: len(engine.tier._cache._entries) == 2)  # noted after the job is answered
    assert engine.known(keys) == [True] * 2
    assert "cmdstat_exists" not in server.cli("info", "commandstats")


@needs_redis
def test_after_a_restart_old_answers_count_for_two_seconds_at_most(server, engine_on):
    engine, keys = engine_on(server.url), keys_of(2)
    assert engine.store(keys) == [True] * 2
    server.kill()
    server.start()
    engine.now_s = ANSWER_S
    assert engine.answers(keys) == [False] * 2
    assert engine.store(keys) == [True] * 2
    assert engine.load(keys) == [True] * 2


@needs_redis
def test_lookups_end_by_themselves_while_the_server_is_paused(server, engine_on, until):
    engine, keys = engine_on(server.url, timeout_s=1.0), keys_of(20)
    assert engine.store(keys[:NUM_SLOTS]) == [True] * NUM_SLOTS
    there = [True] * NUM_SLOTS + [False] * (20 - NUM_SLOTS)
    assert engine.answers(keys) == there
    server.pause()
    assert engine.answers(keys_of(50, "unknown")) == [False] * 50
    server.resume()

    def are_known_again():
        engine.now_s += ANSWER_S
        return engine.answers(keys) == there

    until(are_known_again)


def test_a_server_left_alone_is_answered_for_without_a_command(engine_on):
    engine, keys = engine_on(f"redis://127.0.0.1:{free_port()}"), keys_of(4)
    while not engine.counted("breakers_open"):
        assert engine.load(keys) == [False] * 4
    lost = engine.counted("read_lost_breaker_open")
    assert engine.answers(keys_of(500, "unknown")) == [False] * 500
    assert engine.counted("read_lost_breaker_open") == lost
