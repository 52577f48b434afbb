"""When a server that died is started again."""

import pytest

from kvoffload.io import backoff as backoff_module
from kvoffload.io.backoff import LONGEST_S, STEADY_S, Backoff


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def pause(backoff, clock):
    """Wait until the backoff is over; return for how long."""
    begun_s = clock.now_s
    while not backoff.is_over:
        clock.now_s += 0.001
    return round(clock.now_s - begun_s, 1)


def test_the_first_start_waits_for_nothing_and_each_further_one_longer(clock):
    backoff, pauses = Backoff(clock), []
    for _ in range(9):
        backoff.died()
        pauses.append(pause(backoff, clock))
        backoff.started()
    assert pauses == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_S, LONGEST_S]


def test_the_death_of_a_steady_server_counts_as_a_first_one(clock):
    backoff = Backoff(clock)
    for lived_s, expected_s in ((0, 0), (STEADY_S - 0.1, 0.1), (STEADY_S, 0), (0, 0.1)):
        backoff.started()
        clock.now_s += lived_s
        backoff.died()
        assert pause(backoff, clock) == expected_s


def test_starts_that_fail_wait_longer_although_the_last_server_was_steady(clock):
    backoff = Backoff(clock)
    clock.now_s += 2 * STEADY_S
    backoff.died()
    pauses = [pause(backoff, clock)]
    for _ in range(3):
        backoff.failed()
        pauses.append(pause(backoff, clock))
    assert pauses == [0, 0.1, 0.2, 0.4]


def test_a_process_that_dies_first_is_replaced_at_once_and_the_next_one_later(
    process_rig, until, monkeypatch
):
    monkeypatch.setattr(backoff_module, "SHORTEST_S", 3600.0)
    monkeypatch.setattr(backoff_module, "LONGEST_S", 3600.0)
    monkeypatch.setattr(backoff_module, "STEADY_S", 3600.0)
    client = process_rig.open()
    real, starts = client._start, []
    monkeypatch.setattr(client, "_start", lambda: starts.append(first.wait(0)) or real())
    first = client._peer
    first.kill()
    until(lambda: starts and not client._is_opening)
    assert starts == [True], "the next process was started before the first one was reaped"
    second = client._peer
    second.kill()
    until(lambda: client.died == 2 and second.wait(0))
    until(lambda: not client._backoff.is_over)
    assert len(starts) == 1
