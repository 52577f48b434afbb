"""The circuit breaker on a clock of its own."""

import pytest

from kvoffload.backends.redis.circuit_breaker import CircuitBreaker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def opened(clock, nbytes=0, **settings):
    breaker = CircuitBreaker(clock=clock, **settings)
    for _ in range(3):
        breaker.failure("load", nbytes=nbytes)
    return breaker


def test_three_failures_in_a_row_open_it(clock):
    breaker = CircuitBreaker(clock=clock)
    assert [breaker.failure("load") for _ in range(3)] == [False, False, True]
    assert breaker.is_open


def test_a_success_between_failures_starts_the_count_anew(clock):
    breaker = CircuitBreaker(clock=clock)
    for _ in range(10):
        breaker.failure("load")
        breaker.failure("load")
        breaker.success("load")
    assert not breaker.is_open


def test_a_second_of_trouble_opens_it_whatever_the_count(clock):
    breaker = CircuitBreaker(clock=clock)
    assert not breaker.failure("load", lasted_s=0.5)
    clock.now += 0.5
    assert breaker.failure("load", lasted_s=0.5)


def test_one_failure_that_took_a_second_to_show_opens_it(clock):
    assert CircuitBreaker(clock=clock).failure("load", lasted_s=1.0)


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_probes_are_at_least_a_second_apart_and_never_all_at_once(clock, jitter):
    breaker = opened(clock, jitter=lambda: jitter)
    for _ in range(5):
        assert 1.0 <= breaker.probe_in() < 1.34
        clock.now += breaker.probe_in()
        assert breaker.probe_in() == pytest.approx(0.0, abs=1e-9)
        breaker.probe_failed()


def test_a_good_probe_closes_it_and_the_next_failure_opens_it_at_once(clock):
    breaker = opened(clock)
    breaker.probe_succeeded()
    assert not breaker.is_open
    clock.now += 60
    assert breaker.failure("load")
    breaker.probe_succeeded()
    breaker.success("load")
    assert not breaker.failure("load")


def test_open_it_counts_nothing(clock):
    breaker = opened(clock)
    assert not breaker.failure("load")
    breaker.success("load")
    assert breaker.is_open


def test_kinds_of_work_are_counted_apart(clock):
    breaker = CircuitBreaker(clock=clock)
    for _ in range(2):
        breaker.failure("load")
        breaker.success("lookup")
        breaker.success("store", 1 << 20)
        breaker.failure("lookup")
    assert breaker.failure("load")


def test_only_a_success_about_as_large_as_what_failed_starts_the_count_anew(clock):
    breaker = CircuitBreaker(clock=clock)
    breaker.failure("load", nbytes=2 << 20)
    breaker.failure("load", nbytes=64 << 10)
    breaker.success("load", 64 << 10)
    assert breaker.failure("load", nbytes=64 << 10)
    breaker.probe_succeeded()
    breaker.success("load", 64 << 10)
    assert breaker.failure("load", nbytes=64 << 10)
    breaker.probe_succeeded()
    breaker.success("load", 1 << 20)
    assert not breaker.failure("load", nbytes=2 << 20)


def test_probes_that_promise_too_much_become_rarer_until_something_succeeds(clock):
    breaker = CircuitBreaker(clock=clock, jitter=lambda: 0.0)
    pauses = []
    for _ in range(8):
        while not breaker.failure("load", nbytes=1000):
            pass
        pauses.append(breaker.probe_in())
        clock.now += breaker.probe_in()
        breaker.probe_succeeded()
        breaker.success("lookup")
    assert pauses == [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    breaker.success("load", 1000)
    while not breaker.failure("load", nbytes=1000):
        pass
    assert breaker.probe_in() == 1.0


def test_a_late_success_changes_nothing_in_an_open_breaker(clock):
    """The load was in flight when another request opened the breaker."""
    breaker = opened(clock, nbytes=1000)
    breaker.success("load", 1000)
    breaker.probe_succeeded()
    assert breaker.failure("load", nbytes=1000)


def test_only_the_kind_of_request_that_opened_the_breaker_relapses(clock):
    breaker = opened(clock, jitter=lambda: 0.0)
    for pause in (1.0, 2.0):
        breaker.probe_succeeded()
        assert breaker.failure("load")
        assert breaker.probe_in() == pause
    breaker.probe_succeeded()
    assert [breaker.failure("store") for _ in range(3)] == [False, False, True]
    assert breaker.probe_in() == 1.0
