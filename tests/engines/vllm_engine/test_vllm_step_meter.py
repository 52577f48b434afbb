"""How fast vLLM computes prompts, as the scheduler half measures it."""

import random

import pytest

from kvoffload.connectors.vllm.quiet_steps import MAX_STEPS, StepMeter


class Engine:
    """Computes one step after the other; its scheduler may be ahead by some steps."""

    def __init__(self):
        self.now_s = 50.0
        self.noted = []
        self.meter = StepMeter(lambda *sample: self.noted.append(sample), lambda: self.now_s)

    def schedule(self, num_tokens, num_requests=1):
        self.meter.scheduled(num_tokens, num_requests)

    def end(self, after_s):
        self.now_s += after_s
        self.meter.ended()


def test_a_step_takes_from_its_scheduling_to_its_end_and_idle_time_counts_for_none():
    engine = Engine()
    engine.schedule(1000)
    engine.end(0.5)
    engine.now_s += 3600.0
    engine.schedule(0, 0)  # the engine only asks its workers for reports
    engine.end(0.001)
    engine.schedule(500)
    engine.end(0.25)
    assert engine.noted == [(1000, 0.5), (500, pytest.approx(0.25))]


def test_a_step_scheduled_ahead_begins_when_the_one_before_ends():
    engine = Engine()
    engine.schedule(1000)
    engine.now_s += 0.001
    engine.schedule(40, 40)  # tokens are generated, one a request
    engine.end(0.5)
    engine.schedule(2000, 40)
    engine.end(0.01)
    engine.end(1.0)
    assert engine.noted == [(1000, pytest.approx(0.501)), (2000, pytest.approx(1.0))]


def test_an_end_that_fits_no_step_and_steps_that_never_end_do_no_harm():
    engine = Engine()
    engine.meter.ended()
    for _ in range(10 * MAX_STEPS):
        engine.schedule(100)
    for _ in range(10 * MAX_STEPS):
        engine.end(1.0)
    assert len(engine.noted) == MAX_STEPS


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_whatever_is_scheduled_when_the_rate_found_is_that_of_the_prompts(ahead):
    """Steps take 5 ms, and 20 µs for each token."""
    draw, engine = random.Random(ahead), Engine()
    for _ in range(300):
        steps = [draw.choice([0, 1, 16, 500, 8000]) for _ in range(ahead)]
        for num_tokens in steps:
            engine.schedule(num_tokens)
        for num_tokens in steps:
            engine.end(0.005 + 20e-6 * num_tokens)
        engine.now_s += draw.choice([0.0, 0.0, 0.1, 10.0])
    assert {tokens for tokens, _ in engine.noted} == {500, 8000}
    for tokens, seconds in engine.noted:
        assert seconds == pytest.approx(0.005 + 20e-6 * tokens)
