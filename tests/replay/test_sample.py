"""A sample of a trace's blocks gives the rates of the whole."""

import pytest
from replays import from_ids, generate

from kvoffload.errors import ConfigError
from kvoffload.replay.sample import sampled
from kvoffload.replay.simulate import infinite
from kvoffload.replay.study import study_one
from kvoffload.replay.synthetic import WORKLOADS, SyntheticOptions


def workload(name):
    return from_ids(name, generate(name, SyntheticOptions(seed=9, requests=3000)))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_fifth_of_the_blocks_estimates_lru_within_two_points(name):
    trace = workload(name)
    some = sampled(trace, 0.2)
    assert some.distinct == pytest.approx(0.2 * trace.distinct, rel=0.02)
    for size in (1000, 3000, 10_000):
        whole, part = (study_one(each, "lru", {"": size}).hits for each in (trace, some))
        assert part.prefix_rate == pytest.approx(whole.prefix_rate, abs=0.02)
        assert part.block_rate == pytest.approx(whole.block_rate, abs=0.02)


def test_what_is_counted_of_a_sample_stands_for_all_uses():
    trace = workload("shared")
    some = sampled(trace, 0.1)
    assert infinite(some.requests, some.weights).accesses == pytest.approx(trace.accesses)


def test_a_block_that_all_requests_share_is_in_every_sample_and_counts_once():
    trace = from_ids("t", [[0, number] for number in range(1, 2001)])
    some = sampled(trace, 0.01)
    rate = infinite(some.requests, some.weights).prefix_rate
    assert rate == pytest.approx(1999 / 4000)


def test_tiers_of_a_sample_are_weighted_alike():
    trace = workload("tenants")
    whole, part = (
        study_one(each, "lru", {"cpu": 2000, "disk": 6000}) for each in (trace, sampled(trace, 0.2))
    )
    for tier in ("cpu", "disk"):
        assert part.levels[tier] == pytest.approx(whole.levels[tier], abs=0.02)


def test_a_sample_of_a_sample_is_one_of_the_whole():
    trace = workload("chat")
    some = sampled(sampled(trace, 0.5), 0.4)
    assert some.sample == 0.2
    assert infinite(some.requests, some.weights).accesses == pytest.approx(trace.accesses, rel=0.1)


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="sample"):
        sampled(from_ids("t", [[1]]), share)
