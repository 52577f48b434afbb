"""What told returns earn on a made load: as much as the bound, and lies cost little."""

import pytest

from benchmarks.replays.returns import hits, tellers
from kvoffload.replay import synthetic
from kvoffload.replay.simulate import belady
from kvoffload.replay.trace import from_timed


@pytest.fixture(scope="module")
def agents():
    name = "agent:seed=21,requests=400"
    return from_timed(name, synthetic.timed(*synthetic.parse(name)))


@pytest.mark.parametrize("slots", [200, 300, 500, 900])
def test_exact_returns_reach_the_bound_and_a_third_of_lies_costs_less_than_they_earn(agents, slots):
    tell = dict(tellers(agents))
    nothing, exact, lies = (
        hits(agents, slots, "handicap", tell[name])
        for name in ("told nothing", "told exactly", "30 % lies")
    )
    assert exact >= 0.95 * 100 * belady(agents.requests, slots).prefix_rate
    assert exact >= nothing
    assert lies >= nothing - 0.5
