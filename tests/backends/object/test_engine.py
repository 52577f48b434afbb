"""Engines over an object store: through an I/O process, with a disk, and without the bucket."""

import time


def test_a_second_engine_loads_what_the_first_computed(engine, options):
    tier = {"type": "object", **options}
    first, second = engine(tier, io="thread"), engine(tier, seed=2)
    first.store("prompt")
    second.truth = first.truth
    assert second.load("other") == 0
    assert second.load("prompt") == 10
    stats = second.connector.stats()
    assert stats["tier_events"]["object"]["read_ok"] == 10
    assert stats["tier_up"]["object"] == 1
    assert set(stats["resident_bytes"]) == {"cpu"}, "a bucket's bytes are unknown, not 0"
    assert "chunks" not in stats["tier_gauges"]["object"]


def test_an_engine_goes_on_without_its_bucket(engine, s3):
    nowhere = {"timeout_s": 0.3, "endpoint": "http://127.0.0.1:1"}
    tier = {"type": "object", **s3.options(**nowhere)}
    alone = engine(tier, io="thread")
    alone.store("prompt")
    assert alone.load("prompt") == 0
    end = time.monotonic() + 10
    while alone.connector.stats()["tier_up"]["object"] and time.monotonic() < end:
        alone.load("prompt")
    assert alone.connector.stats()["tier_up"]["object"] == 0
