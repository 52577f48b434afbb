"""The list of metrics on vLLM's own page: what one step costs, and what a real engine shows."""

import time
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from kvoffload.connectors.vllm.engine_metrics import (
    MAX_NAMESPACES,
    SAMPLES_PER_STEP,
    EngineStats,
    StatsPublisher,
    hit_tokens,
    metric_definitions,
)
from kvoffload.messages import make_offload_key
from kvoffload.metrics.names import (
    BREAKERS_OPEN,
    LOAD_BYTES,
    LOAD_SECONDS,
    METRICS,
    NAMESPACE,
    PREFIX,
    TIER_EVENTS,
)
from kvoffload.metrics.samples import Durations
from tests.support.prometheus import scrape
from tests.support.redis_server import free_port

pytestmark = pytest.mark.timeout(900)

FRESH = (LOAD_BYTES, ("disk",))
OURS = "vllm:" + PREFIX


@pytest.fixture
def publisher():
    return StatsPublisher(clock=count(0.0, 10.0).__next__)


def publish(publisher, samples):
    """Let steps publish all samples once; return what vLLM would be told, added up."""
    stats = EngineStats()
    while True:
        if step := publisher.collect(lambda: samples):
            stats.aggregate(step)
        if not publisher.is_midway:
            return stats.data["data"]


def test_a_counter_begins_at_zero_and_then_tells_what_was_added(publisher):
    name, labels = FRESH
    assert publish(publisher, [(*FRESH, 0)])[OURS + name] == {labels: 0}
    assert publish(publisher, [(*FRESH, 5)])[OURS + name] == {labels: 5}
    assert OURS + name not in publish(publisher, [(*FRESH, 5)])
    assert publish(publisher, [(*FRESH, 7)])[OURS + name] == {labels: 2}


def test_a_gauge_falls_again(publisher):
    name = BREAKERS_OPEN
    for value in (1, 0, 3):
        told = publish(publisher, [(name, ("redis",), value)])
        assert told[OURS + name] == {("redis",): value}


def test_after_a_renewal_the_old_namespace_is_0(publisher):
    name = OURS + NAMESPACE
    for tells in ({"a": 1}, {"b": 1, "a": 0}, {"c": 1, "b": 0}):
        current = next(iter(tells))
        told = publish(publisher, [(NAMESPACE, (current,), 1), (*FRESH, 0)])
        assert told[name] == {(each,): value for each, value in tells.items()}
    assert publish(publisher, [(NAMESPACE, ("c",), 1)]) == {}


def test_an_engine_with_many_renewals_tells_a_bounded_number_of_namespaces(publisher):
    told = Counter()
    for i in range(2 * MAX_NAMESPACES):
        stats = publish(publisher, [(NAMESPACE, (str(i),), 1)])
        told.update(stats.get(OURS + NAMESPACE, {}).keys())
    assert len(told) == MAX_NAMESPACES
    assert max(told.values()) == 2  # 1, then 0


def test_durations_arrive_in_their_buckets_with_their_sum(publisher):
    name, labels, now = OURS + LOAD_SECONDS, ("disk",), Durations()
    assert publish(publisher, [(LOAD_SECONDS, labels, Durations())])[name] == {labels: []}
    for seconds in (0.003, 0.004, 0.3, 70.0):
        now.add(seconds)
    told = publish(publisher, [(LOAD_SECONDS, labels, now)])[name][labels]
    assert told == pytest.approx([0.0035, 0.0035, 0.3, 70.0])


def test_figures_that_did_not_change_are_not_told_again(publisher):
    samples = [(TIER_EVENTS, ("disk", str(i)), i) for i in range(200)]
    assert publish(publisher, samples)
    assert publish(publisher, samples) == {}


def test_a_step_looks_at_a_bounded_number_of_metrics_whatever_there_are(publisher):
    """The operations count, not the time: 10,000 series cost a step as much as 8."""
    seen, calls = [], []
    samples = ((TIER_EVENTS, ("disk", str(i)), i) for i in range(10_000))

    def observed():
        calls.append(1)
        for sample in samples:
            seen.append(sample)
            yield sample

    assert SAMPLES_PER_STEP <= 8
    for step in range(1, 5):
        stats = publisher.collect(observed)
        assert len(seen) == step * SAMPLES_PER_STEP
        assert len(stats.data["data"]["vllm:kvoffload_tier_events"]) <= SAMPLES_PER_STEP
    assert calls == [1]


def test_between_publications_a_step_reads_no_figure():
    clock = iter((0.0, 0.5, 0.9, 1.1)).__next__
    publisher, calls = StatsPublisher(clock), []
    for _ in range(4):
        publisher.collect(lambda: calls.append(1) or [(*FRESH, len(calls))])
    assert len(calls) == 2


def test_the_last_step_publishes_all_at_once_and_again_what_a_publication_had_begun():
    publisher = StatsPublisher(clock=lambda: 0.0)
    samples = [(TIER_EVENTS, ("disk", str(i)), 1) for i in range(200)]
    publisher.collect(lambda: samples)
    assert publisher.is_midway
    changed = [(name, labels, 2) for name, labels, _ in samples]
    publisher.publish_all()
    told = publisher.collect(lambda: changed).data["data"]["vllm:kvoffload_tier_events"]
    assert sorted(told.values()) == [1] * SAMPLES_PER_STEP + [2] * (200 - SAMPLES_PER_STEP)
    assert not publisher.is_midway
    assert publisher.collect(lambda: samples) is None  # it is not time yet


def test_the_log_line_of_vllm_leaves_most_of_the_list_out():
    stats = EngineStats()
    stats.increase_counter("vllm:kvoffload_events", 1, ("load_refused",))
    stats.increase_counter("vllm:kvoffload_load_bytes", 1, ("disk",))
    assert list(stats.reduce()) == ["vllm:kvoffload_events:('load_refused',)"]


def test_hit_tokens_end_at_the_first_failed_chunk_of_the_group_that_reads_whole_prompts():
    window = SimpleNamespace(group_idx=0, tokens_per_chunk=16, sliding_window_size_in_chunks=2)
    whole = SimpleNamespace(group_idx=1, tokens_per_chunk=32, sliding_window_size_in_chunks=None)
    keys = [make_offload_key(bytes([i]) * 32, group) for i in range(4) for group in (0, 1)]
    job = SimpleNamespace(keys=keys, media=lambda: ["CPU", "CPU"] + ["DISK"] * 6)
    ok = (False, True, True, True, True, False, True, True)
    assert hit_tokens(job, ok, (window, whole)) == {"cpu": 32, "disk": 32}
    assert hit_tokens(job, ok, (window,)) == {}


def test_every_metric_of_the_list_is_declared():
    assert {OURS + name for name in METRICS} <= set(metric_definitions())


def test_a_real_engine_shows_its_tiers_on_the_page_of_vllm(start, prompts, tmp_path):
    port = free_port()
    engine = start(
        {
            "cpu_bytes": 80 * 65536,  # room for one prompt: none is stored in part
            "backends": [{"type": "disk", "root": str(tmp_path / "root"), "capacity": "64MiB"}],
            "metrics_port": port,
        }
    )
    for prompt in prompts(4, 1000):
        engine.generate([prompt])
        engine.ask("quiet")  # its chunks are on disk: the next ones find room
    engine.ask("counted")
    assert engine.ask("reset")
    # The first prompt has left host memory.
    assert engine.generate([prompts(4, 1000)[0]])["cached"] == [992]
    until_s = time.monotonic() + 60
    while not (page := engine.ask("counted"))["vllm:kvoffload_saved_prefill_tokens"]:
        assert time.monotonic() < until_s  # the publication under way had begun before the load
    assert page["vllm:kvoffload_tier_up disk"] == 1
    assert page["vllm:kvoffload_capacity_bytes disk"] == 64 << 20
    assert page["vllm:kvoffload_resident_bytes disk"] > 0
    assert page["vllm:kvoffload_resident_bytes cpu"] > 0
    assert page["vllm:kvoffload_evictions cpu evicted"] > 0
    assert page["vllm:kvoffload_corrupt_chunks disk payload"] == 0
    assert page["vllm:kvoffload_io_restarts"] == 0
    (name,) = (name for name in page if name.startswith("vllm:kvoffload_namespace_info "))
    assert (len(name.split(" ")[1]), page[name]) == (16, 1)
    assert page["vllm:kvoffload_store_bytes disk"] > 0
    assert page["vllm:kvoffload_store_seconds disk"] > 0
    assert page["vllm:kvoffload_hit_tokens disk"] == 992
    saved = page["vllm:kvoffload_saved_prefill_tokens"]
    assert saved == page["vllm:kvoffload_hit_tokens disk"] + page["vllm:kvoffload_hit_tokens cpu"]
    own = scrape(port)
    assert own['kvoffload_tier_up{tier="disk"}'] == 1
    assert own['kvoffload_store_bytes_total{tier="disk"}'] > 0
